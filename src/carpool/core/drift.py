"""A profile that no longer holds: noticed, told once, and put right from the batches that were really run.

What an instance learns of its speed is one number, gone again after an idle minute. That is right for what
passes. A device that stays slow (heat, a neighbour), or a curve that was wrong in one place only, deserves
a new curve, from which every choice follows.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp, log, sqrt

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve

_SHORTEST_S = 1e-9  # clocks tick


class Drift:
    """Watches the batches of all instances. Inside, factors are logarithms: they add up."""

    __slots__ = (
        "_batches",
        "_between",
        "_constants",
        "_far",
        "_mark",
        "_near",
        "_off",
        "_points",
        "_profile",
        "_since",
        "_suspect",
        "_told",
    )

    def __init__(self, profile: BatchCurve, constants: Constants = CONSTANTS) -> None:
        self._profile = profile
        self._constants = constants
        self._far, self._near = log(1 + constants.drift), log(1 + constants.drift_over)
        # A batch counts for the point that is nearest by ratio.
        self._between = [sqrt(small * large) for (small, _), (large, _) in pairwise(profile.points)]
        self._off = 0.0
        self._told = 0.0
        self._suspect: float | None = None  # since when it has settled somewhere off from what was told
        self._mark = 0.0  # where that was
        self._batches = 0  # since then
        self._begin(None)

    @property
    def profile(self) -> BatchCurve:
        """As it was loaded, whatever was learned since."""
        return self._profile

    @property
    def factor(self) -> float:
        """Actual over profiled time, by the profile as loaded."""
        return exp(self._off)

    @property
    def told(self) -> float:
        """The factor that was last worth telling; 1 is as profiled."""
        return exp(self._told)

    def _begin(self, now: float | None) -> None:
        self._since = now
        self._points: list[tuple[int, float]] = [(0, 0.0)] * len(self._profile.points)  # count, sum of logs

    def ran(self, images: int, seconds: float, curve: BatchCurve, now: float) -> None:
        """A batch took so long; `curve` is what is believed now."""
        if self._since is None:
            self._begin(now)
        seconds = max(seconds, _SHORTEST_S)
        index = bisect_right(self._between, images)
        count, total = self._points[index]
        self._points[index] = (count + 1, total + log(seconds / curve.times[images]))
        self._off += self._constants.drift_weight * (log(seconds / self._profile.times[images]) - self._off)
        if not self._is_news():
            self._suspect = None
        elif self._suspect is None or abs(self._off - self._mark) > self._near:
            self._suspect, self._mark, self._batches = now, self._off, 0  # it is still on its way somewhere
        else:
            self._batches += 1

    def _is_news(self) -> bool:
        """Further from what was told than noise goes; what was told stays until it is clearly over."""
        if abs(self._off) < self._near:
            return self._told != 0.0
        return abs(self._off - self._told) > self._far

    def news(self, now: float) -> float | None:
        """The factor, once for every change that lasts; 1 when it is over."""
        c = self._constants
        if self._suspect is None or now - self._suspect < c.drift_s or self._batches < 1 / c.drift_weight:
            return None
        self._suspect = None
        self._told = 0.0 if abs(self._off) < self._near else self._off
        return self.told

    def relearned(self, curve: BatchCurve, now: float) -> tuple[BatchCurve, float] | None:
        """A curve for what was run since the last look, and how much slower it is; None while this one holds.

        Each point moves by what the batches near it took; where none were run, by what the nearest did.
        """
        c = self._constants
        if self._since is None or now - self._since < c.relearn_s:
            return None
        runs = sum(count for count, _ in self._points)
        if runs < c.relearn_batches:
            return None
        moved = [total / count if count >= c.relearn_least else None for count, total in self._points]
        known = [index for index, move in enumerate(moved) if move is not None]
        overall = sum(total for _, total in self._points) / runs
        self._begin(now)
        if not any(abs(moved[index] or 0.0) > log(1 + c.relearn) for index in known):
            return None
        sizes = [log(size) for size, _ in curve.points]
        points = []
        for index, (size, seconds) in enumerate(curve.points):
            near = min(known, key=lambda other: abs(sizes[other] - sizes[index]))
            points.append((size, seconds * exp(moved[near] or 0.0)))
        return BatchCurve.measured(points, curve.max_batch, curve.buckets), exp(overall)
