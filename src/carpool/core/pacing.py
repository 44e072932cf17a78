"""Work that nobody is in a hurry for gets a bounded part of a loop's time; what is beyond that waits.

A front end paces what it answers to clients who get nothing from it: refusals, mistakes, documents. They are
cheap, but somebody who asks again at once, many times over, would make them its main occupation. Told late,
that client asks less often; everybody else is read and answered as if it were not there.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.front_shares import LaneKey

T = TypeVar("T")


class _Held(NamedTuple, Generic[T]):
    item: T
    cost: float
    latest: float


class _Bucket:
    """So much time per second, saved up to a limit; it may be overdrawn by one piece of work."""

    __slots__ = ("_at", "_most", "_share", "_tokens")

    def __init__(self, share: float, most: float, now: float) -> None:
        self._share = share
        self._most = most
        self._tokens = most
        self._at = now

    def left(self, now: float) -> float:
        if now > self._at:
            self._tokens = min(self._most, self._tokens + self._share * (now - self._at))
            self._at = now
        return self._tokens

    def is_full(self, now: float) -> bool:
        return self.left(now) >= self._most

    def spend(self, cost: float) -> None:
        self._tokens = max(self._tokens - cost, -self._most)


class _Line(Generic[T]):
    """What one lane has spent, and what of it waits."""

    __slots__ = ("bucket", "held", "strict")

    def __init__(self, bucket: _Bucket) -> None:
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
        self._together = _Bucket(constants.paced_together, constants.paced_burst_s, now)
        self._lines: dict[LaneKey, _Line[T]] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._lines)

    def is_free(self, key: LaneKey, now: float) -> bool:
        """Whether this lane's work can be done at once."""
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
        """What has its turn now, or has waited for long enough."""
        found: list[T] = []
        lines = [(key, line) for key, line in self._lines.items() if line.held]
        while lines:
            going = [(key, line) for key, line in lines if self._may_go(line, now)]
            for key, line in going:
                if self._may_go(line, now):
                    held = line.held.popleft()
                    self.spend(key, held.cost, now)
                    found.append(held.item)
            lines = [(key, line) for key, line in going if line.held]
        self.waiting -= len(found)
        if found:
            self._start_elsewhere(now)
        return found

    def _may_go(self, line: _Line[T], now: float) -> bool:
        if line.held[0].latest <= now:
            return True
        return line.bucket.left(now) > 0.0 and self._together.left(now) > 0.0

    def _start_elsewhere(self, now: float) -> None:
        """Nobody is always the first to get what is left for all. Who owes nothing is forgotten."""
        first = next(iter(self._lines))
        self._lines[first] = self._lines.pop(first)
        for line in self._lines.values():
            line.strict = line.strict and bool(line.held)
        self._forget(now)

    def _forget(self, now: float) -> None:
        self._lines = {
            key: line for key, line in self._lines.items() if line.held or not line.bucket.is_full(now)
        }

    def _line(self, key: LaneKey, now: float) -> _Line[T]:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= self._constants.max_lanes:
                self._forget(now)
            bucket = _Bucket(self._constants.paced_share, self._constants.paced_burst_s, now)
            line = self._lines[key] = _Line(bucket)
        line.bucket.left(now)
        return line
