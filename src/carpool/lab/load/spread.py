"""A histogram in seven numbers."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.lab.load.histogram import Histogram

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """All zero if there was nothing to measure: see `count`."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


def spread(histogram: Histogram, scale: float) -> Spread:
    values = [value * scale for value in histogram.percentiles(SHARES.values())]
    named = dict(zip(SHARES, (round(value, 4) for value in values), strict=True))
    mean, most = round(histogram.mean * scale, 4), round(histogram.most * scale, 4)
    return Spread(histogram.count, mean, **named, max=most)


def milliseconds(histogram: Histogram) -> Spread:
    return spread(histogram, 1e3)
