"""Learns, while serving, how fast each instance really is, and how much is asked of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import exp, log, sqrt

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve


class Speed:
    """Tracks actual over profiled time of one instance: its running mean, and how far above that it may come
    out.

    `cautious` is close to the 0.9 quantile: what a deadline is checked against. Both forget (see `rested`).
    """

    __slots__ = ("_constants", "_surprises", "cautious", "mean")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self.mean = 1.0
        self.cautious = constants.cautious_start
        self._surprises: list[float] = []

    def learn(self, ratio: float) -> None:
        """A batch took `ratio` times what its profile says."""
        c, limit = self._constants, 1.0 + self._constants.surprise
        if 1 / limit < ratio / self.mean < limit:
            self._surprises.clear()
        elif self._is_new_regime(ratio):
            self._move_to(sum(self._surprises) / len(self._surprises))
            self._surprises.clear()
            return
        mean = self.mean + c.mean_weight * (ratio - self.mean)
        cautious = self.cautious * (mean / self.mean)
        cautious += (c.cautious_up if ratio > cautious else -c.cautious_down) * mean
        self.mean, self.cautious = mean, min(max(cautious, mean), c.cautious_max * mean)

    def rested(self, seconds: float) -> None:
        """Time without work moves the belief back to the profile: what slowed the device may be over."""
        mean = 1.0 + (self.mean - 1.0) * exp(-seconds / self._constants.forget_s)
        self.cautious *= mean / self.mean
        self.mean = mean

    def rebased(self, factor: float) -> None:
        """The profile was replaced by one that is slower by this factor: the same speed in new terms."""
        self._move_to(self.mean / factor)
        self._surprises.clear()

    def _move_to(self, mean: float) -> None:
        self.cautious *= mean / self.mean
        self.mean = mean

    def _is_new_regime(self, ratio: float) -> bool:
        """Several batches in a row, far off on the same side, are no noise: the device has changed."""
        if self._surprises and (self._surprises[-1] > self.mean) != (ratio > self.mean):
            self._surprises.clear()
        self._surprises.append(ratio)
        return len(self._surprises) >= self._constants.surprises


class Doubt:
    """How much later than foreseen requests are finished, in seconds: few are later than this.

    One figure for all that can go wrong on the way (what is ahead, the input, the batch itself), so that
    caution is taken once and not for each of them. It rises fast and falls slowly; if all end earlier than
    was foreseen, it is below zero.
    """

    __slots__ = ("_at", "_constants", "_most", "_value")

    def __init__(self, slo: float, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._most = constants.doubt_most * slo
        self._value = constants.doubt_start * slo
        self._at = float("-inf")

    def seen(self, late: float, now: float) -> None:
        """One was finished so much later than foreseen, or would have been."""
        c = self._constants
        value = self.at(now)
        value += c.doubt_rise * self._most if late > value else -c.doubt_fall * self._most
        self._value = min(max(value, -self._most), self._most)
        self._at = now

    def at(self, now: float) -> float:
        """Returns the doubt, half forgotten when nobody was finished for a while: a gate that is shut for it
        learns nothing."""
        silent = now - self._at - self._constants.doubt_memory_s
        if silent <= 0.0 or self._at == float("-inf"):
            return self._value
        return self._value * exp(-silent / self._constants.doubt_memory_s)


class Lag:
    """Measures how long requests take for a part of their way to the scheduler."""

    __slots__ = ("_at", "_memory", "_value", "_weight")

    def __init__(self, memory: float, weight: float = CONSTANTS.lag_weight) -> None:
        self._memory = memory
        self._weight = weight
        self._value = 0.0
        self._at = 0.0

    def seen(self, seconds: float, now: float) -> None:
        self._value += self._weight * ((seconds if seconds > 0.0 else 0.0) - self._value)
        self._at = now

    def at(self, now: float) -> float:
        """Returns the lag, which is forgotten when nobody comes: a gate that is shut for it would never learn
        that it is over."""
        return self._value * exp(-max(0.0, now - self._at) / self._memory)


class Handover:
    """Measures what a batch occupies its instance for beside its run: until it is begun, and until its end is
    heard and the next can be sent. The same for a batch of any size, which makes small ones dear where the
    model is quick."""

    __slots__ = ("_constants", "_looked_at", "counted", "seconds")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._looked_at = float("-inf")
        self.seconds = 0.0
        self.counted = 0.0  # of it, in the curve that is believed

    def seen(self, seconds: float) -> None:
        c = self._constants
        most = min(c.handover_most * max(self.seconds, c.handover_least_s), c.handover_most_s)
        self.seconds += c.handover_weight * (min(seconds, most) - self.seconds)

    def is_news(self, lone: float, now: float) -> bool:
        """Returns whether it should be counted anew, where a batch of one takes so long as it is counted
        now."""
        c = self._constants
        is_near = abs(self.seconds - self.counted) <= c.handover_far * lone
        if is_near or now - self._looked_at < c.handover_look_s:
            return False
        self._looked_at = now
        return True


class Rate:
    """Measures images offered per second, refusals included: exponential with a short memory, decayed when
    read."""

    __slots__ = ("_at", "_memory", "_value")

    def __init__(self, memory: float = CONSTANTS.rate_memory_s) -> None:
        self._memory = memory
        self._value = 0.0
        self._at = 0.0

    def add(self, images: float, now: float) -> None:
        waited = now - self._at
        if waited:  # many come at once
            if waited > 0.0:
                self._value *= exp(-waited / self._memory)
            self._at = now
        self._value += images / self._memory

    def at(self, now: float) -> float:
        waited = now - self._at
        return self._value * exp(-waited / self._memory) if waited > 0 else self._value


# What an instance learns of its speed is one number, gone again after an idle minute. That is right for what
# passes. A device that stays slow (heat, a neighbour), or a curve that was wrong in one place only, deserves
# a new curve, from which every choice follows.


_SHORTEST_S = 1e-9  # clocks tick
_SAME = 1e-5  # curves closer than this need not replace each other


class Trend:
    """Detects a profile that no longer holds: noticed, told once, and put right from the batches of all
    instances.

    Inside, factors are logarithms: they add up.
    """

    __slots__ = (
        *("_batches", "_between", "_constants", "_early", "_far", "_mark", "_near", "_off", "_patience"),
        *("_points", "_profile", "_second_chance", "_since", "_suspect", "_told"),
    )

    def __init__(self, profile: BatchCurve, constants: Constants = CONSTANTS) -> None:
        self._profile = profile
        self._constants = constants
        self._far, self._near = log(1 + constants.trend), log(1 + constants.trend_over)
        # A batch counts for the point that is nearest by ratio.
        self._between = [sqrt(small * large) for (small, _), (large, _) in pairwise(profile.points)]
        self._off = 0.0
        self._told = 0.0
        self._suspect: float | None = None  # since when it has settled somewhere off from what was told
        self._mark = 0.0  # where that was
        self._batches = 0  # since then
        self._second_chance = [False] * len(profile.points)  # once slow, not run since, and believed faster
        self._patience = [1] * len(profile.points)  # how many times as long the next one takes
        self._begin(None)

    @property
    def profile(self) -> BatchCurve:
        """As it was loaded, whatever was learned since."""
        return self._profile

    @property
    def factor(self) -> float:
        """Returns actual over profiled time, by the profile as loaded."""
        return exp(self._off)

    @property
    def told(self) -> float:
        """The factor that was last worth telling; 1 is as profiled."""
        return exp(self._told)

    def _begin(self, now: float | None) -> None:
        self._since = now
        self._early = False
        self._points: list[tuple[int, float]] = [(0, 0.0)] * len(self._profile.points)  # count, sum of logs

    def ran(self, images: int, seconds: float, curve: BatchCurve, now: float) -> bool:
        """A batch took so long; `curve` is what is believed now. Whether that is worth another look at it."""
        since = self._since
        if since is None:
            self._begin(now)
            since = now
        seconds = max(seconds, _SHORTEST_S)
        index = bisect_right(self._between, images)
        count, total = self._points[index]
        self._points[index] = (count + 1, total + log(seconds / curve.times[images]))
        if self._second_chance[index] and count + 1 >= self._constants.relearn_least:
            self._early = True
        self._off += self._constants.trend_weight * (log(seconds / self._profile.times[images]) - self._off)
        # Further from what was told than noise goes; what was told stays until it is clearly over.
        if abs(self._off) < self._near:
            is_news = self._told != 0.0
        else:
            is_news = abs(self._off - self._told) > self._far
        if not is_news:
            self._suspect = None
        elif self._suspect is None or abs(self._off - self._mark) > self._near:
            self._suspect, self._mark, self._batches = now, self._off, 0  # it is still on its way somewhere
        else:
            self._batches += 1
        return self._early or (now - since >= self._constants.relearn_s and self.is_due(now))

    def news(self, now: float) -> float | None:
        """Returns the factor, once for every change that lasts; 1 when it is over."""
        c = self._constants
        if self._suspect is None or now - self._suspect < c.trend_s or self._batches < 1 / c.trend_weight:
            return None
        self._suspect = None
        self._told = 0.0 if abs(self._off) < self._near else self._off
        return self.told

    def is_due(self, now: float) -> bool:
        """Returns whether enough was run since the last look at the curve."""
        if self._early:
            return True
        c = self._constants
        if self._since is None or now - self._since < c.relearn_s:
            return False
        return sum(count for count, _ in self._points) >= c.relearn_batches

    def put_off(self, now: float) -> None:
        """What was run says nothing about all instances. A trial goes on meanwhile, but not for ever."""
        if not self._early or self._since is None or now - self._since >= self._constants.relearn_s:
            self._begin(now)

    def relearned(self, curve: BatchCurve, now: float) -> tuple[BatchCurve, float] | None:
        """Returns a curve for what was run since the last look, and how much slower it is; None while this
        one holds.

        Each point moves by what the batches near it took; where none were run, by what the nearest did. Those
        that once proved slow come back little by little, and when they are tried again, are looked at early.
        """
        if not self.is_due(now):
            return None
        c, early = self._constants, self._early
        moves = {
            index: total / count
            for index, (count, total) in enumerate(self._points)
            if count >= c.relearn_least
        }
        overall = sum(total for _, total in self._points) / sum(count for count, _ in self._points)
        self._begin(now)
        if not any(abs(move) > log(1 + c.relearn) for move in moves.values()):
            moves, overall = dict.fromkeys(moves, 0.0), 0.0  # it holds where batches were run
        points = self._moved(curve, moves, early) if moves else curve.points
        if all(abs(log(new / old)) < _SAME for (_, new), (_, old) in zip(points, curve.points, strict=True)):
            return None
        return BatchCurve.measured(points, curve.max_batch, curve.buckets), exp(overall)

    def _moved(self, curve: BatchCurve, moves: dict[int, float], early: bool) -> Sequence[tuple[int, float]]:
        sizes = [log(size) for size, _ in curve.points]
        off = [
            log(seconds / loaded)
            for (_, seconds), (_, loaded) in zip(curve.points, self._profile.points, strict=True)
        ]
        points = []
        for index, (size, seconds) in enumerate(curve.points):
            near = min(moves, key=lambda other: abs(sizes[other] - sizes[index]))
            move = moves[near]
            if near == index:
                self._judge(index, slow=move > log(1 + self._constants.relearn))
            elif early:
                move = 0.0  # that look is about others
            elif off[index] > off[near]:
                move -= self._constants.relearn_back / self._patience[index] * (off[index] - off[near])
                self._second_chance[index] = True
            points.append((size, seconds * exp(move)))
        return points

    def _judge(self, index: int, *, slow: bool) -> None:
        """A size that was tried again is slow still, or it is not."""
        if self._second_chance[index]:
            longest = self._constants.relearn_patience
            self._patience[index] = min(2 * self._patience[index], longest) if slow else 1
            self._second_chance[index] = False


# Requests of different shapes never share a batch, and need not cost alike: a picture's file that the device
# has to decode, a large picture, a small one. What is learned from one kind says little about another, so
# each has a belief of its own, which begins with the profile that was loaded.


_NEVER = float("-inf")


class Belief:
    """Holds the curve that is believed, what has drifted from it, and a speed for each instance.

    `runs` is how long batches run, as profiles say it; `curve` how long they occupy an instance, from which
    everything is decided: those runs, and handing them over.
    """

    __slots__ = ("_begun", "_rested", "_tries", "curve", "handover", "ran", "runs", "speeds", "trend")

    def __init__(self, profile: BatchCurve, instances: int, now: float, constants: Constants) -> None:
        self.runs = self.curve = profile
        self.handover = Handover(constants)
        self.trend = Trend(profile, constants)
        self.speeds = [Speed(constants) for _ in range(instances)]
        self.ran = _NEVER  # when a batch of this kind last started or ended
        self._begun = self._rested = now
        self._tries = constants.kind_tries

    def learn(self, index: int, images: int, took: float) -> None:
        """A batch took this instance so long, the way there and back included."""
        self.speeds[index].learn(took / self.curve.times[images])

    def adopt(self, curve: BatchCurve, factor: float) -> None:
        """The curve gives in to what was run, which was slower by this factor."""
        self.runs = curve
        self._believe(factor)

    def replan(self, profile: BatchCurve, constants: Constants) -> None:
        """The model's batches take another time from here on. Each point moves as the profile's did: how the
        machine differs from its profile, the handover and the instances' speeds stay as they were learned."""
        before = self.trend.profile.times
        moved = {size: seconds * profile.times[size] / before[size] for size, seconds in self.runs.points}
        points = [(size, moved.get(size, seconds)) for size, seconds in profile.points]
        self.runs = BatchCurve.measured(points, profile.max_batch, profile.buckets)
        self.trend = Trend(profile, constants)
        self._believe(1.0)

    def count_handover(self, images: int) -> None:
        """Counts the handover as it was learned by now. What is believed of batches as the last one is said
        in new terms."""
        before = self.curve.times[images]
        more = self.handover.seconds - self.handover.counted
        self.handover.counted = self.handover.seconds
        self._believe((before + more) / before)

    def _believe(self, factor: float) -> None:
        counted = self.handover.counted
        self.curve = self.runs.delayed(counted) if counted else self.runs
        for speed in self.speeds:
            speed.rebased(factor)

    def ended(self, index: int, images: int, took: float, now: float) -> None:
        """All at once, where there is one kind: learn, rest from now on, and give in to what lasts."""
        self.learn(index, images, took)
        self.laid_aside(now)
        if self.trend.ran(images, took, self.runs, now):
            learned = self.trend.relearned(self.runs, now)
            if learned is not None:
                self.adopt(*learned)

    def slowest(self, *, cautious: bool) -> float:
        """Nobody knows on which instance he will be."""
        first = self.speeds[0]
        if len(self.speeds) == 1:  # mostly, and it is asked for several times for each request
            return first.cautious if cautious else first.mean
        return max([speed.cautious if cautious else speed.mean for speed in self.speeds])

    def laid_aside(self, now: float) -> None:
        """Another kind comes first from now on."""
        self._rested = now

    def taken_up(self, now: float) -> None:
        """Time without this kind of work moves its speeds back as well, whatever else was run meanwhile: if
        nothing of this kind fitted, nothing could be learned of it."""
        for speed in self.speeds:
            speed.rested(max(0.0, now - self._rested))
        self._rested = now

    def is_overdue(self, images: int, now: float) -> bool:
        """Returns whether it is so long without a batch that trying this one costs the other kinds next to
        nothing."""
        takes = max(speed.mean for speed in self.speeds) * self.curve.times[images]
        since = max(self.ran, self._begun)
        return since > _NEVER and takes <= self._tries * (now - since)


