"""Paces work that is not urgent: rejections, errors and documents, by who has caused it."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from carpool.core.bucket import Bucket
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.front_load import LaneKey

PACED_SHARE: Final = 0.05
PACED_TOGETHER: Final = 0.15
PACED_BURST_S: Final = 0.02
"""One lane's refusals, mistakes and documents get a twentieth of a front end's time, those of all three
twentieths; so much of it may be used at once. What is beyond is answered later."""

T = TypeVar("T")


class _Held(NamedTuple, Generic[T]):
    item: T
    cost: float
    latest: float


class _LaneWork(Generic[T]):
    """Records what one lane has spent, and what of it waits."""

    __slots__ = ("bucket", "held", "strict")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.held: deque[_Held[T]] = deque()
        self.strict = False


class Pacer(Generic[T]):
    """Each lane has its part of the time, and all together have theirs, taken in turns.

    `strict` is a lane that makes others late: it waits for its turn. Others wait at most as long as is said,
    and may then take more than their part. Strictness ends when nothing of the lane waits any more.
    """

    def __init__(self, now: float, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._together = Bucket(PACED_TOGETHER, PACED_BURST_S, now, PACED_BURST_S)
        self._lines: dict[LaneKey, _LaneWork[T]] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._lines)

    def is_free(self, key: LaneKey, now: float) -> bool:
        """Returns whether this lane's work can be done at once."""
        line = self._lines.get(key)
        if line is not None and (line.held or line.bucket.left(now) <= 0.0):
            return False
        return self._together.left(now) > 0.0

    def spend(self, key: LaneKey, cost: float, now: float) -> None:
        self._line(key, now).bucket.spend(cost)
        self._together.left(now)
        self._together.spend(cost)

    def hold(self, key: LaneKey, item: T, cost: float, now: float, wait: float, *, strict: bool) -> None:
        """Keep it for later, for `wait` seconds at most unless the lane is strict."""
        line = self._line(key, now)
        line.strict = line.strict or strict
        longest = self._constants.paced_longest_s
        latest = now + (longest if line.strict else min(wait, longest))
        line.held.append(_Held(item, cost, latest))
        self.waiting += 1

    def due(self, now: float) -> list[T]:
        """Returns what has its turn now, or has waited for long enough."""
        found: list[T] = []
        lines = [line for line in self._lines.values() if line.held]
        self._together.left(now)
        for line in lines:
            line.bucket.left(now)
        while lines:
            lines = [line for line in lines if self._first_goes(line, now, found)]
        self.waiting -= len(found)
        if found:
            self._start_elsewhere(now)
        return found

    def _first_goes(self, line: _LaneWork[T], now: float, found: list[T]) -> bool:
        """Lets the first of a lane go, if it may; whether others wait behind it."""
        item, cost, latest = line.held[0]
        bucket, together = line.bucket, self._together
        if latest > now and (bucket.tokens <= 0.0 or together.tokens <= 0.0):
            return False
        line.held.popleft()
        bucket.spend(cost)
        together.spend(cost)
        found.append(item)
        return bool(line.held)

    def soonest(self, now: float) -> float:
        """Returns the seconds until one of those that wait has waited for long enough."""
        return min((line.held[0].latest for line in self._lines.values() if line.held), default=now) - now

    def _start_elsewhere(self, now: float) -> None:
        """Moves the first line to the end, so that none is always first to get what is left for all. A line
        that owes nothing is forgotten."""
        first = next(iter(self._lines))
        self._lines[first] = self._lines.pop(first)
        for line in self._lines.values():
            line.strict = line.strict and bool(line.held)
        self._forget(now)

    def _forget(self, now: float) -> None:
        self._lines = {
            key: line for key, line in self._lines.items() if line.held or not line.bucket.is_full(now)
        }

    def _line(self, key: LaneKey, now: float) -> _LaneWork[T]:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= self._constants.max_lanes:
                self._forget(now)
            burst = PACED_BURST_S
            bucket = Bucket(PACED_SHARE, burst, now, burst)
            line = self._lines[key] = _LaneWork(bucket)
        line.bucket.left(now)
        return line
