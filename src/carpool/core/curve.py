"""Describes t(B): how long a batch of B images takes. The one fact everything else is computed from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, sqrt

DEFAULT_MAX_BATCH = 64
DISTURBED = "disturbed"
"""Stands behind the points of a curve that was measured while other work took the machine's time."""


class CurveError(ValueError):
    """A curve that cannot be right; the message says what would be."""


class BatchCurve:
    """A table of seconds for 1..max_batch images, with padded sizes at their padded cost.

    `times[n]` is t(n); `efficient[n]` is the n' ≤ n with the most images per second, which rounds to engine
    buckets and survives cliffs in the curve.
    """

    __slots__ = ("buckets", "efficient", "max_batch", "points", "times")

    def __init__(
        self, points: Sequence[tuple[int, float]], max_batch: int | None = None, buckets: Iterable[int] = ()
    ) -> None:
        _check_points(points)
        self.points = tuple(points)
        self.max_batch = max_batch or points[-1][0]
        self.buckets = tuple(sorted(b for b in set(buckets) if b <= self.max_batch))
        if self.buckets and self.buckets[-1] < self.max_batch:
            self.buckets += (self.max_batch,)
        sizes = [self.padded(n) for n in range(self.max_batch + 1)]
        # The running maximum only evens out the last digit of interpolated times.
        self.times = tuple(accumulate((_interpolate(self.points, n) for n in sizes), max))
        self.efficient = _most_efficient(self.times)

    @classmethod
    def linear(cls, fixed: float, per_image: float, max_batch: int = DEFAULT_MAX_BATCH) -> BatchCurve:
        return cls(_line(fixed, per_image, max_batch), max_batch)

    @classmethod
    def measured(
        cls, points: Sequence[tuple[int, float]], max_batch: int | None = None, buckets: Iterable[int] = ()
    ) -> BatchCurve:
        """Like the constructor, for measurements: noise may not make a larger batch look cheaper."""
        rising: list[tuple[int, float]] = []
        for size, seconds in sorted(points):
            rising.append((size, max(seconds, rising[-1][1] if rising else seconds)))
        return cls(rising, max_batch, buckets)

    @classmethod
    def parse(cls, text: str, max_batch: int | None = None, buckets: Iterable[int] = ()) -> BatchCurve:
        """Read `4+1` (ms fixed + ms per image) or `1:6.2,4:9.1,16:21` (batch:ms)."""
        if text.endswith(f",{DISTURBED}"):
            raise CurveError(
                "it was measured on a disturbed machine, where batches take up to several times as long: "
                f"measure it again on a quiet one, or remove ,{DISTURBED} to use it anyway"
            )
        if "+" in text and ":" not in text:
            return cls(*_parse_linear(text, max_batch), buckets)
        return cls(_parse_points(text), max_batch, buckets)

    def padded(self, images: int) -> int:
        """Returns the batch size the engine really runs for this many images."""
        if not self.buckets or images == 0:
            return images
        return self.buckets[bisect_left(self.buckets, images)]

    def delayed(self, seconds: float) -> BatchCurve:
        """Every batch takes so much longer, whatever its size."""
        points = self.points
        if points[-1][0] < self.max_batch:  # one point says nothing of the slope, which is not to change
            points = (*points, (self.max_batch, self.times[self.max_batch]))
        later = [(size, takes + seconds) for size, takes in points]
        return BatchCurve(later, self.max_batch, self.buckets)

    def fits(self, seconds: float) -> int:
        """Returns the largest batch that takes no longer than this; 0 where not even one image fits."""
        return bisect_right(self.times, seconds) - 1 if seconds >= 0 else 0

    def throughput(self, images: int) -> float:
        """Returns images per second of one instance that runs batches of this size."""
        return images / self.times[images]

    def fit(self) -> tuple[float, float]:
        """Least-squares (fixed, per image) through the points the curve was made from."""
        if len(self.points) == 1:
            return 0.0, self.points[0][1] / self.points[0][0]
        n = len(self.points)
        mean_size = sum(size for size, _ in self.points) / n
        mean_time = sum(seconds for _, seconds in self.points) / n
        spread = sum((size - mean_size) ** 2 for size, _ in self.points)
        slope = sum((size - mean_size) * (seconds - mean_time) for size, seconds in self.points) / spread
        return mean_time - slope * mean_size, slope


