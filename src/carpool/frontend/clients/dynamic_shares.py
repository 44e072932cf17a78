"""Bounds what each client may have of something, by what is left for the others (dynamic thresholds)."""

from __future__ import annotations


class Shares:
    """Divides something of which there is a bounded amount, by the names of those who have some of it."""

    __slots__ = ("_of", "_times", "most", "total")

    def __init__(self, most: int, times: int = 1) -> None:
        """One may have so many `times` what is left for the others."""
        self.most = most
        self._times = times
        self.total = 0
        self._of: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self._of.get(name, 0)

    def free(self, name: str) -> int:
        """Returns how much more it may take."""
        return self._times * (self.most - self.total) - self._of.get(name, 0)

    def take(self, name: str, amount: int) -> bool:
        """Takes an amount; False, and nothing taken, if that is more than is left for the others."""
        mine = self._of.get(name, 0) + amount
        if mine > self._times * (self.most - self.total) and (self.total or not self.most):
            return False
        self.total += amount
        self._of[name] = mine
        return True

    def give(self, name: str, amount: int) -> None:
        if not amount:
            return
        left = self._of[name] - amount
        self.total -= amount
        if left:
            self._of[name] = left
        else:
            del self._of[name]
