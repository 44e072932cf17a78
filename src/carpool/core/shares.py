"""Divides a device between sources, with the guard batch that makes a fair share worth having.

A request that arrives just after a batch started waits for that batch, then rides in its own. While somebody
deserves to be served whenever it comes (a protected request, or a source below its fair share), no batch may
be so long that the two together break the promise: that is the guard batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from carpool.compiling import mypyc_attr
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.job import planned
from carpool.core.learning import Rate
from carpool.core.queue import Lane

if TYPE_CHECKING:
    from carpool.core.scheduler_state import SchedulerState

PROTECTED, ORDINARY, BACKGROUND = 0, 1, 2


def level_of(priority: int) -> int:
    """Triton's numbers: 1 is the most urgent, 0 means nothing was said."""
    if priority == 1:
        return PROTECTED
    return ORDINARY if priority in (0, 2) else BACKGROUND


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


def divide_weights(lanes: Sequence[Lane]) -> list[float]:
    """Returns each lane's part. The sources that one key's holder names share its weight: nobody has more of
    the device by making up names."""
    lanes_of = Counter(lane.holder for lane in lanes)
    for lane in lanes:
        lane.part = lane.weight / lanes_of[lane.holder] if lane.holder else lane.weight
    return [lane.part for lane in lanes]


OF_THE_REST = 3
"""Times what is free of a queue, which one client may have of it: something is left for the next."""


class PlaceShare:
    """Holds what one client (`Job.payer`) has of a model's places. Unknown clients share one, named ""."""

    __slots__ = ("name", "places", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.places = 0

    @property
    def places_after(self) -> float:
        """Returns its places for its weight, if it had one more."""
        return (self.places + 1) / self.weight


def who_yields(shares: Iterable[PlaceShare], taker: PlaceShare) -> PlaceShare | None:
    """Returns who yields where no place is free: who would have most for its weight after giving one up, if
    that is not less than what the taker has then. So places settle at shares by weight, and nobody takes any
    after that."""
    giver = max(shares, key=_left_to)
    return giver if _left_to(giver) >= taker.places_after else None


def _left_to(giver: PlaceShare) -> float:
    return (giver.places - 1) / giver.weight


class DeviceShares:
    """The largest batch allowed now, and each source's part of the device, `fair` times what its lane weighs.
    Refreshed before every batch."""

    __slots__ = ("_largest", "_slo", "_with_right_of_way", "fair", "largest", "supply")

    def __init__(self, slo: float, largest: int) -> None:
        self._slo = slo
        self._largest = largest
        self._open()

    def _open(self) -> None:
        """Nobody needs a guard: one source, or all flood alike, so that first come is fair."""
        self.largest = self._largest
        self.fair = self.supply = self._with_right_of_way = float("inf")

    def cap(self, largest: int) -> None:
        """No batch is larger than this from now on."""
        self._largest = largest
        self._open()

    def refresh(self, core: SchedulerState, now: float) -> None:
        self._open()
        if core.instances.longest < float("inf"):  # for the sake of other models on the same device
            size = core.instances.fits(core.instances.next_free, core.instances.longest)
            self.largest = max(1, min(core.curve.efficient[size], self._largest))
        since = now - core.constants.lately_s
        first: list[Lane] = []
        others: list[Lane] = []
        for lane in core.lanes.by_key.values():
            if lane.seen > since:
                (first if lane.level == PROTECTED else others).append(lane)
        if not first and len(others) <= 1:
            return
        protected = [lane.rate.at(now) for lane in first]
        parts = divide_weights(others)
        slo = self._slo - planned(core.outside.at(now), self._slo, core.constants)
        guard = self._guard(core, slo, protected=bool(protected))
        supply = core.instances.pace * core.curve.throughput(guard)
        rates = [lane.rate.at(now) for lane in others]
        fair = water_level(rates, max(0.0, supply - sum(protected)), parts)
        modest = [rate for rate, part in zip(rates, parts, strict=True) if rate <= fair * part]
        if protected or modest:
            self.largest, self.fair, self.supply = min(guard, self.largest), fair, supply
            self._with_right_of_way = sum([*protected, *modest], 0.0)

    def _guard(self, core: SchedulerState, slo: float, *, protected: bool) -> int:
        """Returns the largest batch after which a second one still fits, for who arrived just after the first
        began.

        For a protected request that second batch may even take twice its time: devices stall now and then.
        """
        stagger = 1 / len(core.instances)
        seconds = slo / ((1 + stagger) * core.constants.guard_margin)
        size = core.instances.fits(core.instances.next_free, seconds)
        if protected:
            waits = 2 + core.constants.protected_wait * stagger
            size = min(size, core.curve.fits(slo / (waits * core.instances.next_free.speed.mean)))
        return max(1, min(core.curve.efficient[size], self._largest))

    def of(self, lane: Lane) -> float:
        """Returns the part of the device that this lane may count on."""
        if lane.level == PROTECTED or self.fair == float("inf"):
            return 1.0
        return min(1.0, max(self.fair * lane.part / self.supply, 1e-3))

    def to_keep_up_with(self, core: SchedulerState, lane: Lane, now: float) -> float:
        """The rate that batches made small for this lane's sake must still carry.

        For whoever has the right of way, only the others who have it: the rest is given up for them.
        """
        if lane.level == PROTECTED or lane.rate.at(now) <= self.fair * lane.part < float("inf"):
            return min(self._with_right_of_way, core.rate(now))
        return core.rate(now)


# Requests of all models of an engine wait in one line until they are offered. When it is long, only a model
# that asks for too much can make it shorter: the others wait in it as well, and refusing them helps nobody.


_LEAST = 1.0  # requests a second: who is asked less has nobody waiting


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
        """Returns whether other models are asked, too. One that is only loaded does not wait for anybody."""
        return any(one is not self and one.asked(now) > _LEAST for one in self._intake.entrances)

    def is_too_much(self, now: float) -> bool:
        """Returns whether it is above its fair part, if a little less than what was taken lately is divided.
        Fair is max-min, so somebody always is; who is alone asks for all that is asked."""
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
