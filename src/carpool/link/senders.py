"""Says who sends a request: what its head or its parameters say of its source, deadline and priority."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from carpool.core.job import ADDRESS, INFINITY
from carpool.errors import InvalidInput
from carpool.types import RequestOptions
from carpool.wire import head

DEADLINE = "X-Carpool-Deadline-Ms"
SOURCE = "X-Carpool-Source"
LATEST = "X-Carpool-Latest"
ATTEMPT = "X-Envoy-Attempt-Count"
"""Which attempt this is: Envoy sends it by itself, and other proxies can be configured to."""
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Key(Protocol):
    """Defines what matters here of a key that came with a request."""

    @property
    def name(self) -> str:
        """Returns the name of its holder."""

    @property
    def priority(self) -> int: ...

    @property
    def weight(self) -> float: ...


class Sender(NamedTuple):
    """Describes who asks. `latest`: a newer frame of this source takes the place of one that waits.

    `priority` is that of the key: the most urgent that a request with it may be, and what it is by default;
    0 is none, and 1 the most urgent: a request has the larger of its own and this. `holder` has the key, and
    `weight` is its part of a busy device, which all sources that it names share. `again`: another server was
    asked before, and counted it. `payer` is the address of a client without a key: its source where it names
    none, and who has its places of a model whose places clients share. It begins with `ADDRESS`.
    """

    source: str = ""
    latest: bool = False
    priority: int = 0
    holder: str = ""
    weight: float = 1.0
    again: bool = False
    payer: str = ""

    @property
    def lane(self) -> str:
        """The source that it counts as."""
        return self.source or self.payer

    def paid_by(self, client: str) -> Sender:
        """Returns the sender of a request that comes from there: the holder of a key, or an address."""
        return self if self.holder or not client else self._replace(payer=ADDRESS + client)

    @property
    def named(self) -> str:
        """The source that a request names itself: a key's holder alone is none."""
        return "" if self.source == self.holder else self.source

    def with_key(self, key: Key) -> Sender:
        """The sources that a holder names are its own: none is another's, whatever it is called."""
        source = f"{key.name}/{self.source}" if self.source else key.name
        return Sender(source, self.latest, key.priority, key.name, key.weight, self.again)

    def with_options(self, options: RequestOptions) -> Sender:
        """Returns the sender together with what the request's own parameters say."""
        if not (options.source or options.latest or self.latest):
            return self
        source = self.source
        if options.source and source == self.holder:  # no header names another
            source = f"{source}/{options.source}" if source else options.source
        return checked(self._replace(source=source, latest=self.latest or options.latest))


NOBODY = Sender()


def checked(sender: Sender) -> Sender:
    if sender.latest and not sender.source:
        raise InvalidInput(
            f"{LATEST} needs a source: name the camera in {SOURCE} or in the parameter source", field=LATEST
        )
    return sender


def read_budget(field: bytes | None) -> float:
    """Returns seconds from the request's head to the client's deadline."""
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


def read_attempt(field: bytes | str | None) -> bool:
    """Returns whether a balancer reports an earlier attempt at another server; what is no number is False."""
    return field is not None and field.isdigit() and int(field[:9]) > 1