def _check_points(points: Sequence[tuple[int, float]]) -> None:
    if not points:
        raise CurveError("a curve needs at least one point, like 1:6.2")
    for size, seconds in points:
        if size < 1:
            raise CurveError(f"batch sizes start at 1, not {size}")
        if not 0 < seconds < float("inf"):
            raise CurveError(f"the time for batch {size} must be above 0, not {seconds * 1e3:g} ms")
    for (size, seconds), (larger, longer) in pairwise(points):
        if larger <= size:
            raise CurveError(f"batch sizes must rise: {larger} comes after {size}")
        if longer < seconds:
            raise CurveError(
                f"a larger batch cannot be faster: batch {larger} takes {longer * 1e3:g} ms, "
                f"batch {size} takes {seconds * 1e3:g} ms"
            )


def _parse_linear(text: str, max_batch: int | None) -> tuple[list[tuple[int, float]], int]:
    try:
        fixed, per_image = (float(part) / 1e3 for part in text.split("+"))
    except ValueError:
        raise CurveError(f"cannot read {text!r}: write fixed+per_image in ms, like 4+1") from None
    if fixed < 0 or per_image < 0 or fixed + per_image <= 0:
        raise CurveError(f"cannot use {text!r}: both parts must be 0 or more, and not both 0, like 4+1")
    largest = max_batch or DEFAULT_MAX_BATCH
    return _line(fixed, per_image, largest), largest


def _line(fixed: float, per_image: float, largest: int) -> list[tuple[int, float]]:
    return [(size, fixed + per_image * size) for size in sorted({1, largest})]


def _parse_points(text: str) -> list[tuple[int, float]]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(int(size), float(ms) / 1e3) for size, ms in pairs]
    except ValueError:
        raise CurveError(
            f"cannot read {text!r}: write 4+1 or batch:ms points like 1:6.2,4:9.1,16:21"
        ) from None


def _interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """Follows straight lines between points; flat below the first, the last slope beyond the last."""
    if size == 0:
        return 0.0
    if size <= points[0][0] or len(points) == 1:
        # One point says nothing of the slope: assume no gain from a larger batch.
        return points[0][1] * max(1.0, size / points[0][0])
    above = next((i for i, (s, _) in enumerate(points) if s >= size), len(points) - 1)
    (size_a, time_a), (size_b, time_b) = points[above - 1], points[above]
    return time_a + (time_b - time_a) * (size - size_a) / (size_b - size_a)


def _most_efficient(times: Sequence[float]) -> tuple[int, ...]:
    best = [0, 1]
    for size in range(2, len(times)):
        before = best[-1]
        best.append(size if size * times[before] >= before * times[size] else before)
    return tuple(best)


# What a measured curve looks like: a line, as far as it is one, and the knee.


