"""What a measured curve looks like: a line, as far as it is one, and the knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_KNEE = 0.9  # of the best rate
_OFF = 0.1  # a point this far from a line is not on it

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Seconds. `residuals` are (size, measured over line, less 1) of all points, on the line or not."""

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
    """Of at least one point, sizes rising."""
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
