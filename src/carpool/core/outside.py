"""What clients wait outside the scheduler's account: for a request to be read, for an answer to leave."""

from __future__ import annotations

from carpool.core.constants import CONSTANTS, Constants


class Outside:
    """An estimate of it for one model, in seconds: up fast, down slowly, so that few are worse.

    It falls with time and not with each answer: those of one turn of a loop are all alike, and many of them
    would forget a stall before the next. Nothing is forgotten while nobody is answered, and need not be:
    whoever is refused for it is answered too, and after two silent seconds the first to come decides alone.
    """

    __slots__ = ("_at", "_fall", "_rise", "seconds")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._rise = constants.outside_rise
        self._fall = constants.outside_fall
        self._at = float("-inf")
        self.seconds = 0.0

    def seen(self, seconds: float, now: float) -> None:
        """An answer has left: its client waited so long beyond what was planned."""
        gap = (seconds if seconds > 0.0 else 0.0) - self.seconds
        if gap > 0.0:
            self.seconds += self._rise * gap
        else:
            part = self._fall * (now - self._at)
            self.seconds += gap * part if part < 1.0 else gap
        self._at = now


def planned(outside: float, budget: float, constants: Constants = CONSTANTS) -> float:
    """How much of its budget a request's plan leaves to what is outside."""
    most = constants.most_outside * budget
    if outside > most:
        outside = most
    return outside if outside > 0.0 else 0.0  # NaN too
