"""A front end that falls behind: requests grow old before it reads them, where no scheduler sees them.

What clients wait outside, who asks for more than a fair share of a front end and is turned away, how what
nobody is in a hurry for is paced, and when a picture that comes now will be decoded.
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.intake import water_level
from carpool.core.learning import Rate

_MOST_MODELS = 256


class Backlog:
    """Decides whether newcomers of one model would be late, so that somebody has to be turned away unread.

    A wait that passes is no reason: whoever came during a stall can still make it. One that stands is: the
    front end gets more than it can do, and everybody would be late. From then on, until there was quiet for a
    while, it is too long whenever it is.

    `share` is how much of what the front end did lately it can go on doing. It falls for as long as the wait
    stands although those who ask for more than their part of it are turned away.
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
        silent, self._asked = now - self._asked > c.backlog_memory_s, now
        if waited <= c.most_unread * slo:
            self._since = float("inf")
            self._cut_at = now
            return False
        if silent or self._since > now:
            self._since = now
        strict = now < self._strict_until
        if not strict and now - self._since < c.backlog_promises * slo:
            return False
        self._strict_until = now + c.backlog_memory_s
        if not strict:
            self.share, self._cut_at = c.backlog_share, now
        elif now - self._cut_at >= c.backlog_promises * slo:
            self.share, self._cut_at = self.share * c.backlog_step, now
        return True


