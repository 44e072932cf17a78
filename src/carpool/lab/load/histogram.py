"""Counts in buckets that grow by one percent: any percentile within half a percent, in little memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log, sqrt

_GROWTH = 1.01
_PER_BUCKET = 1 / log(_GROWTH)
_SMALLEST = 1e-6  # a microsecond: everything below it is one bucket

RELATIVE_ERROR = sqrt(_GROWTH) - 1


class Histogram:
    """Values of 0 or more. Count, mean, least and most are exact, percentiles within `RELATIVE_ERROR`."""

    __slots__ = ("buckets", "count", "least", "most", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = float("inf")
        self.most = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if value < 0:
            value = 0.0
        index = int(log(value / _SMALLEST) * _PER_BUCKET) + 1 if value > _SMALLEST else 0
        buckets = self.buckets
        buckets[index] = buckets.get(index, 0) + 1
        self.count += 1
        self.total += value
        if value > self.most:
            self.most = value
        if value < self.least:
            self.least = value

    def merge(self, other: Histogram) -> None:
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self.least = min(self.least, other.least)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """The smallest value that `share` of all values do not exceed; 0 if there are none."""
        return self.percentiles([share])[0]

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """For shares that rise."""
        found = []
        seen = 0
        ordered = iter(sorted(self.buckets.items()))
        index = 0
        for share in shares:
            rank = min(max(1, ceil(share * self.count)), self.count)
            while seen < rank:
                index, count = next(ordered)
                seen += count
            found.append(self._value(index) if self.count else 0.0)
        return found

    def _value(self, index: int) -> float:
        middle = _SMALLEST * _GROWTH ** (index - 0.5) if index else _SMALLEST
        return min(max(middle, self.least), self.most)


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
