"""A profile that no longer holds: noticed, told once, and put right from the batches that were really run.

What an instance learns of its speed is one number, gone again after an idle minute. That is right for what
passes. A device that stays slow (heat, a neighbour), or a curve that was wrong in one place only, deserves
a new curve, from which every choice follows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve

_SHORTEST_S = 1e-9  # clocks tick
_SAME = 1e-5  # curves closer than this need not replace each other


class Drift:
    """Watches the batches of all instances. Inside, factors are logarithms: they add up."""

    __slots__ = (
        "_batches",
        "_between",
        "_constants",
        "_early",
        "_far",
        "_mark",
        "_near",
        "_off",
        "_patience",
        "_points",
        "_profile",
        "_second_chance",
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
        self._second_chance = [False] * len(profile.points)  # once slow, not run since, and believed faster
        self._patience = [1] * len(profile.points)  # how many times as long the next one takes
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
        self._early = False
        self._points: list[tuple[int, float]] = [(0, 0.0)] * len(self._profile.points)  # count, sum of logs

    def ran(self, images: int, seconds: float, curve: BatchCurve, now: float) -> None:
        """A batch took so long; `curve` is what is believed now."""
        if self._since is None:
            self._begin(now)
        seconds = max(seconds, _SHORTEST_S)
        index = bisect_right(self._between, images)
        count, total = self._points[index]
        self._points[index] = (count + 1, total + log(seconds / curve.times[images]))
        if self._second_chance[index] and count + 1 >= self._constants.relearn_least:
            self._early = True
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

    def is_due(self, now: float) -> bool:
        """Whether enough was run since the last look at the curve."""
        if self._early:
            return True
        c = self._constants
        if self._since is None or now - self._since < c.relearn_s:
            return False
        return sum(count for count, _ in self._points) >= c.relearn_batches

    def put_off(self, now: float) -> None:
        """What was run says nothing about all instances. A trial goes on meanwhile, but not for ever."""
        if not self._early or self._since is None or now - self._since >= self._constants.relearn_s:
            self._begin(now)

    def relearned(self, curve: BatchCurve, now: float) -> tuple[BatchCurve, float] | None:
        """A curve for what was run since the last look, and how much slower it is; None while this one holds.

        Each point moves by what the batches near it took; where none were run, by what the nearest did. Those
        that once proved slow come back little by little, and when they are tried again, are looked at early.
        """
        if not self.is_due(now):
            return None
        c, early = self._constants, self._early
        moves = {
            index: total / count
            for index, (count, total) in enumerate(self._points)
            if count >= c.relearn_least
        }
        overall = sum(total for _, total in self._points) / sum(count for count, _ in self._points)
        self._begin(now)
        if not any(abs(move) > log(1 + c.relearn) for move in moves.values()):
            moves, overall = dict.fromkeys(moves, 0.0), 0.0  # it holds where batches were run
        points = self._moved(curve, moves, early) if moves else curve.points
        if all(abs(log(new / old)) < _SAME for (_, new), (_, old) in zip(points, curve.points, strict=True)):
            return None
        return BatchCurve.measured(points, curve.max_batch, curve.buckets), exp(overall)

    def _moved(self, curve: BatchCurve, moves: dict[int, float], early: bool) -> Sequence[tuple[int, float]]:
        sizes = [log(size) for size, _ in curve.points]
        off = [
            log(seconds / loaded)
            for (_, seconds), (_, loaded) in zip(curve.points, self._profile.points, strict=True)
        ]
        points = []
        for index, (size, seconds) in enumerate(curve.points):
            near = min(moves, key=lambda other: abs(sizes[other] - sizes[index]))
            move = moves[near]
            if near == index:
                self._judge(index, slow=move > log(1 + self._constants.relearn))
            elif early:
                move = 0.0  # that look is about others
            elif off[index] > off[near]:
                move -= self._constants.relearn_back / self._patience[index] * (off[index] - off[near])
                self._second_chance[index] = True
            points.append((size, seconds * exp(move)))
        return points

    def _judge(self, index: int, *, slow: bool) -> None:
        """A size that was tried again is slow still, or it is not."""
        if self._second_chance[index]:
            longest = self._constants.relearn_patience
            self._patience[index] = min(2 * self._patience[index], longest) if slow else 1
            self._second_chance[index] = False
