"""Clients that name no source: each address is one, beside the sources that are named, in bounded memory."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest

from carpool.core.constants import CONSTANTS
from carpool.core.curve import BatchCurve
from carpool.core.job import ADDRESS, OFFERED, ORDINARY, Job, JobOrigin
from carpool.core.objectives import Promise
from carpool.core.queue import Lanes, Sharing
from carpool.core.scheduler import Scheduler
from carpool.core.shares import divide_weights
from carpool.sim.arrivals import Arrival, Ride
from carpool.sim.simulation import Device, Simulation

SLO = 0.25
CURVE = BatchCurve.parse("4+8", 8)
GREEDY, HONEST = "10.0.0.1", "10.0.0.2"


class Addresses(Simulation):
    """Sources are the addresses of clients that name none."""

    def __init__(self, **more: Any) -> None:
        super().__init__(Scheduler(CURVE, Promise(SLO, 8)), Device(CURVE), slo=SLO, **more)

    def _job(self, ride: Ride, now: float) -> Job:
        job = super()._job(ride, now)
        job.origin = JobOrigin(payer=ADDRESS + job.origin.source)
        return job

    def lost(self, address: str) -> int:
        mine = [ride for ride in self.run.rides if ride.arrival.source == address]
        return sum(ride.refused or ride.given_up for ride in mine)


class Pictures(Addresses):
    """The honest address sends pictures that are decoded in 5 ms, the greedy one such as take a second."""

    def __init__(self) -> None:
        super().__init__()
        self._decoding: list[tuple[float, int, Job]] = []

    def _refused(self, job: Job, now: float) -> bool:
        greedy = job.origin.payer == ADDRESS + GREEDY
        job.own_course().ready_at = now + (0.2 + self._random.random() if greedy else 0.005)
        judged = self.scheduler.refuses(self.scheduler.newcomer(job.origin.payer, now), now)
        if self.scheduler.offer(job, now, ready=False) is not None or judged is not None:
            return True
        heappush(self._decoding, (now + (1.0 if greedy else 0.005), len(self.run.rides), job))
        return False

    def _advance(self, until: float, look_again: float | None) -> float | None:
        while self._decoding and self._decoding[0][0] < until:
            at, _, job = heappop(self._decoding)
            super()._advance(at, look_again)
            if job.state is OFFERED:
                self.scheduler.ready(job, at)
            look_again = self._act(at)
        return super()._advance(until, look_again)


def stream(rate: float, source: str, seconds: float, random: Random) -> list[Arrival]:
    return [Arrival(random.random() * seconds, source=source) for _ in range(round(rate * seconds))]


def played(simulation: Addresses, greedy: float, seed: int) -> Addresses:
    random = Random(seed)
    arrivals = stream(greedy, GREEDY, 5.0, random)
    arrivals += [Arrival(number / 20, source=HONEST) for number in range(100)]
    simulation.play(sorted(arrivals, key=lambda one: one.at))
    return simulation


@pytest.mark.parametrize("greedy", [0.0, 80.0, 400.0])
def test_an_address_floods_no_other(greedy: float) -> None:
    simulation = played(Addresses(), greedy, 1)
    assert simulation.lost(HONEST) <= 3
    assert greedy < 400.0 or simulation.lost(GREEDY) > 1000


@pytest.mark.parametrize("greedy", [0.0, 8.0, 40.0, 400.0])
def test_pictures_of_one_address_are_not_late_for_those_of_another(greedy: float) -> None:
    """The gate judges each by what its own take, and by how late its own were."""
    simulation = played(Pictures(), greedy, 2)
    assert simulation.lost(HONEST) <= 3


def test_beyond_so_many_lanes_addresses_share_one_that_weighs_as_much_as_they_are() -> None:
    lanes = Lanes(by_shape=False)
    own = [lanes.lane(ORDINARY, f"{ADDRESS}{number}", 0.0) for number in range(CONSTANTS.max_lanes)]
    others = {lanes.lane(ORDINARY, f"{ADDRESS}other {number}", 0.0) for number in range(300)}
    (shared,) = others
    assert (shared.shared, shared.named, shared.weight) == (True, False, 300.0)
    assert divide_weights([*own[:2], shared]) == [1.0, 1.0, 300.0]
    assert lanes.peek(ORDINARY, f"{ADDRESS}newcomer") is shared
    named = lanes.lane(ORDINARY, "a name that is made up", 0.0)
    assert (named.shared, named.weight) == (True, 1.0), "names cost nothing"
    assert named is not shared
    assert len(lanes) == CONSTANTS.max_lanes + 2


def test_who_shares_a_lane_is_counted_in_bounded_memory_and_forgotten() -> None:
    sharing = Sharing(10.0)
    assert [sharing.count(f"{number % 7}", number / 10) for number in range(50)][-1] == 7.0
    for number in range(100_000):
        sharing.count(str(number), 11.0)
    assert len(sharing._now) <= 4096
    assert sharing.count("one", 22.0) >= 4096.0
    assert sharing.count("one", 60.0) == 1.0
