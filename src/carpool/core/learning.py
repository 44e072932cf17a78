"""Learns, while serving, how fast each instance really is, and how much is asked of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import exp, log, sqrt
from typing import Final

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve

HANDOVER_LOOK_S: Final = 0.25
HANDOVER_FAR: Final = 0.1
"""Four times a second the curve may follow, if a batch of one would take a tenth more or less by it."""

LAG_WEIGHT: Final = 0.05
"""One request moves what is thought of their age when offered by a twentieth: a few say little."""

DOUBT_START: Final = 0.05
DOUBT_RISE: Final = 0.06
DOUBT_FALL: Final = 0.002
DOUBT_MOST: Final = 0.4
DOUBT_MEMORY_S: Final = 1.0
"""Requests whose inputs are still to come are let in with so much of the promise left over for whatever goes
wrong, at most two fifths. Each that is later than that moves it up by 0.06 of the most, each that is not down
by 0.002: about one in thirty is later. After a second without any it is forgotten."""

MEAN_WEIGHT: Final = 0.05
"""One batch moves the learned speed by a twentieth of its surprise: one stall is forgotten in 20."""

CAUTIOUS_START: Final = 1.1
"""Before anything is learned, assume batches may take a tenth longer: 1.0 wastes 3–4 % at first."""

CAUTIOUS_UP: Final = 0.0045
CAUTIOUS_DOWN: Final = 0.0005
"""Up by nine for one down settles where one batch in ten takes longer: the 0.9 quantile."""

CAUTIOUS_MAX: Final = 1.5
"""However noisy a device is, plan with no more than half its time lost to noise."""

SURPRISE: Final = 0.25
SURPRISES: Final = 3
"""Three batches in a row off by a quarter on the same side mean that the device changed: believe them."""

FORGET_S: Final = 10.0
"""An idle instance drifts back to its profile with this time constant."""

TREND: Final = 0.2
TREND_OVER: Final = 0.1
TREND_S: Final = 1.0
TREND_WEIGHT: Final = 0.1
"""Slower or faster than the profile by a fifth, for a second, is worth reporting, once; within a tenth it is
over. The gap between the two keeps a device at the edge from being reported all day. Each batch moves the
figure by a tenth of its surprise, and what is reported is where it settled."""

RELEARN: Final = 0.1
RELEARN_S: Final = 5.0
"""Batches that differ from the curve by a tenth on average, over so long, give it new points. Shorter
spells are left to the learned speed, which forgets them."""

RELEARN_BATCHES: Final = 20
RELEARN_LEAST: Final = 10
"""So many batches before a look says anything, and so many near one point before it is moved: one
stall among ten is no tenth."""

RELEARN_BACK: Final = 0.1
RELEARN_PATIENCE: Final = 16
"""At each such look, a size that once proved slow and was not run since comes a tenth of its way back to the
profile's shape: what made it slow may be over, and only a try can show that. It is tried after about a minute
of traffic, and judged by its first batches. Each time it fails, the next chance takes twice as long, up to
sixteen times: where the profile is wrong for good, that costs a few batches."""

MAX_KINDS: Final = 8
KIND_MEMORY_S: Final = 60.0
"""Kinds of work (shapes) of one model of which something is learned apart; the rest share one belief, so that
many shapes take no more memory. One that was not run for a minute leaves its place to another."""

KIND_TRIES: Final = 0.05
"""A kind that fits no promise, as far as is known, is tried with this share of an instance's time."""


