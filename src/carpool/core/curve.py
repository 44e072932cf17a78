"""t(B): how long a batch of B images takes. The one fact everything else is computed from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

DEFAULT_MAX_BATCH = 64


class CurveError(ValueError):
    """A curve that cannot be right; the message says what would be."""


class BatchCurve:
    """A table of seconds for 1..max_batch images, with padded sizes at their padded cost.

    `times[n]` is t(n); `efficient[n]` is the n' ≤ n with the most images per second, which rounds to engine
    buckets and survives cliffs in the curve.
    """

    __slots__ = ("buckets", "efficient", "max_batch", "points", "times")

    def __init__(
        self,
        points: Sequence[tuple[int, float]],
        max_batch: int | None = None,
        buckets: Iterable[int] = (),
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
        if "+" in text and ":" not in text:
            return cls(*_parse_linear(text, max_batch), buckets)
        return cls(_parse_points(text), max_batch, buckets)

    def padded(self, images: int) -> int:
        """The batch size the engine really runs for this many images."""
        if not self.buckets or images == 0:
            return images
        return self.buckets[bisect_left(self.buckets, images)]

    def fits(self, seconds: float) -> int:
        """The largest batch that takes no longer than this; 0 where not even one image fits."""
        return bisect_right(self.times, seconds) - 1 if seconds >= 0 else 0

    def throughput(self, images: int) -> float:
        """Images per second of one instance that runs batches of this size."""
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
    """Straight lines between points; flat below the first, the last slope beyond the last."""
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
