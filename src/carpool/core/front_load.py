"""A front end that falls behind: requests grow old before it reads them, where no scheduler sees them.

What clients wait outside, and who asks for more than a fair share of a front end and is rejected.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.intake import water_level
from carpool.core.learning import Rate

OUTSIDE_RISE: Final = 0.2
OUTSIDE_FALL: Final = 0.5
"""One answer that took longer on its way moves the estimate by a fifth of the difference, one that took
less by half of it per second since the last: a stall is reckoned with at once, and for two seconds."""

BACKLOG_PROMISES: Final = 2.0
"""It lasts when the wait has stood for so many promises: what gathered in a stall is gone by then."""

BACKLOG_MEMORY_S: Final = 0.25
"""For so long after it rejected a request, the wait need not stand again before it rejects the next: an
overload that lasts is held at the limit. After a second's memory, every stall would cost requests."""

BACKLOG_BESIDE: Final = 0.5
"""Beside clients that ask for little, a flood is rejected at half of the wait that is too long. At all of it,
one in twenty of those others would find the wait too long."""

_MOST_MODELS = 256


class Backlog:
    """Decides whether new requests of one model would be late, so that some have to be rejected unread.

    A wait that passes is no reason: a request that came during a stall can still be in time. One that stands
    is: the front end gets more than it can do, and all requests would be late. From then on, until there was
    quiet for a while, it is too long whenever it is above the limit.

    `share` is how much of what the front end did lately it can go on doing. It falls for as long as the wait
    stands although the clients that ask for more than their part of it are rejected.
    """

    __slots__ = ("_asked", "_constants", "_cut_at", "_since", "_strict_until", "share")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._asked = float("-inf")
        self._since = float("inf")  # it has been too long
        self._strict_until = float("-inf")
        self._cut_at = float("-inf")
        self.share = constants.backlog_share

    def is_too_long(self, waited: float, slo: float, now: float) -> bool:
        """`waited` is how long requests that were read lately had been lying there."""
        c = self._constants
        silent, self._asked = now - self._asked > BACKLOG_MEMORY_S, now
        if waited <= c.most_unread * slo:
            self._since = float("inf")
            self._cut_at = now
            return False
        if silent or self._since > now:
            self._since = now
        strict = now < self._strict_until
        if not strict and now - self._since < BACKLOG_PROMISES * slo:
            return False
        self._strict_until = now + BACKLOG_MEMORY_S
        if not strict:
            self.share, self._cut_at = c.backlog_share, now
        elif now - self._cut_at >= BACKLOG_PROMISES * slo:
            self.share, self._cut_at = self.share * c.backlog_step, now
        return True


