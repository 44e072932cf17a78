"""Watches whether an event still happens as often as it did at first: reported once when it does not, and
once more when it does again. Pure: the caller passes each observation."""

from __future__ import annotations

from typing import NamedTuple

from carpool.core.evidence import Interval, interval


class Moved(NamedTuple):
    """Describes a move from so often to so often; or it is `over`."""

    before: float
    now: float
    over: bool


class ShareWatch:
    """Compares each later window of observations with the first one. Both shares are estimates: while their
    confidence intervals overlap, nothing is reported."""

    __slots__ = ("_confidence", "_happened", "_told", "_trials", "_usual", "_window")

    def __init__(self, window: int, confidence: float = 0.999) -> None:
        self._window = window
        self._confidence = confidence
        self._trials = self._happened = 0
        self._usual: tuple[float, Interval] | None = None
        self._told = False

    def seen(self, happened: bool) -> Moved | None:
        self._trials += 1
        self._happened += happened
        if self._trials < self._window:
            return None
        share = self._happened / self._trials
        now = interval(self._happened, self._trials, self._confidence)
        self._trials = self._happened = 0
        if self._usual is None:
            self._usual = share, now
            return None
        before, usual = self._usual
        moved = now.low > usual.high or now.high < usual.low
        if moved is self._told:
            return None
        self._told = moved
        return Moved(before, share, not moved)
