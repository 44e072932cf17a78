"""Measures which model asks for more than its fair part of what one engine can take in.

Requests of all models of an engine wait in one line until they are offered. When it is long, only a model
that asks for too much can make it shorter: the others wait in it as well, and rejecting them helps no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from carpool.compiling import mypyc_attr
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.learning import Rate

_LEAST = 1.0  # requests a second: a model that is asked less has no requests waiting


def water_level(demands: Sequence[float], supply: float, weights: Sequence[float] = ()) -> float:
    """The most each may have for a weight of 1, which it has where none are given, so that together they use
    the supply; infinite when all demands fit."""
    left = supply
    weights = weights or [1.0] * len(demands)
    together = sum(weights)
    asked = zip(demands, weights, strict=True)
    for per_weight, weight in sorted([(demand / weight, weight) for demand, weight in asked]):
        fair = left / together
        if per_weight > fair:
            return max(fair, 0.0)
        left -= per_weight * weight
        together -= weight
    return float("inf")


@mypyc_attr(native_class=False)  # others hold it weakly
class Entrance:
    """Measures one model's part of the intake, in requests per second."""

    __slots__ = ("__weakref__", "_intake", "_spared", "_taken")

    def __init__(self, intake: Intake, memory: float) -> None:
        self._intake = intake
        self._spared = Rate(memory)
        self._taken = Rate(memory)

    def takes(self, now: float) -> None:
        """A request was offered, whatever became of it."""
        self._taken.add(1, now)

    def spared(self, requests: int, now: float) -> None:
        """So many were refused before they came here."""
        self._spared.add(requests, now)

    def asked(self, now: float) -> float:
        return self._taken.at(now) + self._spared.at(now)

    def taken(self, now: float) -> float:
        return self._taken.at(now)

    def has_company(self, now: float) -> bool:
        """Returns whether other models are asked, too. One that is only loaded has no requests that wait."""
        return any(one is not self and one.asked(now) > _LEAST for one in self._intake.entrances)

    def is_too_much(self, now: float) -> bool:
        """Returns whether it is above its fair part, if a little less than what was taken lately is divided.
        Fair is max-min, so some model always is; a model that is alone asks for all that is asked."""
        known = list(self._intake.entrances)
        if len(known) == 1:
            return True
        taken = sum(one.taken(now) for one in known)
        level = water_level([one.asked(now) for one in known], self._intake.share * taken)
        return self.asked(now) > level


class Intake:
    """Measures the intake of one engine. A model counts for as long as its entrance is held."""

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._memory = constants.rate_memory_s
        self.share = constants.backlog_share
        self.entrances: WeakSet[Entrance] = WeakSet()

    def join(self) -> Entrance:
        entrance = Entrance(self, self._memory)
        self.entrances.add(entrance)
        return entrance