class FairBacklog:
    """Decides who is turned away while some model's newcomers would be late: those who cause it, of any
    model.

    A front end has one loop for all. Whoever asks for more of it than a fair share goes first, with a promise
    or without one; the others only if that does not suffice. Where there are others, those who are to blame
    keep the wait well below the limit: it is the others' time that they would use up.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._backlogs: dict[int, Backlog] = {}
        self._limit = float("inf")  # of the wait, for the model with the shortest promise that is behind
        self._share = 1.0
        self._until = float("-inf")  # this holds
        self.shares = FrontShares(constants)

    def turns_away(self, model: int, slo: float | None, lane: FrontLane, waited: float, now: float) -> bool:
        if slo is not None:
            self._judge(model, slo, waited, now)
        if waited <= self._constants.backlog_beside * self._limit or not self.is_to_blame(lane, now):
            return False
        if waited <= self._limit and not self.shares.protects_a_client:
            return False
        self._until = now + self._constants.backlog_memory_s
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
                self._until = now + self._constants.backlog_memory_s
        elif over:
            self._limit = float("inf")


class Outside:
    """Estimates what clients of one model wait outside the scheduler's account, until a request is read and
    until an answer has left: in seconds, up fast, down slowly, so that few are worse.

    It falls with time and not with each answer: those of one turn of a loop are all alike, and many of them
    would forget a stall before the next. Nothing is forgotten while nobody is answered, and need not be:
    whoever is refused for it is answered too, and after two silent seconds the first to come decides alone.
    """

    __slots__ = ("_at", "_fall", "_rise", "seconds")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._rise = constants.outside_rise
        self._fall = constants.outside_fall
        self._at = float("-inf")
        self.seconds = 0.0

    def seen(self, seconds: float, now: float) -> None:
        """An answer has left: its client waited so long beyond what was planned."""
        gap = (seconds if seconds > 0.0 else 0.0) - self.seconds
        if gap > 0.0:
            self.seconds += self._rise * gap
        else:
            part = self._fall * (now - self._at)
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
        self.done = Rate(constants.lane_memory_s)  # for whomever
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

        Fair is max-min: nobody gives anything up as long as somebody else asks for more.
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
        """Now and then: somebody who makes up names must not have all of them looked through each time."""
        self._forget_at = now + _FORGET_S
        since = now - self._constants.lately_s
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.seen > since or key == REST}


# A front end paces what it answers to clients who get nothing from it: refusals, mistakes, documents. They
# are cheap, but somebody who asks again at once, many times over, would make them its main occupation. Told
# late, that client asks less often; everybody else is read and answered as if it were not there.


T = TypeVar("T")


class _Held(NamedTuple, Generic[T]):
    item: T
    cost: float
    latest: float


class _Bucket:
    """So much time per second, saved up to a limit; it may be overdrawn by one piece of work."""

    __slots__ = ("_at", "_most", "_share", "tokens")

    def __init__(self, share: float, most: float, now: float) -> None:
        self._share = share
        self._most = most
        self.tokens = most
        self._at = now

    def left(self, now: float) -> float:
        if now > self._at:
            self.tokens = min(self._most, self.tokens + self._share * (now - self._at))
            self._at = now
        return self.tokens

    def is_full(self, now: float) -> bool:
        return self.left(now) >= self._most

    def spend(self, cost: float) -> None:
        self.tokens = max(self.tokens - cost, -self._most)


class _LaneWork(Generic[T]):
    """Records what one lane has spent, and what of it waits."""

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

    def _line(self, key: LaneKey, now: float) -> _LaneWork[T]:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= self._constants.max_lanes:
                self._forget(now)
            bucket = _Bucket(self._constants.paced_share, self._constants.paced_burst_s, now)
            line = self._lines[key] = _LaneWork(bucket)
        line.bucket.left(now)
        return line


# Pictures wait for a few threads that share their cores with everything else on the machine. So what counts
# is the wall time that decoding takes now, with whatever neighbours there are, not what it would take alone.


class _DecodeKind:
    """Holds what is known of pictures that take about as long: they are under way, and how long they take."""

    __slots__ = ("busy", "pace", "running", "surprise", "surprised")

    def __init__(self) -> None:
        self.pace = 0.0  # seconds for a weight of 1, in one thread
        self.busy = 0  # threads
        self.running = 0.0  # weight
        self.surprise = 0.0  # how much later than foreseen they were decoded lately
        self.surprised = 0.0  # when


class DecodeForecast:
    """Learns what decoding takes, from every picture. `weight` is how much work one is, in any unit.

    Pictures above `long` leave a thread to the others, of which there are at least two (`threads` for short
    ones). Each kind has a forecast of its own: who sends short ones neither waits for the long ones that run
    beside them nor is surprised when those take longer.
    """

    __slots__ = ("_constants", "_kinds", "_long", "_threads")

    def __init__(self, threads: int, long: float = float("inf"), constants: Constants = CONSTANTS) -> None:
        self._threads = threads
        self._long = long
        self._constants = constants
        self._kinds = (_DecodeKind(), _DecodeKind())

    def began(self, weight: float) -> None:
        kind = self._kinds[weight > self._long]
        kind.running += weight
        kind.busy += 1

    def ended(self, weight: float, seconds: float) -> None:
        kind = self._kinds[weight > self._long]
        kind.running -= weight
        kind.busy -= 1
        c, pace = self._constants, seconds / weight
        if kind.pace:
            # One that takes for ever says little of the next; if they all do, so will the forecast.
            pace = kind.pace + c.decode_weight * (min(pace, c.decode_most * kind.pace) - kind.pace)
        kind.pace = pace

    def came_true(self, weight: float, foreseen: float, taken: float, now: float) -> None:
        """It was said to take so many seconds until it is there, and took that many."""
        kind = self._kinds[weight > self._long]
        surprise = self._surprise_at(kind, now)
        gap = taken - foreseen
        if gap > surprise:
            surprise += self._constants.decode_surprise * (gap - surprise)
        kind.surprise, kind.surprised = surprise, now

    def _surprise_at(self, kind: _DecodeKind, now: float) -> float:
        since = now - kind.surprised
        return kind.surprise * exp(-since / self._constants.decode_memory_s) if since > 0.0 else kind.surprise

    def seconds(self, weight: float, ahead: float, now: float) -> float:
        """Returns the seconds until one that comes now is decoded, with work of the weight `ahead` before
        it."""
        short, long = self._kinds
        kind = self._kinds[weight > self._long]
        beside = 0 if self._threads > 1 else 1  # threads of which short ones have no use
        if kind is short:
            threads = max(1, self._threads - max(0, long.busy - beside))
            before = ahead + short.running / 2 if ahead or short.busy >= threads else 0.0
        else:
            threads = max(1, self._threads - 1)
            full = long.busy >= threads or short.busy + long.busy >= self._threads + beside
            before = ahead + (short.running + long.running) / 2 if ahead or full else 0.0
        pace = kind.pace or short.pace or long.pace
        return (before / threads + weight) * pace + self._surprise_at(kind, now)
