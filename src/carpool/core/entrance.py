"""What reaches the models of one engine through its one loop, and who asks for more than a fair part of it.

Requests of all models wait in the same line until they are offered. When that line is long, only a model that
asks for too much can make it shorter: the others wait in it as well, and refusing them would help nobody.
"""

from __future__ import annotations

from weakref import WeakSet

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.learning import Rate
from carpool.core.shares import water_level

_LEAST = 1.0  # requests a second: who is asked less has nobody waiting


class Entrance:
    """One model's part of the intake, in requests per second."""

    __slots__ = ("__weakref__", "_asked", "_intake", "_taken")

    def __init__(self, intake: Intake, memory: float) -> None:
        self._intake = intake
        self._asked = Rate(memory)
        self._taken = Rate(memory)

    def takes(self, now: float) -> None:
        """A request was offered, whatever became of it."""
        self._asked.add(1, now)
        self._taken.add(1, now)

    def spared(self, requests: int, now: float) -> None:
        """So many were refused before they came here."""
        self._asked.add(requests, now)

    def asked(self, now: float) -> float:
        return self._asked.at(now)

    def taken(self, now: float) -> float:
        return self._taken.at(now)

    def has_company(self, now: float) -> bool:
        return self._intake.has_others(self, now)

    def is_too_much(self, now: float) -> bool:
        return self._intake.is_too_much(self, now)


class Intake:
    """Of one engine. A model counts for as long as its entrance is held."""

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._memory = constants.rate_memory_s
        self._share = constants.backlog_share
        self._entrances: WeakSet[Entrance] = WeakSet()

    def join(self) -> Entrance:
        entrance = Entrance(self, self._memory)
        self._entrances.add(entrance)
        return entrance

    def has_others(self, entrance: Entrance, now: float) -> bool:
        """Whether other models are asked, too. One that is only loaded does not wait for anybody."""
        return any(one is not entrance and one.asked(now) > _LEAST for one in self._entrances)

    def is_too_much(self, entrance: Entrance, now: float) -> bool:
        """Whether it is above its fair part, if a little less than what was taken lately is divided. Fair is
        max-min, so somebody always is; who is alone asks for all that is asked."""
        known = list(self._entrances)
        if len(known) == 1:
            return True
        taken = sum(one.taken(now) for one in known)
        level = water_level([one.asked(now) for one in known], self._share * taken)
        return entrance.asked(now) > level
