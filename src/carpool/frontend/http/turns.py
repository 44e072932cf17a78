"""How much of each turn of the loop long bodies get, all of them together.

The loop reads from every connection that has something before it looks for new ones, of which it takes one
in a turn. Without a bound for all, twenty connections with megabytes to say make a turn so long that small
requests lie unread, and new clients wait for hundreds of turns to be let in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

_WORK = 512 * 1024
_SECONDS = 0.0005
_REST_S = 0.002
_MOST = 4  # go on in one turn, if none of them takes long: each may bring a whole read


class Turns:
    """Work is counted in bytes read; what is dear for another reason counts as so many more."""

    __slots__ = ("_left", "_loop", "_resting", "_scheduled", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = _WORK
        self._waiting: deque[Callable[[], None]] = deque()
        self._resting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    @property
    def used_up(self) -> bool:
        """Whether all of this turn's work is done: who has more waits for another."""
        return self._left <= 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def spend(self, work: int) -> None:
        self._left -= work
        self._schedule()

    def wait(self, go_on: Callable[[], None], *, first: bool = False) -> None:
        """To be called in a later turn, behind all who wait already or before them."""
        if first:
            self._waiting.appendleft(go_on)
        else:
            self._waiting.append(go_on)
        self._schedule()

    def rest(self, go_on: Callable[[], None]) -> None:
        """As `wait`, for who made much work of few bytes: after a pause, so that all of these together take
        a part of the loop's time and not all that is left."""
        self._resting.append(go_on)
        if len(self._resting) == 1:
            self._loop.call_later(_REST_S, self._rested)

    def _rested(self) -> None:
        self.wait(self._resting.popleft())
        if self._resting:
            self._loop.call_later(_REST_S, self._rested)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Another turn has begun."""
        self._scheduled = False
        self._left = _WORK
        ends = monotonic() + _SECONDS
        for _ in range(min(_MOST, len(self._waiting))):
            self._waiting.popleft()()
            if self._left <= 0 or monotonic() >= ends:
                break
        if self._waiting:
            self._schedule()
