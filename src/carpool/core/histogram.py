"""Implements histograms with fixed bins, which can be added up over processes and hours, and a measure of how
far two of them differ.

A value is shared between the two bins whose middles it lies between. With bins that cut, what a still camera
measures could lie at a border, and the smallest change of the light would move all of it to the next bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_NAMES = 256
"""Of a tally; what comes after these is counted together."""

_NAMES_COMPARED = 19  # with the rest of them as many as the bins of a histogram
_HALF = 0.5  # of a picture in each bin: a bin that is empty by chance must not weigh without end
_OTHERS = ""


@dataclass(frozen=True, slots=True)
class Bins:
    """Defines equal bins from `low` to `high`, or with `logarithmic` equal factors."""

    low: float
    high: float
    count: int = 20
    logarithmic: bool = False
    _start: float = field(init=False)
    _scale: float = field(init=False)

    def __post_init__(self) -> None:
        low, high = (math.log(end) if self.logarithmic else end for end in (self.low, self.high))
        object.__setattr__(self, "_start", low)
        object.__setattr__(self, "_scale", self.count / (high - low))

    def position(self, value: float) -> float:
        """Returns it in bins from the middle of the first; what lies outside counts as the end it is
        beyond."""
        if self.logarithmic:
            value = math.log(value) if value > 0.0 else -math.inf
        place = (value - self._start) * self._scale - 0.5
        return min(max(place, 0.0), self.count - 1.0)

    def edges(self) -> list[float]:
        """Returns where the bins begin and end, one more than there are."""
        parts = [number / self.count for number in range(self.count + 1)]
        if self.logarithmic:
            return [self.low * (self.high / self.low) ** part for part in parts]
        return [self.low + (self.high - self.low) * part for part in parts]


class Histogram:
    """Counts numbers in bins. What is not a number is not counted."""

    __slots__ = ("bins", "counts")

    def __init__(self, bins: Bins, counts: Sequence[float] | None = None) -> None:
        self.bins = bins
        self.counts = [0.0] * bins.count if counts is None else [float(count) for count in counts]
        if len(self.counts) != bins.count or not all(0.0 <= count < math.inf for count in self.counts):
            raise ValueError(f"not the counts of {bins.count} bins")

    @property
    def total(self) -> float:
        return math.fsum(self.counts)

    @property
    def middle(self) -> float:
        """Returns the mean, in bins."""
        return math.fsum(place * count for place, count in enumerate(self.counts)) / (self.total or 1.0)

    def add(self, value: float, weight: float = 1.0) -> None:
        if math.isnan(value):
            return
        place = self.bins.position(value)
        below = int(place)
        above = place - below
        self.counts[below] += weight * (1.0 - above)
        if above:
            self.counts[below + 1] += weight * above

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]

    def against(self, reference: Histogram) -> float:
        return shift(reference.counts, self.counts)

    def written(self) -> list[float]:
        return [round(count, 3) for count in self.counts]


class Tally:
    """Counts names, as classes or sizes."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[str, float] | None = None) -> None:
        self.counts: dict[str, float] = {}
        for name, count in (counts or {}).items():
            if not 0.0 <= count < math.inf:
                raise ValueError("not the counts of names")
            self.add(name, float(count))

    @property
    def total(self) -> float:
        return math.fsum(self.counts.values())

    def add(self, name: str, weight: float = 1.0) -> None:
        if name not in self.counts and len(self.counts) >= MOST_NAMES:
            name = _OTHERS
        self.counts[name] = self.counts.get(name, 0.0) + weight

    def merge(self, other: Tally) -> None:
        for name, count in other.counts.items():
            self.add(name, count)

    def against(self, reference: Tally) -> float:
        _, before, now = self.compared(reference)
        return shift(before, now)

    def compared(self, reference: Tally) -> tuple[list[str], list[float], list[float]]:
        """Returns the names that the reference has most of, and all the others as one; with the counts of
        both."""
        often = sorted(reference.counts, key=lambda name: (-reference.counts[name], name))
        names = [name for name in often if name != _OTHERS][:_NAMES_COMPARED]
        before = [reference.counts[name] for name in names]
        now = [self.counts.get(name, 0.0) for name in names]
        rest_before, rest_now = reference.total - math.fsum(before), self.total - math.fsum(now)
        return [*names, _OTHERS], [*before, max(0.0, rest_before)], [*now, max(0.0, rest_now)]

    def written(self) -> dict[str, float]:
        return {name: round(count, 3) for name, count in self.counts.items()}


def shift(reference: Sequence[float], now: Sequence[float]) -> float:
    """Returns the population stability index of two histograms with the same bins, less what it would be by
    chance.

    Chance alone makes it about (bins - 1)(1/n + 1/m), with so many values in each: at 50 values and 20 bins
    that is far more than the 0.2 from which on a change is usually believed.
    """
    both = [(before, after) for before, after in zip(reference, now, strict=True) if before or after]
    n, m = math.fsum(reference), math.fsum(now)
    if len(both) < 2 or n <= 0.0 or m <= 0.0:
        return 0.0
    all_before, all_after = n + _HALF * len(both), m + _HALF * len(both)
    index = 0.0
    for before, after in both:
        p, q = (before + _HALF) / all_before, (after + _HALF) / all_after
        index += (q - p) * math.log(q / p)
    return max(0.0, index - (len(both) - 1) * (1.0 / n + 1.0 / m))
