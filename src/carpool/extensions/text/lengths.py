"""Learns how many tokens answers have while they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from carpool.extensions.text.text_job import TextJob

LENGTH_PRIOR: Final = 4.0
LENGTH_MEMORY: Final = 1024.0
"""What is guessed of the lengths of answers weighs as much as four answers. When so many were seen that
were so long, half of them are forgotten."""

_EXACT = 16  # ages up to here are distinguished, later ones by an eighth of their number
_FORECAST_STEPS = 4  # a forecast of who leaves holds for so many steps
_LOOK_AFTER = 16  # answers that ended: then the table is made again


class Lengths:
    """Learns, of those who had so many tokens, how many ended with the next.

    Every step of every answer counts, so that one that is cut off (its client left, its time was up, it had
    all the tokens it may) is simply not seen to end: it says that it was at least so long, and no more. A
    mean over whole answers would count it as short, and at the start only short ones are over.
    """

    __slots__ = ("_bucket", "_ended", "_guess", "_lasts", "_mean", "_news", "_seen", "limit")

    def __init__(self, limit: int, guess: float | None = None) -> None:
        """Until something is known, answers are taken for `guess` tokens long: half of what they may be."""
        self.limit = limit
        self._guess = max(1.0, limit / 2 if guess is None else min(guess, limit))
        bucket, self._bucket, begun = 0, [0], 0
        for age in range(1, limit):
            if age - begun >= max(1, begun // 8 if begun >= _EXACT else 1):
                bucket, begun = bucket + 1, age
            self._bucket.append(bucket)
        self._seen = [0.0] * (bucket + 1)
        self._ended = [0.0] * (bucket + 1)
        self._news = _LOOK_AFTER
        self._lasts: Sequence[float] = ()
        self._mean = 0.0

    def seen(self, tokens: int, ended: bool) -> None:
        """One that had so many tokens got another, with which it ended by itself, or did not."""
        bucket = self._bucket[tokens if tokens < self.limit else -1]
        self._seen[bucket] += 1.0
        if ended:
            self._ended[bucket] += 1.0
            self._news += 1
        if self._seen[bucket] > LENGTH_MEMORY:
            self._seen[bucket] /= 2.0
            self._ended[bucket] /= 2.0

    @property
    def lasts(self) -> Sequence[float]:
        """Returns the share of answers that have more than so many tokens, from 0 to the limit, beyond which
        none goes."""
        if self._news >= _LOOK_AFTER:
            self._look()
        return self._lasts

    @property
    def mean(self) -> float:
        """Tokens of an answer that may have all of them."""
        if self._news >= _LOOK_AFTER:
            self._look()
        return self._mean

    def quantile(self, share: float) -> int:
        """So many tokens suffice for this share of the answers."""
        return next((tokens for tokens, more in enumerate(self.lasts) if more <= 1.0 - share), self.limit)

    def leave(self, running: Iterable[tuple[int, int]], steps: int) -> float:
        """How many of those who have so many tokens of so many will have ended after so many steps."""
        lasts, gone = self.lasts, 0.0
        for tokens, limit in running:
            then = tokens + steps
            gone += 1.0 if then >= limit else 1.0 - lasts[then] / lasts[tokens]
        return gone

    def _look(self) -> None:
        prior = LENGTH_PRIOR
        stays = [
            1.0 - (ended + prior / self._guess) / (seen + prior)
            for seen, ended in zip(self._seen, self._ended, strict=True)
        ]
        lasts = list(accumulate(self._bucket[:-1], lambda left, b: max(1e-9, left * stays[b]), initial=1.0))
        self._mean = sum(lasts)
        self._lasts = (*lasts, 0.0)
        self._news = 0


class Departures:
    """Predicts when those who have slots will leave them. A forecast holds for some steps."""

    __slots__ = ("_forecast", "_lengths", "_made")

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._made = -1
        self._forecast: list[tuple[int, float]] = []  # steps, and how many have left by then

    def forget(self) -> None:
        self._made = -1

    def steps_until(self, places: int, step: int, held: Sequence[TextJob | None], slots: int) -> float:
        """Returns the steps from `step` until so many answers have ended, if no slot is taken meanwhile."""
        if self._made != step // _FORECAST_STEPS:
            self._made = step // _FORECAST_STEPS
            self._forecast = self._foresee([(job.tokens, job.limit) for job in held if job is not None])
        before = (0, 0.0)
        for steps, gone in self._forecast:
            if gone >= places:
                share = (places - before[1]) / (gone - before[1])
                return before[0] + share * (steps - before[0])
            before = (steps, gone)
        return before[0] + (places - before[1]) * self._lengths.mean / slots

    def _foresee(self, running: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
        found, steps = [], 1
        most = int(self._lengths.mean) + 1  # then slots that were taken meanwhile are free again
        while steps < most:
            found.append((steps, self._lengths.leave(running, steps)))
            steps *= 2
        return found
