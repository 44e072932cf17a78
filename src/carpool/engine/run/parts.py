"""Sends many answers to one request from the engine's loop to the front end that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

from carpool.link.records import FINISHES, LAST, MAX_UNSENT, PART, TO_FRONTEND, Outbox

MOST_UNSENT = 1 << 17
"""Bytes that a front end has not taken, above which parts wait here; and as many of one model's, above which
that model waits. What waits in the socket delays the next answer of every request, so this is little."""


class PartSink(Protocol):
    """Receives the answers of one request, until it is `done`. Of the loop's thread."""

    @property
    def full(self) -> bool:
        """Returns whether a model that can wait should wait before its next answer."""

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        """Sends what `RequestPlace.part` made of the outputs; `finish` is one of `FINISHES`. With `last` no
        other follows, although the end of the request does."""


class OutgoingParts:
    """Holds the parts that wait for one front end, a lane for each model. They go into its outbox in turns,
    one of each model, and only while little waits there: a client that reads slowly, or requests more than
    can be read, delays the streams of one model, and neither other models nor whole answers."""

    def __init__(self, outbox: Outbox, loop: asyncio.AbstractEventLoop) -> None:
        self.outbox = outbox
        self._loop = loop
        self._lanes: dict[int, deque[bytes]] = {}  # none is empty; the first is next
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._planned = self._paused = False

    def clear(self) -> None:
        self._lanes.clear()
        self._sizes.clear()
        self._total = 0

    def size(self, key: int) -> int:
        """Returns bytes of this model's that wait."""
        return self._sizes.get(key, 0)

    def put(self, key: int, piece: bytes) -> None:
        """What is said of the calls of one model is sent in this order."""
        if self._total > MAX_UNSENT:
            self.outbox.failed("it does not read its responses")
            return
        lane = self._lanes.setdefault(key, deque())
        lane.append(piece)
        self._sizes[key] = self._sizes.get(key, 0) + len(piece)
        self._total += len(piece)
        if not self._planned:
            self._send()

    def pause(self) -> None:
        """More than `MOST_UNSENT` waits in the outbox."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._send()

    def _send(self) -> None:
        self._planned = False
        lanes = self._lanes
        while lanes and not self._paused and self.outbox.unsent <= MOST_UNSENT:
            key = next(iter(lanes))
            lane = lanes.pop(key)
            piece = lane.popleft()
            self._total -= len(piece)
            if lane:
                lanes[key] = lane  # behind the others
                self._sizes[key] -= len(piece)
            else:
                del self._sizes[key]
            self.outbox.put(piece)
        if lanes and not self._paused:  # a socket that takes everything causes no `resume`
            self._planned = True
            self._loop.call_soon(self._send)


class LinkParts:
    """Implements `PartSink`: into the records of one call."""

    __slots__ = ("_call", "_key", "_outgoing")

    def __init__(self, outgoing: OutgoingParts, key: int, call: int) -> None:
        self._outgoing = outgoing
        self._key = key
        self._call = call

    @property
    def full(self) -> bool:
        return self._outgoing.size(self._key) > MOST_UNSENT

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        ends = FINISHES.index(finish)
        times = 0.0, 0.0, 0.0, 0.0, monotonic(), 0
        head = TO_FRONTEND.pack(PART, len(payload), self._call, 0, ends, LAST * last, *times)
        self.put(head + payload)

    def put(self, record: bytes) -> None:
        """The end of the call comes behind its parts."""
        self._outgoing.put(self._key, record)
