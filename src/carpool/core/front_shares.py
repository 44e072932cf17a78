"""Who asks how much of a front end, and who asks for more than a fair share of it."""

from __future__ import annotations

from math import exp
from typing import TypeAlias

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.shares import water_level

LaneKey: TypeAlias = tuple[str, str]
"""A model and who asks for it."""

REST: LaneKey = ("*", "*")
_FORGET_S = 0.1
_LEAST = 0.1  # of work per second: who asks for less has not been here for seconds
_LEVEL_S = 0.005  # the fair share is worked out so often at most


class Flow:
    """Work per second, as it came lately; old work counts less and less.

    What comes within a hundredth of the memory is one piece: every request adds to two of these.
    """

    __slots__ = ("_at", "_fold_at", "_fresh", "_memory_s", "_rate")

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._rate = 0.0
        self._at = float("-inf")
        self._fresh = 0.0
        self._fold_at = float("-inf")

    def add(self, work: float, now: float) -> None:
        if now < self._fold_at:
            self._fresh += work
            return
        self._rate = self.at(now)
        self._at = now
        self._fresh = work
        self._fold_at = now + 0.01 * self._memory_s

    def at(self, now: float) -> float:
        """What came since the last piece was begun counts as if it came then."""
        passed = now - self._at
        whole = self._rate + self._fresh / self._memory_s
        return whole * exp(-passed / self._memory_s) if passed > 0.0 else whole


class FrontLane:
    """What one lane asks of the front end: as if all of it were served, whether it was or not."""

    __slots__ = ("_asked", "_unmet_until", "key", "seen")

    def __init__(self, key: LaneKey, constants: Constants) -> None:
        self.key = key
        self.seen = float("-inf")
        self._asked = Flow(constants.lane_memory_s)
        self._unmet_until = float("-inf")

    def asks(self, work: float, now: float) -> None:
        self.seen = now
        self._asked.add(work, now)

    def waits_for_more(self, until: float) -> None:
        """Some of its clients are kept waiting: what they would ask for cannot be known, but it is more."""
        self._unmet_until = until

    def demand(self, now: float) -> float:
        return float("inf") if now < self._unmet_until else self._asked.at(now)


class FrontShares:
    """The front end's work by lane. Names cost no memory: beyond `max_lanes` they share one lane."""

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._lanes: dict[LaneKey, FrontLane] = {}
        self._done = Flow(constants.lane_memory_s)
        self._forget_at = float("-inf")
        self.spares_somebody = False
        """Whether, at the last look, some asked for no more than their part."""
        self._level = float("inf")
        self._level_for = (-1.0, float("-inf"))  # the share it was worked out for, and until when it holds

    def __len__(self) -> int:
        return len(self._lanes)

    def lane(self, key: LaneKey, now: float) -> FrontLane:
        found = self._lanes.get(key)
        if found is None:
            if len(self._lanes) >= self._constants.max_lanes and now >= self._forget_at:
                self._forget(now)
            if len(self._lanes) >= self._constants.max_lanes:
                key = REST
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = FrontLane(key, self._constants)
        found.seen = now
        return found

    def did(self, work: float, now: float) -> None:
        """So much was done, for whomever."""
        self._done.add(work, now)

    def asks_too_much(self, lane: FrontLane, share: float, now: float) -> bool:
        """Whether a lane is above its fair part, if so much of what the front end did lately is divided.

        Fair is max-min: nobody gives anything up as long as somebody else asks for more.
        """
        of, until = self._level_for
        if share != of or now >= until:
            demands = [known.demand(now) for known in self._lanes.values()]
            self._level = water_level(demands, share * self._done.at(now))
            self.spares_somebody = any(_LEAST < demand <= self._level for demand in demands)
            self._level_for = share, now + _LEVEL_S
        return lane.demand(now) > self._level

    def _forget(self, now: float) -> None:
        """Now and then: somebody who makes up names must not have all of them looked through each time."""
        self._forget_at = now + _FORGET_S
        since = now - self._constants.lately_s
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.seen > since or key == REST}
