"""A bucket of time, from which one party's work is paid."""

from __future__ import annotations

from math import inf


class Bucket:
    """Gets so much time per second, saved up to a limit. Work may overdraw it, but no deeper than `deepest`:
    below 0, its owner rests."""

    __slots__ = ("_at", "_deepest", "_most", "_share", "tokens")

    def __init__(self, share: float, most: float, now: float, deepest: float = inf) -> None:
        self._share = share
        self._most = most
        self._deepest = deepest
        self.tokens = most  # seconds, as of the last look
        self._at = now

    def left(self, now: float) -> float:
        if now > self._at:
            self.tokens = min(self._most, self.tokens + self._share * (now - self._at))
            self._at = now
        return self.tokens

    def is_full(self, now: float) -> bool:
        return self.left(now) >= self._most

    def spend(self, cost: float) -> None:
        """Pays for work, as of the last look."""
        self.tokens = max(self.tokens - cost, -self._deepest)

    def rest_s(self, now: float) -> float:
        """Returns the seconds until it is not overdrawn any more."""
        return max(0.0, -self.left(now) / self._share)
