"""Simulates a fleet that grows and shrinks over a day, in rates instead of requests: what it costs, and what
comes before the replicas that it is for. One cell of replicas is simulated request by request (sim/), which
agrees with this to a few permille; thousands of them are so many times the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from carpool.core.scaling import Autoscaler, ScalingRule, replicas_for
from carpool.sim.arrivals import Arrival
from carpool.sim.fleet_simulation import most_at_once

ENOUGH = 0.99  # of what comes must be answered for a step to count as survived
_AFTER_S, _BEFORE_S = 300.0, 60.0  # of a step
_LARGEST = 64.0


@dataclass(frozen=True, slots=True)
class DayReport:
    peak_replicas: int
    replica_hours: float
    offered: float  # images
    lost: float  # of these, more than the replicas that were there could answer
    serving: tuple[int, ...] = ()  # at every step

    @property
    def answered(self) -> float:
        return 1.0 - self.lost / self.offered if self.offered else 1.0


def fluid_day(
    rates: Sequence[float], capacity: float, rule: ScalingRule, *, period: float = 15.0, step: float = 1.0
) -> DayReport:
    """`rates` are images per second, one for every `step`; `capacity` is that of one replica."""
    scaler = Autoscaler(rule)
    serving = max(rule.least, replicas_for(rates[0], capacity, target=rule.target)) if rates else rule.least
    starting: deque[float] = deque()  # when they answer
    paid, offered, lost, look = 0.0, 0.0, 0.0, period
    counts = []
    scaler.asked(0.0, 0.0)
    for number, rate in enumerate(rates):
        now = number * step
        while starting and starting[0] <= now:
            starting.popleft()
            serving += 1
        offered += rate * step
        lost += max(0.0, rate - serving * capacity) * step
        paid += (serving + len(starting)) * step
        scaler.asked(rate * step, now + step)
        if now + step >= look:
            look += period
            there = serving + len(starting)
            wanted = min(scaler.wanted(capacity, now + step), most_at_once(there))
            starting.extend([now + step + rule.cold_start] * max(0, wanted - there))
            serving -= min(max(0, there - wanted), serving - 1)
        counts.append(serving)
    return DayReport(max(counts, default=serving), paid / 3600, offered, lost, tuple(counts))


def largest_step(rate: float, capacity: float, rule: ScalingRule, *, period: float = 15.0) -> float:
    """Returns how many times more traffic may come at once: the most of which 99 % are answered in the five
    minutes after it, where it comes just after a look."""

    def survived(factor: float) -> bool:
        calm = [rate] * int(_BEFORE_S)
        before = fluid_day(calm, capacity, rule, period=period)
        all_of_it = fluid_day([*calm, *([rate * factor] * int(_AFTER_S))], capacity, rule, period=period)
        lost = all_of_it.lost - before.lost
        return lost <= (1 - ENOUGH) * rate * factor * _AFTER_S

    low, high = 1.0, _LARGEST
    if survived(high):
        return high
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if survived(middle) else (low, middle)
    return low


def rates_of(arrivals: Sequence[Arrival], seconds: float) -> list[float]:
    """Returns images per second, second by second."""
    counts = [0.0] * max(1, int(seconds) + 1)
    for arrival in arrivals:
        counts[min(int(arrival.at), len(counts) - 1)] += arrival.images
    return counts