class Speed:
    """Tracks actual over profiled time of one instance: its running mean, and how far above that it may come
    out.

    `cautious` is close to the 0.9 quantile: what a deadline is checked against. Both forget (see `rested`).
    """

    __slots__ = ("_surprises", "cautious", "mean")

    def __init__(self) -> None:
        self.mean = 1.0
        self.cautious = CAUTIOUS_START
        self._surprises: list[float] = []

    def learn(self, ratio: float) -> None:
        """A batch took `ratio` times what its profile says."""
        limit = 1.0 + SURPRISE
        if 1 / limit < ratio / self.mean < limit:
            self._surprises.clear()
        elif self._is_new_regime(ratio):
            self._move_to(sum(self._surprises) / len(self._surprises))
            self._surprises.clear()
            return
        mean = self.mean + MEAN_WEIGHT * (ratio - self.mean)
        cautious = self.cautious * (mean / self.mean)
        cautious += (CAUTIOUS_UP if ratio > cautious else -CAUTIOUS_DOWN) * mean
        self.mean, self.cautious = mean, min(max(cautious, mean), CAUTIOUS_MAX * mean)

    def rested(self, seconds: float) -> None:
        """Time without work moves the belief back to the profile: what slowed the device may be over."""
        mean = 1.0 + (self.mean - 1.0) * exp(-seconds / FORGET_S)
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
        return len(self._surprises) >= SURPRISES


class Doubt:
    """How much later than foreseen requests are finished, in seconds: few are later than this.

    One figure for all that can go wrong on the way (what is ahead, the input, the batch itself), so that
    caution is taken once and not for each of them. It rises fast and falls slowly; if all end earlier than
    was foreseen, it is below zero.
    """

    __slots__ = ("_at", "_most", "_value")

    def __init__(self, slo: float) -> None:
        self._most = DOUBT_MOST * slo
        self._value = DOUBT_START * slo
        self._at = float("-inf")

    def seen(self, late: float, now: float) -> None:
        """One was finished so much later than foreseen, or would have been."""
        value = self.at(now)
        value += DOUBT_RISE * self._most if late > value else -DOUBT_FALL * self._most
        self._value = min(max(value, -self._most), self._most)
        self._at = now

    def at(self, now: float) -> float:
        """Returns the doubt, half forgotten when no request finished for a while: a gate that is shut for it
        learns nothing."""
        silent = now - self._at - DOUBT_MEMORY_S
        if silent <= 0.0 or self._at == float("-inf"):
            return self._value
        return self._value * exp(-silent / DOUBT_MEMORY_S)


