"""What a client says beside its request, in headers over HTTP and in metadata over gRPC."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from carpool.core.job import INFINITY
from carpool.errors import InvalidInput
from carpool.types import RequestOptions
from carpool.wire import head

DEADLINE = "X-Carpool-Deadline-Ms"
SOURCE = "X-Carpool-Source"
LATEST = "X-Carpool-Latest"

_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Key(Protocol):
    """What matters here of a key that came with a request."""

    @property
    def name(self) -> str:
        """Of its holder."""

    @property
    def priority(self) -> int: ...

    @property
    def weight(self) -> float: ...


class Sender(NamedTuple):
    """Who asks. `latest`: a newer frame of this source takes the place of one that waits.

    `priority` is that of the key: the most urgent that a request with it may be, and what it is by default;
    0 is none, and 1 the most urgent: a request has the larger of its own and this. `holder` has the key, and
    `weight` is its part of a busy device, which all sources that it names share.
    """

    source: str = ""
    latest: bool = False
    priority: int = 0
    holder: str = ""
    weight: float = 1.0

    def with_key(self, key: Key) -> Sender:
        """The sources that a holder names are its own: none is another's, whatever it is called."""
        source = f"{key.name}/{self.source}" if self.source else key.name
        return Sender(source, self.latest, key.priority, key.name, key.weight)

    def with_options(self, options: RequestOptions) -> Sender:
        """Together with what the request's own parameters say."""
        if not (options.source or options.latest or self.latest):
            return self
        source = self.source
        if options.source and source == self.holder:  # no header names another
            source = f"{source}/{options.source}" if source else options.source
        latest = self.latest or options.latest
        return checked(Sender(source, latest, self.priority, self.holder, self.weight))


NOBODY = Sender()


def checked(sender: Sender) -> Sender:
    if sender.latest and not sender.source:
        raise InvalidInput(
            f"{LATEST} needs a source: name the camera in {SOURCE} or in the parameter source", field=LATEST
        )
    return sender


def read_budget(field: bytes | None) -> float:
    """Seconds from the request's head to the client's deadline."""
    if field is None:
        return INFINITY
    budget = float(field) / 1e3 if _MILLISECONDS.fullmatch(field) else 0.0
    if not budget:
        raise InvalidInput(f"{DEADLINE} must be a number of milliseconds above 0", field=DEADLINE)
    return budget


def read_source(field: bytes | None) -> str:
    if field is None:
        return ""
    try:
        source = field.decode()
    except UnicodeDecodeError:
        source = "\0"  # which is refused
    return head.read_source(source, SOURCE)


def read_latest(field: bytes | None) -> bool:
    if field in (None, b"0"):
        return False
    if field != b"1":
        raise InvalidInput(f"{LATEST} must be 1 or 0", field=LATEST)
    return True
