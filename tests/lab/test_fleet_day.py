"""A fleet in rates instead of requests, and what the planner says with it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.scaling import ScalingRule
from carpool.lab.fleet_day import Trouble, camera_day, fluid_day, largest_step, rates_of
from carpool.lab.fleet_plan import FleetQuestion, plan
from carpool.sim.arrivals import Arrival, Bursty, Recording, poisson

RULE = ScalingRule(least=2, most=12, cold_start=20.0)


def test_a_surge_in_rates_is_the_surge_of_the_simulator() -> None:
    """Request by request 94.7 % were answered in time (tests/lab/test_fleet_simulation.py has that surge)."""
    surge = fluid_day([80.0] * 120 + [300.0] * 300, 52.0, RULE)
    calm = fluid_day([80.0] * 120, 52.0, RULE)
    answered = 1 - (surge.lost - calm.lost) / (300.0 * 300)
    assert answered == pytest.approx(0.947, abs=0.02)
    assert 8 <= surge.peak_replicas <= 10  # with what might have been growth


def test_a_steady_day_costs_what_it_needs() -> None:
    day = fluid_day([75.0] * 7200, 10.0, ScalingRule(least=1))
    assert (day.peak_replicas, day.lost) == (10, 0.0)
    assert day.replica_hours == pytest.approx(20.0)
    assert day.answered == 1.0


def test_fewer_come_slowly() -> None:
    day = fluid_day([75.0] * 600 + [7.5] * 3000, 10.0, ScalingRule(least=1, patience=300.0))
    assert 10 * 900 < day.replica_hours * 3600 < 10 * 1000 + 3000


def test_the_largest_step_grows_with_room_and_shrinks_with_the_cold_start() -> None:
    steps = [largest_step(80.0, 52.0, ScalingRule(least=1, cold_start=cold)) for cold in (0.0, 20.0, 120.0)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] >= 1.25  # what the replicas have to spare at a load of 0.75
    roomy = largest_step(80.0, 52.0, ScalingRule(least=1, target=0.4))
    assert roomy > steps[1]


def test_rates_are_counted_second_by_second() -> None:
    assert rates_of([Arrival(0.1), Arrival(0.9, images=3), Arrival(2.0)], 2.0) == [4.0, 0.0, 1.0]


def lost(*troubles: Trouble, most: int = 100, target: float = 0.75) -> tuple[float, float]:
    """Per second while there were too few, and for how long: ten replicas of 10/s at 75/s."""
    rule = ScalingRule(least=1, most=most, target=target, cold_start=60.0)
    day = fluid_day([75.0] * 1800, 10.0, rule, troubles=troubles)
    return day.lost / day.short_s if day.short_s else 0.0, day.short_s


def test_a_lost_region_costs_what_its_replicas_answered_until_there_are_others() -> None:
    rate, seconds = lost(Trouble("lose", 0.5, 600.0, 900.0))
    assert rate == pytest.approx(75.0 - 5 * 10.0)
    assert 60.0 <= seconds <= 76.0, "a cold start and a look"
    assert lost(Trouble("lose", 0.5, 600.0, 900.0), target=0.37) == (0.0, 0.0), "there is room for it"
    rate, seconds = lost(Trouble("lose", 0.5, 600.0, 900.0), most=12)
    assert seconds == pytest.approx(900.0 + 75.0, abs=15.0), (
        "the other half has six: it lasts until it is back"
    )


def test_a_broken_rollout_costs_the_candidates_part_once_more() -> None:
    assert lost(Trouble("rollout", 0.1, 600.0, 300.0)) == (0.0, 0.0), "that much room there is"
    rate, _ = lost(Trouble("rollout", 0.5, 600.0, 300.0), most=10)
    assert rate == pytest.approx(75.0 - 100.0 / 1.5)


def test_troubles_at_once_cost_more_than_each_alone() -> None:
    both = (Trouble("surge", 1.3, 600.0, 300.0), Trouble("lose", 0.3, 600.0, 300.0))
    alone = [lost(each)[0] * lost(each)[1] for each in both]
    rate, seconds = lost(*both)
    assert rate * seconds > sum(alone)
    assert alone[0] == 0.0


def test_a_day_of_cameras() -> None:
    rates = camera_day(100.0)
    assert len(rates) == 86_400
    assert (rates[0], max(rates), rates[43_200]) == (25.0, 100.0, 100.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.lab.fleet_plan._REQUESTS", 3_000)
    monkeypatch.setattr("carpool.lab.fleet_plan._SECONDS", 4.0)
    monkeypatch.setattr("carpool.lab.fleet_plan._AFFORDED", 15_000)


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_bursts_need_more_than_their_mean_rate() -> None:
    curve = BatchCurve.parse("4+1")
    even = plan(FleetQuestion(curve, 0.05, 500))
    bursty = plan(FleetQuestion(curve, 0.05, 500, traffic=Bursty()))
    assert (even.replicas, bursty.replicas) == (1, 2)
    apart = next(check for check in bursty.checks if check.what == "separate servers")
    assert apart.attainment > 0.95
    assert any("round robin" in sentence for sentence in bursty.why)


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_a_trace_is_planned_for_with_what_autoscaling_would_have_cost() -> None:
    random = Random(3)
    recorded = poisson(100, 30, random) + [Arrival(30 + a.at) for a in poisson(400, 40, random)]
    trace = Recording(recorded)
    question = FleetQuestion(
        BatchCurve.parse("16+4"), 0.2, trace.own_rate, traffic=trace, scaling=ScalingRule(cold_start=5.0)
    )
    found = plan(question)
    assert found.replicas == 2
    assert found.peak_replicas == 3
    assert found.replica_hours is not None
    assert 70 / 3600 < found.replica_hours < 3 * 70 / 3600
    assert found.lost_to_cold_start is not None
    assert found.lost_to_cold_start > 100
    assert found.largest_step is not None
    assert any("five minutes" in sentence for sentence in found.why)
    assert all(sentence.endswith(".") for sentence in found.why)


def test_a_part_of_a_trace_is_drawn_from_all_of_it(tmp_path: Path) -> None:
    whole = Recording(poisson(100, 20, Random(1)))
    part = whole.part(0.25, Random(2))
    assert 0.2 < len(part.recorded) / len(whole.recorded) < 0.3
    assert part.span > 15
