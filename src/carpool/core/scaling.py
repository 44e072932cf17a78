"""Computes how many replicas a fleet needs: what is asked of it, over several windows, against what one can
answer.

A replica's queue says nothing about that: it refuses early, so that its wait is the same at one and a half
and at three times its load. What is asked for over what can be answered is linear and has no upper end.

Up at once: a short window that shows more than chance would is believed before a long one, and what would
still be added while a new replica starts is asked for now. Down slowly: not before the most that was wanted
lately is that long ago, since what is taken away takes a whole start to come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import TYPE_CHECKING

from carpool.core.curve import promised_batch
from carpool.core.job import INFINITY

if TYPE_CHECKING:
    from carpool.core.scheduler import Scheduler

TARGET_LOAD = 0.75
"""Of what replicas can answer: the rest is for bursts, and for what comes while another one starts."""

_CHANCE = 2.5  # standard deviations of a count that are still chance
_MOST_GROWTH = 1.25  # a forecast never asks for more than so many times what is asked for now
_ROUNDING = 1e-9  # what is a whole number of replicas but for this is that number


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Defines a rule in seconds, but for the target and the bounds."""

    least: int = 1
    most: int = 1_000_000
    target: float = TARGET_LOAD
    windows: Sequence[float] = (1.0, 5.0, 30.0)  # from short to long
    cold_start: float = 20.0  # until a new replica answers
    patience: float = 300.0  # before fewer are wanted

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least {self.least} and most {self.most} must be 0 or more, in this order")
        if not 0.0 < self.target <= 1.0:
            raise ValueError(f"target must be above 0 and at most 1, not {self.target}")
        if not self.windows or list(self.windows) != sorted(set(self.windows)) or self.windows[0] <= 0.0:
            raise ValueError(f"windows must grow, from above 0, not {list(self.windows)}")
        if not (0.0 <= self.cold_start < float("inf") and 0.0 <= self.patience < float("inf")):
            raise ValueError("cold_start and patience must be 0 s or more")


class Arrivals:
    """Tracks a count that only grows, as it was observed from time to time; and its rate over windows up to
    `longest`. One that shrinks belongs to a process that restarted: what it shows then has come since."""

    __slots__ = ("_longest", "_seen", "_total")

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._seen: deque[tuple[float, float]] = deque()  # when, and how much in all by then
        self._total = 0.0

    def seen(self, count: float, before: float, now: float) -> None:
        """It was `before` when it was last looked at."""
        self.add(count - before if count >= before else count, now)

    def add(self, more: float, now: float) -> None:
        if self._seen and now < self._seen[-1][0]:
            return  # clocks that are set back say nothing about rates
        self._total += max(0.0, more) if isfinite(more) else 0.0
        self._seen.append((now, self._total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._longest:
            self._seen.popleft()

    def over(self, window: float, now: float) -> tuple[float, float]:
        """How much came in about so long, and in how long that really was: 0 and 0 before two looks."""
        if len(self._seen) < 2:
            return 0.0, 0.0
        since, before = self._seen[0]
        for at, total in self._seen:
            if at > now - window:
                break
            since, before = at, total
        return self._total - before, max(now, self._seen[-1][0]) - since

    def rate(self, window: float, now: float) -> float:
        count, seconds = self.over(window, now)
        return count / seconds if seconds > 0.0 else 0.0


class Autoscaler:
    """Decides how many replicas are wanted, from the time and what a whole fleet was asked for."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._arrivals = Arrivals(rule.windows[-1])
        self._wanted: deque[tuple[float, int]] = deque()  # falling: the most that was wanted since each time

    def asked(self, images: float, now: float) -> None:
        """Counts the images asked for since the last call. It must be called with 0, too."""
        self._arrivals.add(images, now)

    def wanted(self, capacity: float, now: float) -> int:
        """`capacity` is what one replica answers in time, images per second. Not known (0): as many as there
        were wanted before."""
        rule = self.rule
        if not capacity > 0.0 or not isfinite(capacity):
            return self._wanted[0][1] if self._wanted else rule.least
        load = self.foreseen(now) / (rule.target * capacity)
        count = min(rule.most, max(rule.least, ceil(load - _ROUNDING)))
        past = self._wanted
        while past and past[-1][1] <= count:
            past.pop()
        past.append((now, count))
        while past[0][0] < now - rule.patience:
            past.popleft()
        return past[0][1]

    def foreseen(self, now: float) -> float:
        """Returns images per second to be ready for: what is asked for now, and where that is growing, what
        will be when a replica that is started now answers."""
        *shorter, longest = self.rule.windows
        usual = rate = self._arrivals.rate(longest, now)
        seen_over = longest
        for window in reversed(shorter):
            count, seconds = self._arrivals.over(window, now)
            if seconds > 0.0 and (count - _CHANCE * sqrt(count)) / seconds > rate:
                rate, seen_over = count / seconds, window
        if rate <= usual:
            return rate
        # The middles of two windows are half their difference apart. A step looks like this for a while as
        # well, so that little is added.
        growth = (rate - usual) / (0.5 * (longest - seen_over))
        return min(rate + growth * self.rule.cold_start, _MOST_GROWTH * rate)


def replicas_for(rate: float, capacity: float, *, target: float = TARGET_LOAD, redundant: int = 0) -> int:
    """Returns the replicas for a steady rate, with so many more for those that may be away."""
    if not capacity > 0.0:
        raise ValueError(f"capacity must be above 0, not {capacity}")
    return max(1, ceil(max(0.0, rate) / (target * capacity) - _ROUNDING)) + redundant


def capacity(scheduler: Scheduler) -> float:
    """Returns images per second within the promise, with the device to itself: by the curve that is believed
    now, at the speed that the instances have. 0 without a promise, and while no instance is there."""
    speeds = [1.0 / instance.speed.mean for instance in scheduler.instances if instance.available]
    if not speeds or scheduler.slo == INFINITY:
        return 0.0
    pace = sum(speeds)
    batch = promised_batch(scheduler.curve, scheduler.slo * pace / len(speeds))
    return pace * scheduler.curve.throughput(batch) if batch else 0.0