_KNEE = 0.9  # of the best rate
_OFF = 0.1  # a point this far from a line is not on it

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a curve as a line, in seconds. `residuals` are (size, measured over line, less 1) of all
    points, on the line or not."""

    fixed: float
    per_image: float
    residuals: tuple[tuple[int, float], ...]
    knee: int  # the smallest size with nine tenths of the best images per second
    line_from: int  # the line holds from here
    line_until: int  # to here; 0 and 0 where no three points lie on one, and it is the nearest to all

    @property
    def bends(self) -> bool:
        return (self.line_from, self.line_until) != (self.residuals[0][0], self.residuals[-1][0])


def shape_of(points: Points) -> Shape:
    """Returns the shape of at least one point, with sizes rising."""
    on_line = _longest_line(points)
    fixed, per_image = line(on_line or points)
    rates = {size: size / seconds for size, seconds in points}
    best = max(rates.values())
    return Shape(
        fixed,
        per_image,
        tuple((size, _off(seconds, fixed + per_image * size)) for size, seconds in points),
        next(size for size, rate in rates.items() if rate >= _KNEE * best),
        on_line[0][0] if on_line else 0,
        on_line[-1][0] if on_line else 0,
    )


def _longest_line(points: Points) -> Points:
    """The most neighbours that lie on one line, the smallest sizes first; one or two alone always do."""
    if len(points) < 3:
        return points
    for count in range(len(points), 2, -1):
        for first in range(len(points) - count + 1):
            tried = points[first : first + count]
            fixed, per_image = line(tried)
            if all(abs(_off(seconds, fixed + per_image * size)) <= _OFF for size, seconds in tried):
                return tried
    return ()


def _off(seconds: float, expected: float) -> float:
    return seconds / max(expected, 1e-12) - 1


def line(points: Points) -> tuple[float, float]:
    """(fixed, per image) by least squares of the relative error: 1 ms matters more to 5 ms than to 500.

    Neither is below 0, whatever noise says: a batch of none takes no less than nothing.
    """
    if len(points) == 1:
        return 0.0, points[0][1] / points[0][0]
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    size = sum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    time = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (s - size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    slope = sum(w * (s - size) * (t - time) for w, (s, t) in zip(weights, points, strict=True)) / spread
    if slope < 0:  # noise: a larger batch is no cheaper
        return time, 0.0
    if time - slope * size < 0:
        squares = sum(w * s * s for w, (s, _) in zip(weights, points, strict=True))
        return 0.0, sum(w * s * t for w, (s, t) in zip(weights, points, strict=True)) / squares
    return time - slope * size, slope


# Closed forms: what a device can carry within a promise, before anything is simulated.
#
# t(B) = a + b·B, ρ = λ·b. For derivations and how close each comes to simulation, see docs/scheduling.md.


def promised_batch(curve: BatchCurve, slo: float) -> int:
    """Returns the most efficient batch with 2·t(B) ≤ SLO; 0 where there is none.

    Twice, because a request may arrive just after a batch started: it waits for that one, then for its own.
    """
    return curve.efficient[curve.fits(slo / 2)]


def slo_capacity(curve: BatchCurve, slo: float, instances: int = 1) -> float:
    """Returns images per second that can be promised: max B/t(B) with 2·t(B) ≤ SLO."""
    batch = promised_batch(curve, slo)
    return instances * curve.throughput(batch) if batch else 0.0


def fluid_bound(curve: BatchCurve, slo: float, rate: float, instances: int = 1) -> float:
    """Returns the most images per second that can be answered in time: max B/t(B) with t(B) + B/λ ≤ SLO.

    A batch takes at least B/λ to gather. An estimate: a scheduler that knows the future can beat it slightly.
    """
    rates = (
        curve.throughput(size)
        for size in range(1, curve.max_batch + 1)
        if curve.times[size] + size / rate <= slo
    )
    return min(rate, instances * max(rates, default=0.0))


def steady_batch(curve: BatchCurve, rate: float, instances: int = 1) -> tuple[float, float]:
    """Returns (images, seconds) of the batch that forms by itself when no request is held back on purpose."""
    fixed, per_image = curve.fit()
    load = rate / instances * per_image
    if load >= 1:
        return inf, inf
    seconds = fixed / (1 - load)
    return max(1.0, rate / instances * seconds), max(seconds, curve.times[1])


def expected_p99(curve: BatchCurve, rate: float, instances: int = 1) -> float:
    """Returns seconds; good to a few percent up to ρ = 0.7, then on the safe side."""
    fixed, per_image = curve.fit()
    load = rate / instances * per_image
    images, seconds = steady_batch(curve, rate, instances)
    if images == inf:
        return inf
    swing = 2.3 * per_image * sqrt(images * (2 + 2 * load) / (1 - load * load))
    return max(2 * seconds, 1.5 * (fixed + per_image)) + swing


def sizes(largest: int) -> list[int]:
    """Return the batch sizes that a curve is measured at: powers of two, and the largest batch itself."""
    powers = [1 << n for n in range(largest.bit_length())]
    return sorted({*powers, largest})
