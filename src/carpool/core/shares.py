"""Divides a device between sources, with the guard batch that makes a fair share worth having.

A request that arrives just after a batch started waits for that batch, then for its own. While a request
deserves to be served whenever it comes (a protected one, or one of a source below its fair share), no batch
may be so long that the two together break the promise: that is the guard batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from carpool.core.intake import water_level
from carpool.core.job import PROTECTED, Lane, planned
from carpool.core.scheduler_state import SchedulerState

PROTECTED_WAIT: Final = 0.75
"""A protected request survives a stall (twice the time) of its own batch, unless it waited longer than
this share of the one before: 0.999 of them make it where 2 batches in 1,000 stall."""


def divide_weights(lanes: Sequence[Lane]) -> list[float]:
    """Returns each lane's part. The sources that one key's holder names share its weight: making up names
    gets no client more of the device."""
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
    that is not less than what the taker has then. So places settle at shares by weight, and no client takes
    any after that."""
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
        """Lifts the guard. One source, or all flood alike, need none: first come is fair."""
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
            waits = 2 + PROTECTED_WAIT * stagger
            size = min(size, core.curve.fits(slo / (waits * core.instances.next_free.speed.mean)))
        return max(1, min(core.curve.efficient[size], self._largest))

    def of(self, lane: Lane) -> float:
        """Returns the part of the device that this lane may count on."""
        if lane.level == PROTECTED or self.fair == float("inf"):
            return 1.0
        return min(1.0, max(self.fair * lane.part / self.supply, 1e-3))

    def to_keep_up_with(self, core: SchedulerState, lane: Lane, now: float) -> float:
        """The rate that batches made small for this lane's sake must still carry.

        For a lane with the right of way, only the others that have it count: the rest is given up for them.
        """
        if lane.level == PROTECTED or lane.rate.at(now) <= self.fair * lane.part < float("inf"):
            return min(self._with_right_of_way, core.rate(now))
        return core.rate(now)
