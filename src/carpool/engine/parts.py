"""Many answers to one request: their way from a model's thread to the front end that waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from carpool.core.job import RUNNING
from carpool.engine.batch import Work
from carpool.link.records import FINISHES, LAST, PART, TO_FRONTEND, Outbox
from carpool.types import Array

_AHEAD = 8  # answers of one instance that its model may be ahead of the loop
_MOST_UNSENT = 1 << 20  # bytes that a front end has not taken, above which its models wait
_LOOK_S = 0.002  # between two looks at a front end that takes nothing
_LOOK_AT_RIDER_S = 0.1


class PartSink(Protocol):
    """Where the answers of one request go, until it is `done`. Of the loop's thread."""

    @property
    def full(self) -> bool:
        """Whoever can wait should, before the next."""

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        """What `RequestPlace.part` made of the outputs; `finish` is one of `FINISHES`. With `last` no other
        follows, although the end of the request does."""


class LinkParts:
    """Implements `PartSink`: into the records of one call."""

    __slots__ = ("_call", "_outbox")

    def __init__(self, outbox: Outbox, call: int) -> None:
        self._outbox = outbox
        self._call = call

    @property
    def full(self) -> bool:
        return self._outbox.unsent > _MOST_UNSENT

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        outbox = self._outbox
        if outbox.full:
            outbox.failed("it does not take its answers")
            return
        ends = FINISHES.index(finish)
        times = 0.0, 0.0, 0.0, 0.0, monotonic()
        outbox.put(TO_FRONTEND.pack(PART, len(payload), self._call, 0, ends, LAST * last, *times) + payload)


class PartWay:
    """From the thread of one instance to the loop. The thread waits when it is too far ahead, so that a model
    which answers without end fills no memory.

    Answers keep their order, and the end comes after them: all of it goes through the loop's one queue.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = threading.Semaphore(_AHEAD)  # taken in the thread, given back in the loop

    def send(self, work: Work, outputs: Mapping[str, Array], finish: str = "", *, last: bool = False) -> bool:
        """In the model's thread. False: nobody wants more of it. ModelError for what cannot be sent."""
        # Only the loop's thread changes the state, and only away from RUNNING: to read it late costs one
        # answer, which `_deliver` drops.
        if work.state is not RUNNING or work.place is None:
            return False
        payload = work.place.part(outputs)
        while not self._room.acquire(timeout=_LOOK_AT_RIDER_S):
            if work.state is not RUNNING:
                return False
        self._loop.call_soon_threadsafe(self._deliver, work, payload, finish, last)
        return True

    def _deliver(self, work: Work, payload: bytes, finish: str, last: bool) -> None:
        parts = work.parts
        if parts is not None and work.state is RUNNING:  # else it was answered, or its client has gone
            parts.send(payload, finish, last=last)
        self._make_room(parts)

    def _make_room(self, parts: PartSink | None) -> None:
        if parts is not None and parts.full:
            self._loop.call_later(_LOOK_S, self._make_room, parts)
        else:
            self._room.release()
