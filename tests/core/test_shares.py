from __future__ import annotations

from collections import Counter
from math import isclose
from random import Random
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve
from carpool.core.intake import water_level
from carpool.core.job import BACKGROUND, ORDINARY, PROTECTED, Job, JobOrigin, Lane, Refusal, level_of
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.core.shares import divide_weights
from carpool.sim.arrivals import Arrival
from carpool.sim.simulation import Device, Simulation
from core.playing import in_time, stream, together

demands_and_weights = st.lists(
    st.tuples(st.floats(0.0, 1e5), st.floats(0.01, 1000.0)), min_size=1, max_size=12
)


@pytest.mark.parametrize(
    ("priority", "level"), [(0, ORDINARY), (1, PROTECTED), (2, ORDINARY), (3, BACKGROUND), (99, BACKGROUND)]
)
def test_tritons_numbers(priority: int, level: int) -> None:
    assert level_of(priority) == level


def test_water_fills_the_small_first() -> None:
    assert water_level([10, 20, 300], 130) == 100
    assert water_level([50, 50], 60) == 30
    assert water_level([1, 2], 10) == float("inf")
    assert water_level([], 10) == float("inf")
    assert water_level([5], 0) == 0


@given(demands_and_weights, st.floats(0.0, 1e5))
def test_weighted_water_is_max_min(asked: list[tuple[float, float]], supply: float) -> None:
    """All of the supply is used, and whoever gets less than it asked for has the same for its weight as all
    others in that place, and no less than those who got all they asked for."""
    demands, weights = [demand for demand, _ in asked], [weight for _, weight in asked]
    level = water_level(demands, supply, weights)
    if level == float("inf"):
        assert sum(demands) <= supply * (1 + 1e-6) + 1e-6
        return
    given_out = [min(demand, level * weight) for demand, weight in asked]
    assert isclose(sum(given_out), supply, rel_tol=1e-6, abs_tol=1e-6)


@given(demands_and_weights, st.floats(0.1, 1e5), st.floats(0.1, 10.0))
def test_only_the_proportions_of_weights_matter(
    asked: list[tuple[float, float]], supply: float, times: float
) -> None:
    demands, weights = [demand for demand, _ in asked], [weight for _, weight in asked]
    level = water_level(demands, supply, weights)
    scaled = water_level(demands, supply, [times * weight for weight in weights])
    if level < float("inf") and scaled < float("inf"):  # a demand that just fits may not, for rounding
        assert isclose(level, times * scaled, rel_tol=1e-6)


def test_three_times_the_weight_is_three_times_the_part() -> None:
    assert water_level([100, 100], 40, [3, 1]) == 10
    assert water_level([12, 100], 40, [3, 1]) == 28  # who asks for less than its part leaves the rest


def test_the_sources_of_one_key_share_its_weight() -> None:
    lanes = [Lane(ORDINARY, source, 1.0) for source in ("app/a", "app/b", "app/c", "other", "nobody")]
    for lane in lanes[:3]:
        lane.holder, lane.weight = "app", 3.0
    lanes[3].holder, lanes[3].weight = "other", 2.0
    assert divide_weights(lanes) == [1.0, 1.0, 1.0, 2.0, 1.0]
    assert [lane.part for lane in lanes] == [1.0, 1.0, 1.0, 2.0, 1.0]


class Keyed(Scheduler):
    """Whose requests come with keys: a source's name begins with that of its key's holder."""

    weights: ClassVar[dict[str, float]] = {"gold": 3.0, "plain": 1.0}

    def offer(self, job: Job, now: float, *, ready: bool = True) -> Refusal | None:
        holder = job.origin.source.partition("/")[0]
        job.origin = JobOrigin(job.origin.source, holder, self.weights[holder])
        return super().offer(job, now, ready=ready)


def answered(*floods: list[Arrival]) -> Counter[str]:
    curve = BatchCurve.parse("4+1", 16)
    run = Simulation(Keyed(curve, Promise(0.1, 16)), Device(curve), slo=0.1).play(together(*floods))
    return Counter(ride.arrival.source.partition("/")[0] for ride in run.rides if in_time(ride, 0.1))


@pytest.mark.interpreted
def test_a_flooded_device_is_divided_by_weight() -> None:
    random = Random(1)
    found = answered(*(stream(1600.0, 6.0, random, source=name) for name in ("gold", "plain")))
    assert 2.5 < found["gold"] / found["plain"] < 3.5


@pytest.mark.conformance
@pytest.mark.interpreted
def test_names_that_a_holder_makes_up_bring_it_no_more() -> None:
    random = Random(1)
    many = stream(1600.0, 6.0, random, source="plain/x", names=8)
    found = answered(stream(1600.0, 6.0, random, source="gold"), many)
    assert 2.4 < found["gold"] / found["plain"] < 3.7


@pytest.mark.interpreted
def test_what_a_heavy_key_does_not_ask_for_is_the_others() -> None:
    random = Random(1)
    found = answered(stream(100.0, 6.0, random, source="gold"), stream(1600.0, 6.0, random, source="plain"))
    assert found["gold"] > 0.97 * 600
    assert found["plain"] > 3 * found["gold"]
