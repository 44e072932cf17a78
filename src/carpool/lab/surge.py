"""Surges with known edges, so that what happens inside one can be measured apart from the calm around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from carpool.sim.arrivals import Arrival, poisson
from carpool.sim.scenario import Scenario, play
from carpool.sim.simulation import percentile

_LONGEST = 10.0  # seconds: the scheduler's memory is shorter, so that a longer surge goes on as this one does
_WANTED, _AFFORDED = 10_000, 40_000  # requests inside surges, and in a whole run


@dataclass(frozen=True, slots=True)
class Surge:
    """Traffic that multiplies its calm rate for a while, again and again, after `calm` seconds each."""

    factor: float
    length: float
    calm: float
    name: str = "surge"
    own_rate: float | None = None
    even: bool = False

    def windows(self, seconds: float) -> Iterator[tuple[float, float]]:
        start = self.calm
        while start < seconds:
            yield start, start + self.length
            start += self.length + self.calm

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        """`rate` is the calm one."""
        found: list[Arrival] = []
        edge = 0.0
        for start, end in self.windows(seconds):
            found += _moved(poisson(rate, start - edge, random), edge)
            found += _moved(poisson(rate * self.factor, end - start, random), start)
            edge = end
        return found + _moved(poisson(rate, self.calm, random), edge)


def surge_outcome(scenario: Scenario, surge: Surge) -> tuple[float, float, float]:
    """(attainment, p50 ms, p99 ms) of what arrives during surges, over as many as it takes to tell."""
    surge = replace(surge, length=min(surge.length, _LONGEST))
    inside = scenario.rate * surge.factor * surge.length
    around = scenario.rate * surge.calm
    times = min(ceil(_WANTED / inside), max(1, int(_AFFORDED / (inside + around))))
    seconds = times * (surge.length + surge.calm)
    run = play(replace(scenario, traffic=surge, seconds=seconds))
    windows = list(surge.windows(seconds))
    rides = [r for r in run.rides if any(start <= r.arrival.at < end for start, end in windows)]
    latencies = sorted(r.latency for r in rides if r.latency is not None)
    in_time = sum(1 for latency in latencies if latency <= scenario.slo)
    attainment = in_time / len(rides) if rides else 1.0
    return attainment, percentile(latencies, 0.5) * 1e3, percentile(latencies, 0.99) * 1e3


def _moved(arrivals: list[Arrival], by: float) -> list[Arrival]:
    return [Arrival(arrival.at + by, arrival.images) for arrival in arrivals]