class FairBacklog:
    """Decides which clients are rejected while some model's new requests would be late: those that cause it,
    of any model.

    A front end has one loop for all. Clients that ask for more of it than a fair share are rejected first,
    with a promise or without one; the others only if that does not suffice. Where there are others, those
    that are to blame keep the wait well below the limit: it is the others' time that they would use up.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._backlogs: dict[int, Backlog] = {}
        self._limit = float("inf")  # of the wait, for the model with the shortest promise that is behind
        self._share = 1.0
        self._until = float("-inf")  # this holds
        self.shares = FrontShares(constants)

    def rejects(self, model: int, slo: float | None, lane: FrontLane, waited: float, now: float) -> bool:
        if slo is not None:
            self._judge(model, slo, waited, now)
        if waited <= BACKLOG_BESIDE * self._limit or not self.is_to_blame(lane, now):
            return False
        if waited <= self._limit and not self.shares.protects_a_client:
            return False
        self._until = now + BACKLOG_MEMORY_S
        return True

    def is_to_blame(self, lane: FrontLane, now: float) -> bool:
        """Returns whether the front end was behind just now, and this lane asks for more than its share."""
        return now < self._until and self.shares.asks_too_much(lane, self._share, now)

    def _judge(self, model: int, slo: float, waited: float, now: float) -> None:
        backlog = self._backlogs.get(model)
        if backlog is None:
            if len(self._backlogs) >= _MOST_MODELS:
                self._backlogs.clear()
            backlog = self._backlogs[model] = Backlog(self._constants)
        over = now >= self._until
        if backlog.is_too_long(waited, slo, now):
            limit = self._constants.most_unread * slo
            if over or limit <= self._limit:
                self._limit, self._share = limit, backlog.share
                self._until = now + BACKLOG_MEMORY_S
        elif over:
            self._limit = float("inf")


class Outside:
    """Estimates what clients of one model wait outside the scheduler's account, until a request is read and
    until an answer has left: in seconds, up fast, down slowly, so that few are worse.

    It falls with time and not with each answer: those of one turn of a loop are all alike, and many of them
    would forget a stall before the next. Nothing is forgotten while no answer leaves, and need not be: a
    rejected request is answered too, and after two silent seconds the first to come decides alone.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self) -> None:
        self._at = float("-inf")
        self.seconds = 0.0

    def seen(self, seconds: float, now: float) -> None:
        """An answer has left: its client waited so long beyond what was planned."""
        gap = (seconds if seconds > 0.0 else 0.0) - self.seconds
        if gap > 0.0:
            self.seconds += OUTSIDE_RISE * gap
        else:
            part = OUTSIDE_FALL * (now - self._at)
            self.seconds += gap * part if part < 1.0 else gap
        self._at = now


LaneKey: TypeAlias = tuple[str, str]
"""A model and who asks for it."""

REST: LaneKey = ("*", "*")
_FORGET_S = 0.1
_LEAST = 0.1  # of work per second: who asks for less has not been here for seconds
_LEVEL_S = 0.005  # the fair share is worked out so often at most


class FrontLane:
    """Measures what one lane asks of the front end: as if all of it were served, whether it was or not."""

    __slots__ = ("_unmet_until", "asked", "key", "seen", "weight")

    def __init__(self, key: LaneKey, constants: Constants) -> None:
        self.key = key
        self.weight = 1.0  # of the key that pays, for its part of the whole
        self.seen = float("-inf")
        self.asked = Rate(constants.lane_memory_s)
        self._unmet_until = float("-inf")

    def waits_for_more(self, until: float) -> None:
        """Some of its clients are kept waiting: what they would ask for cannot be known, but it is more."""
        self._unmet_until = until

    def demand(self, now: float) -> float:
        return float("inf") if now < self._unmet_until else self.asked.at(now)


class FrontShares:
    """Represents the front end's work by lane. Names cost no memory: beyond `max_lanes` they share one
    lane."""

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._lanes: dict[LaneKey, FrontLane] = {}
        self.done = Rate(constants.lane_memory_s)  # for all lanes together
        self._forget_at = float("-inf")
        self.protects_a_client = False
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

    def asks_too_much(self, lane: FrontLane, share: float, now: float) -> bool:
        """Returns whether a lane is above its fair part, if so much of what the front end did lately is
        divided.

        Fair is max-min: no lane gives anything up as long as another asks for more.
        """
        of, until = self._level_for
        if share != of or now >= until:
            demands = [known.demand(now) for known in self._lanes.values()]
            weights = [known.weight for known in self._lanes.values()]
            level = self._level = water_level(demands, share * self.done.at(now), weights)
            self.protects_a_client = any(
                _LEAST < demand <= level * weight for demand, weight in zip(demands, weights, strict=True)
            )
            self._level_for = share, now + _LEVEL_S
        return lane.demand(now) > self._level * lane.weight

    def _forget(self, now: float) -> None:
        """Forgets idle lanes now and then: made-up names must not have all looked through each time."""
        self._forget_at = now + _FORGET_S
        since = now - self._constants.lately_s
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.seen > since or key == REST}


# A front end paces what it answers to clients who get nothing from it: refusals, mistakes, documents. They
# are cheap, but a client that retries at once, many times over, would make them its main occupation. Answered
# late, that client retries less often; all others are read and answered as if it were not there.
