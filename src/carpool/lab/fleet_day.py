"""Simulates a fleet that grows and shrinks over a day, in rates instead of requests: what it costs, and what
comes before the replicas that it is for. One cell of replicas is simulated request by request (sim/), which
agrees with this to a few permille; thousands of them are so many times the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, pi, sin
from typing import NamedTuple

from carpool.core.scaling import Autoscaler, ScalingRule, replicas_for
from carpool.sim.arrivals import Arrival
from carpool.sim.fleet_simulation import most_at_once

ENOUGH = 0.99  # of what comes must be answered for a step to count as survived
_AFTER_S, _BEFORE_S = 300.0, 60.0  # of a step
_LARGEST = 64.0
_NIGHT, _SUNRISE, _SUNSET = 0.25, 6.0, 18.0


class Trouble(NamedTuple):
    """Something that happens to a fleet, from `at` on for so many `seconds`."""

    what: str
    size: float
    at: float
    seconds: float

    def is_on(self, now: float) -> bool:
        return self.at <= now < self.at + self.seconds


TROUBLES = {
    "surge": "traffic is so many times as much",
    "lose": "a region with this part of the replicas is gone, with everything in it and to be had there",
    "rollout": "a broken candidate gets this part of the requests; stable answers them after it, so that "
    "they are run twice",
}


@dataclass(frozen=True, slots=True)
class DayReport:
    peak_replicas: int
    replica_hours: float
    offered: float  # images
    lost: float  # of these, more than the replicas that were there could answer
    short_s: float = 0.0  # for how long there were too few
    serving: tuple[int, ...] = ()  # at every step

    @property
    def answered(self) -> float:
        return 1.0 - self.lost / self.offered if self.offered else 1.0


def fluid_day(
    rates: Sequence[float],
    capacity: float,
    rule: ScalingRule,
    *,
    period: float = 15.0,
    step: float = 1.0,
    troubles: Sequence[Trouble] = (),
) -> DayReport:
    """`rates` are images per second, one for every `step`; `capacity` is that of one replica."""
    scaler = Autoscaler(rule)
    serving = max(rule.least, replicas_for(rates[0], capacity, target=rule.target)) if rates else rule.least
    starting: deque[float] = deque()  # when they answer
    paid, offered, lost, short, look = 0.0, 0.0, 0.0, 0.0, period
    counts = []
    scaler.asked(0.0, 0.0)
    for number, usual in enumerate(rates):
        now = number * step
        while starting and starting[0] <= now:
            starting.popleft()
            serving += 1
        for trouble in troubles:
            if trouble.what == "lose" and now - step < trouble.at <= now:
                serving, starting = _without(trouble.size, serving, starting)
        rate = usual * _times("surge", troubles, now)
        twice = 1.0 + _times("rollout", troubles, now, 0.0)
        missing = max(0.0, rate - serving * capacity / twice)
        offered += rate * step
        lost += missing * step
        short += step if missing > 0.0 else 0.0
        paid += (serving + len(starting)) * step
        scaler.asked(rate * twice * step, now + step)
        if now + step >= look:
            look += period
            there = serving + len(starting)
            to_be_had = floor(rule.most * (1.0 - _times("lose", troubles, now, 0.0)))
            wanted = min(scaler.wanted(capacity, now + step), most_at_once(there), to_be_had)
            starting.extend([now + step + rule.cold_start] * max(0, wanted - there))
            serving -= min(max(0, there - wanted), serving - 1)
        counts.append(serving)
    return DayReport(max(counts, default=serving), paid / 3600, offered, lost, short, tuple(counts))


def _without(part: float, serving: int, starting: deque[float]) -> tuple[int, deque[float]]:
    """Returns what is left of replicas that are spread evenly over regions."""
    return max(1, serving - round(part * serving)), deque(list(starting)[round(part * len(starting)) :])


def _times(what: str, troubles: Sequence[Trouble], now: float, otherwise: float = 1.0) -> float:
    return max((each.size for each in troubles if each.what == what and each.is_on(now)), default=otherwise)


def camera_day(noon: float) -> list[float]:
    """Images per second of cameras that send when something moves, second by second from midnight: a quarter
    at night, and `noon` at noon."""
    rates = []
    for second in range(86_400):
        hour = second / 3600
        light = sin(pi * (hour - _SUNRISE) / (_SUNSET - _SUNRISE)) if _SUNRISE <= hour <= _SUNSET else 0.0
        rates.append(noon * (_NIGHT + (1.0 - _NIGHT) * max(0.0, light)))
    return rates


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
