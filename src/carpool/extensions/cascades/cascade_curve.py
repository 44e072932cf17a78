"""Estimates from a sample what a cascade would be worth at every threshold, by counting, and how certain that
is.

A cheap model answers what it is sure of, and a big one the rest. Each picture of the sample has how sure the
cheap model was, and whether each of them was right; without labels, right is what the big model says. Losing
is then measured against the big model: pictures that it would have had right and the cascade has wrong, less
those that it has the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import exp, lgamma, log, log1p, sqrt

CONFIDENCE = 0.95  # one-sided
_STEPS = 200
_TINY = 1e-300


# ---- how sure a count is


@lru_cache(maxsize=10_000)
def at_most(happened: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Returns the highest rate under which so few would still be likely: Clopper and Pearson's, one-sided.
    Most points of a curve differ from their neighbours in what is kept, and not in these counts."""
    if trials <= 0 or happened >= trials:
        return 1.0
    return _quantile(confidence, happened + 1, trials - happened)


def at_least(happened: int, trials: int, confidence: float = CONFIDENCE) -> float:
    return 1.0 - at_most(trials - happened, trials, confidence)


def _quantile(share: float, a: float, b: float) -> float:
    """Returns the quantile of a beta distribution: bisected, since that is always right."""
    low, high = 0.0, 1.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if beta_below(middle, a, b) < share else (low, middle)
    return high


def beta_below(x: float, a: float, b: float) -> float:
    """Returns how much of a beta distribution lies below: the regularised incomplete beta function."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges
        return 1.0 - beta_below(1.0 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """Returns the continued fraction of that function, evaluated from its front (Lentz)."""
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, _STEPS + int(sqrt(a + b))):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _not_zero(1.0 + term * d)
            c = _not_zero(1.0 + term / c)
            found *= c * d
        if abs(c * d - 1.0) < 1e-12:
            break
    return found


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


# ---- the curve


@dataclass(frozen=True, slots=True)
class Judged:
    """Describes one picture: how sure the cheap model was, and who was right."""

    certainty: float
    cheap: bool
    big: bool


@dataclass(frozen=True, slots=True)
class Point:
    """Describes what is kept from this certainty on, of the whole sample. Shares; `loss` is what the big
    model alone would have had right more, and `loss_at_most` what that is elsewhere at most, with
    CONFIDENCE."""

    below: float  # less certain than this goes to the big model
    kept: int
    harmed: int  # kept, and only the big model would have been right
    helped: int  # kept, and only the cheap model was
    pictures: int
    accuracy: float

    @property
    def share(self) -> float:
        return self.kept / self.pictures

    @property
    def loss(self) -> float:
        return (self.harmed - self.helped) / self.pictures

    @property
    def loss_at_most(self) -> float:
        """Two counts that may both be unlucky: each gets half of the doubt, which is on the safe side."""
        if not self.helped:
            return at_most(self.harmed, self.pictures)
        each = (1 + CONFIDENCE) / 2
        worst = at_most(self.harmed, self.pictures, each)
        return worst - at_least(self.helped, self.pictures, each)


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds every threshold that the sample distinguishes: from no answer kept to all of them."""

    points: tuple[Point, ...]
    cheap: float  # its accuracy alone
    big: float
    rises: bool  # the surer half is right more often than the other: without that no threshold helps

    def gain_at_least(self, point: Point) -> float:
        """Returns what this threshold has right more than the cheap model alone, with CONFIDENCE."""
        everything = self.points[-1]
        won, lost = everything.harmed - point.harmed, everything.helped - point.helped
        each = (1 + CONFIDENCE) / 2
        return at_least(won, point.pictures, each) - at_most(lost, point.pictures, each)


def curve_of(sample: Sequence[Judged]) -> Curve:
    if not sample:
        raise ValueError("a curve needs a sample")
    surest_first = sorted(sample, key=lambda one: -one.certainty)
    pictures, big_right = len(sample), sum(one.big for one in sample)
    kept = harmed = helped = 0
    points = [Point(_above(surest_first[0].certainty), 0, 0, 0, pictures, big_right / pictures)]
    for certainty, alike in groupby(surest_first, key=lambda one: one.certainty):
        for one in alike:
            kept += 1
            harmed += one.big and not one.cheap
            helped += one.cheap and not one.big
        right = big_right - harmed + helped
        points.append(Point(certainty, kept, harmed, helped, pictures, right / pictures))
    cheap_right = sum(one.cheap for one in sample)
    return Curve(tuple(points), cheap_right / pictures, big_right / pictures, _rises(surest_first))


def _above(certainty: float) -> float:
    """Returns a threshold that nothing in the sample reaches."""
    return max(1.0, certainty) + 1e-6


def _rises(surest_first: Sequence[Judged]) -> bool:
    """Decides by Fisher's reasoning in its simplest form: two shares, and a difference of 1.64 standard
    errors."""
    half = len(surest_first) // 2
    if not half:
        return False
    sure, unsure = (
        sum(one.cheap for one in part) / half for part in (surest_first[:half], surest_first[-half:])
    )
    mean = (sure + unsure) / 2
    return sure - unsure > 1.645 * sqrt(max(2 * mean * (1 - mean), 1e-12) / half)