class Beliefs:
    """Holds one belief for each kind of work. Shapes come from clients: there are at most so many, and the
    rest share one."""

    __slots__ = ("_constants", "_instances", "_kinds", "_others", "_profile")

    def __init__(self, profile: BatchCurve, instances: int, constants: Constants = CONSTANTS) -> None:
        self._profile = profile
        self._instances = instances
        self._constants = constants
        self._kinds: dict[Hashable, Belief] = {}
        self._others: Belief | None = None

    def __len__(self) -> int:
        return len(self._kinds) + (self._others is not None)

    def of(self, kind: Hashable, now: float) -> Belief:
        belief = self._kinds.get(kind)
        if belief is None:
            if len(self._kinds) >= self._constants.max_kinds:
                self._drop_unused(now)
            if len(self._kinds) < self._constants.max_kinds:
                belief = self._kinds[kind] = self._begin(now)
            else:
                belief = self._others = self._others or self._begin(now)
        return belief

    def replan(self, profile: BatchCurve) -> None:
        self._profile = profile
        for belief in self._kinds.values():
            belief.replan(profile, self._constants)
        if self._others is not None:
            self._others.replan(profile, self._constants)

    def _begin(self, now: float) -> Belief:
        return Belief(self._profile, self._instances, now, self._constants)

    def _drop_unused(self, now: float) -> None:
        since = now - self._constants.kind_memory_s
        for kind, belief in list(self._kinds.items()):
            if belief.ran < since:
                del self._kinds[kind]
