"""Defines what goes down and up between a request and the features around the engine.

A feature is a wrapper: it has the `infer` of a door, and passes on what it does not answer itself. Above the
bottom (`placed_call.Placing`) an `Ask` has a content in the place of a slot, and answers come as `Made`. A
feature may answer before its `infer` returns; doors never do. The content is the feature's from the moment
that its `infer` has returned, and stays the caller's if that raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from carpool.cache.answer_store import Kept
from carpool.cache.cache_key import Wish
from carpool.cache.cache_status import CacheStatus
from carpool.errors import CarpoolError
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.link.door import Answer, Ask, Call, Hears, ModelEntry
from carpool.observe.counters import Row
from carpool.types import Timing
from carpool.wire.v2 import Placed, RequestHead


class Infers(Protocol):
    """Defines a door, or what is wrapped around one."""

    def infer(self, ask: Ask, hears: Hears) -> Call: ...


class Feature(Protocol):
    """Something that requests for some versions get besides being run."""

    def around(self, inner: Infers, entry: ModelEntry) -> Infers:
        """Returns what serves this version, with the feature; `inner` itself where that is switched off."""


class Asker(Protocol):
    """Defines the request's own side: what is known of it besides what is asked."""

    @property
    def entry(self) -> ModelEntry:
        """Returns what was to serve it when it came, and where that is counted."""

    @property
    def row(self) -> Row | None: ...

    @property
    def client(self) -> str:
        """Returns whose account it is charged to, or its address."""

    @property
    def form(self) -> str:
        """Returns the form of its answers, by which those of other protocols are told apart; empty: they are
        not kept."""

    @property
    def wish(self) -> Wish:
        """Returns what it says about caches."""

    @property
    def looked(self) -> object:
        """Returns what was found where its answer was looked for already."""

    @property
    def rollout(self) -> object:
        """Returns what chose between two versions for it; None where it named one."""

    @property
    def refuses_many(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]: ...

    def named(self, head: RequestHead) -> RequestHead:
        """Returns the head with the request's own id, where the head is one that many share."""

    def answer_takes_long(self) -> None:
        """Notes that a thread works on the answer."""

    def encode(self, made: Made) -> Kept:
        """Returns the outputs as they are sent, without what belongs to this request alone. Also when its
        client has left: others may wait for the same."""


@dataclass(slots=True)
class Made(Answer):
    """Describes an answer that is ready to be written. Its outputs may be views that end with
    `Hears.done`."""

    entry: ModelEntry | None = None  # who gave it
    pictures: SentPictures | None = None  # what it answers, where that were pictures
    placed: Mapping[str, Placed] = field(default_factory=dict)  # outputs that are in the client's memory
    kept: Kept | None = None  # the same, encoded
    cache_status: CacheStatus | None = None
    heard: bool = True  # the engine has heard of the request
    offered_at: float = 0.0
    done_at: float = 0.0
    fields: bytes = b""  # more for the head of the answer, over HTTP


def not_made(error: CarpoolError, *, heard: bool = False, timing: Timing | None = None) -> Made:
    return Made(error=error, heard=heard, timing=timing or Timing())
