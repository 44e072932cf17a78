"""Turns of a front end's loop: of what connections and streams bring, so much is done before others go on.

`Turns` is for what connections read and write; its work is counted in bytes. `StreamTurns` is for the
messages of streams, one of which can take as long to answer as a tensor while the next one is here already:
without turns, the loop would do nothing else until all streams are read to their end. There, clients take
turns, and one whose messages are mostly mistakes rests while there are others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from time import monotonic
from typing import Final, Protocol, TypeAlias

from carpool.core.job import INFINITY
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.clients.fair_queue import FairQueue

_TURN_BYTES: Final = 1536 * 1024
_TURN_S: Final = 0.0005
_REST_S: Final = 0.002
_MOST_GO_ON: Final = 8  # go on in one turn, if none of them takes long: each may bring a whole read
_STREAM_TURN_S = 0.001
_LONGEST_REST_S = 0.1

Clock: TypeAlias = Callable[[], float]


class Turns:
    """Work is counted in bytes read; what is dear for another reason counts as so many more."""

    __slots__ = ("_loop", "_resting", "_rests", "_scheduled", "_waiting", "clock", "left", "number")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock = monotonic) -> None:
        self._loop = loop
        self.clock = clock  # by which a turn is over
        self.left = _TURN_BYTES  # of this turn; who has more when it is used up waits for another
        self._waiting: deque[Callable[[], None]] = deque()
        self._resting: list[tuple[int, int, Callable[[], None]]] = []  # a heap
        self._rests = 0
        self._scheduled = False
        self.number = 1  # of this turn

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def spend(self, work: int) -> None:
        self.left -= work
        if not self._scheduled:
            self._schedule()

    def wait(self, go_on: Callable[[], None], *, first: bool = False) -> None:
        """Calls `go_on` in a later turn, behind all who wait already or before them."""
        if first:
            self._waiting.appendleft(go_on)
        else:
            self._waiting.append(go_on)
        self._schedule()

    def rest(self, go_on: Callable[[], None], before: int) -> None:
        """Does the same as `wait`, for who made much work of few bytes: after a pause, so that all of these
        together take a part of the loop's time and not all that is left. Who did it less often `before` goes
        first."""
        self._rests += 1
        heappush(self._resting, (before, self._rests, go_on))
        if len(self._resting) == 1:
            self._loop.call_later(_REST_S, self._rested)

    def _rested(self) -> None:
        self.wait(heappop(self._resting)[2])
        if self._resting:
            self._loop.call_later(_REST_S, self._rested)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        self.number += 1
        self.left = _TURN_BYTES
        clock = self.clock
        ends = clock() + _TURN_S
        for _ in range(min(_MOST_GO_ON, len(self._waiting))):
            self._waiting.popleft()()
            if self.left <= 0 or clock() >= ends:
                break
        if self._waiting:
            self._schedule()


class OpenStream(Protocol):
    """A stream, as the front end knows it while it is open."""

    client: str
    over: bool

    def go_on(self, now: float) -> bool:
        """Begin its next message; whether that was a mistake."""

    def stop(self) -> None:
        """The server stops: what was read is answered."""

    def keys_changed(self) -> None:
        """Other keys are in force: without its own it ends."""


class StreamTurns:
    """Belongs to the loop's thread."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._queue: FairQueue[OpenStream] = FairQueue(lambda one: not one.over, accounts.rest_s)
        self._next_turn: asyncio.Handle | None = None

    def push(self, stream: OpenStream) -> None:
        """It has a message, or has said all."""
        self._queue.push(stream.client, 0.0, stream)
        self._schedule(0.0)

    def _schedule(self, after_s: float) -> None:
        if self._next_turn is None:
            loop = asyncio.get_running_loop()
            self._next_turn = loop.call_later(after_s, self._next) if after_s else loop.call_soon(self._next)

    def _next(self) -> None:
        self._next_turn = None
        accounts, queue, now = self._accounts, self._queue, monotonic()
        ends = now + _STREAM_TURN_S
        while True:
            found = queue.pop(None, now)
            if found is None:
                if queue.rests_s < INFINITY:
                    self._schedule(min(queue.rests_s, _LONGEST_REST_S))
                return
            client, stream = found
            began, mistaken = now, stream.go_on(now)
            now = monotonic()
            queue.ended(client, now - began)
            if mistaken:
                accounts.spend(accounts.account(client, now), now - began, now)
            if now >= ends:
                break
        self._schedule(0.0)