class Lag:
    """Measures how long requests take for a part of their way to the scheduler."""

    __slots__ = ("_at", "_memory", "_value", "_weight")

    def __init__(self, memory: float, weight: float = LAG_WEIGHT) -> None:
        self._memory = memory
        self._weight = weight
        self._value = 0.0
        self._at = 0.0

    def seen(self, seconds: float, now: float) -> None:
        self._value += self._weight * ((seconds if seconds > 0.0 else 0.0) - self._value)
        self._at = now

    def at(self, now: float) -> float:
        """Returns the lag, which is forgotten when no request comes: a gate that is shut for it would never
        learn that it is over."""
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
        is_near = abs(self.seconds - self.counted) <= HANDOVER_FAR * lone
        if is_near or now - self._looked_at < HANDOVER_LOOK_S:
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
    """Detects a profile that no longer holds: notices it, reports it once, and corrects it from the batches
    of all instances.

    Inside, factors are logarithms: they add up.
    """

    __slots__ = (
        *("_batches", "_between", "_early", "_far", "_mark", "_near", "_off", "_patience"),
        *("_points", "_profile", "_second_chance", "_since", "_suspect", "_told"),
    )

    def __init__(self, profile: BatchCurve) -> None:
        self._profile = profile
        self._far, self._near = log(1 + TREND), log(1 + TREND_OVER)
        # A batch counts for the point that is nearest by ratio.
        self._between = [sqrt(small * large) for (small, _), (large, _) in pairwise(profile.points)]
        self._off = 0.0
        self._told = 0.0
        self._suspect: float | None = None  # since when it has settled somewhere off from what was reported
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
        if self._second_chance[index] and count + 1 >= RELEARN_LEAST:
            self._early = True
        self._off += TREND_WEIGHT * (log(seconds / self._profile.times[images]) - self._off)
        # Noise does not go so far from what was reported, which stays until it is clearly over.
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
        return self._early or (now - since >= RELEARN_S and self.is_due(now))

    def news(self, now: float) -> float | None:
        """Returns the factor, once for every change that lasts; 1 when it is over."""
        if self._suspect is None or now - self._suspect < TREND_S or self._batches < 1 / TREND_WEIGHT:
            return None
        self._suspect = None
        self._told = 0.0 if abs(self._off) < self._near else self._off
        return self.told

    def is_due(self, now: float) -> bool:
        """Returns whether enough was run since the last look at the curve."""
        if self._early:
            return True
        if self._since is None or now - self._since < RELEARN_S:
            return False
        return sum(count for count, _ in self._points) >= RELEARN_BATCHES

    def put_off(self, now: float) -> None:
        """What was run says nothing about all instances. A trial goes on meanwhile, but not for ever."""
        if not self._early or self._since is None or now - self._since >= RELEARN_S:
            self._begin(now)

    def relearned(self, curve: BatchCurve, now: float) -> tuple[BatchCurve, float] | None:
        """Returns a curve for what was run since the last look, and how much slower it is; None while this
        one holds.

        Each point moves by what the batches near it took; where none were run, by what the nearest did. Those
        that once proved slow come back little by little, and when they are tried again, are looked at early.
        """
        if not self.is_due(now):
            return None
        early = self._early
        moves = {
            index: total / count
            for index, (count, total) in enumerate(self._points)
            if count >= RELEARN_LEAST
        }
        overall = sum(total for _, total in self._points) / sum(count for count, _ in self._points)
        self._begin(now)
        if not any(abs(move) > log(1 + RELEARN) for move in moves.values()):
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
                self._judge(index, slow=move > log(1 + RELEARN))
            elif early:
                move = 0.0  # that look is about others
            elif off[index] > off[near]:
                move -= RELEARN_BACK / self._patience[index] * (off[index] - off[near])
                self._second_chance[index] = True
            points.append((size, seconds * exp(move)))
        return points

    def _judge(self, index: int, *, slow: bool) -> None:
        """A size that was tried again is slow still, or it is not."""
        if self._second_chance[index]:
            longest = RELEARN_PATIENCE
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
        self.trend = Trend(profile)
        self.speeds = [Speed() for _ in range(instances)]
        self.ran = _NEVER  # when a batch of this kind last started or ended
        self._begun = self._rested = now
        self._tries = KIND_TRIES

    def learn(self, index: int, images: int, took: float) -> None:
        """A batch took this instance so long, the way there and back included."""
        self.speeds[index].learn(took / self.curve.times[images])

    def adopt(self, curve: BatchCurve, factor: float) -> None:
        """The curve gives in to what was run, which was slower by this factor."""
        self.runs = curve
        self._believe(factor)

    def replan(self, profile: BatchCurve) -> None:
        """The model's batches take another time from here on. Each point moves as the profile's did: how the
        machine differs from its profile, the handover and the instances' speeds stay as they were learned."""
        before = self.trend.profile.times
        moved = {size: seconds * profile.times[size] / before[size] for size, seconds in self.runs.points}
        points = [(size, moved.get(size, seconds)) for size, seconds in profile.points]
        self.runs = BatchCurve.measured(points, profile.max_batch, profile.buckets)
        self.trend = Trend(profile)
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
        """Returns the factor of the slowest instance: it is not known on which one a request will run."""
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
            if len(self._kinds) >= MAX_KINDS:
                self._drop_unused(now)
            if len(self._kinds) < MAX_KINDS:
                belief = self._kinds[kind] = self._begin(now)
            else:
                belief = self._others = self._others or self._begin(now)
        return belief

    def replan(self, profile: BatchCurve) -> None:
        self._profile = profile
        for belief in self._kinds.values():
            belief.replan(profile)
        if self._others is not None:
            self._others.replan(profile)

    def _begin(self, now: float) -> Belief:
        return Belief(self._profile, self._instances, now, self._constants)

    def _drop_unused(self, now: float) -> None:
        since = now - KIND_MEMORY_S
        for kind, belief in list(self._kinds.items()):
            if belief.ran < since:
                del self._kinds[kind]
