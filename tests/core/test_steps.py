"""Pipelines in virtual time: one promise for all steps, against what the devices could carry."""

from __future__ import annotations

from random import Random

import pytest

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.core.objectives import Promise
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Arrival, poisson
from carpool.sim.step_simulation import FanOut, StepPlan, StepSimulation, bound, capacity, read_steps
from core.step_cases import CASES, LEAST, attainment_by_crops
from later import later

SLACK = 0.06  # one short seed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("load", [load if load == 3.0 else later(load) for load in LEAST])
def test_one_promise_is_kept_by_all_steps(name: str, load: float) -> None:
    found = CASES[name].outcome(load, 2.0, 1)
    assert found.fraction_of_bound >= LEAST[load] - SLACK
    assert found.p99_ms <= CASES[name].slo * 1e3 * 1.02
    if CASES[name].shared:
        assert found.steps[0]["wasted_fraction"] <= 0.05


def test_fixed_answer_next_to_nothing_in_time_at_three_times_the_load() -> None:
    assert CASES["two steps, 60 ms"].outcome(3.0, 2.0, 1, fixed=True).fraction_of_bound < 0.1


@pytest.mark.conformance
def test_requests_with_many_crops_are_not_left_behind() -> None:
    case = CASES["two steps, 60 ms"]
    many, few = attainment_by_crops(case.run(3.0, 4.0, 1), case.slo)
    assert many >= 0.75 * few


def test_every_request_ends_once_and_nothing_is_left() -> None:
    steps = read_steps(("4+1", "3+0.5@3 after 1", "2+0.6@0.4 after 1", "1+0.2 after 2,3"))
    simulation = StepSimulation(steps, Promise(0.05, 64), lambda step, n, *_: steps[step].curve.times[n])
    run = simulation.play(poisson(2000, 1.0, Random(3)))
    for ride in run.rides:
        assert ride.refused + ride.given_up * (not ride.refused) + (ride.latency is not None) == 1
        assert not ride.jobs
        assert ride.booking is None
    for core in simulation.schedulers:
        assert core.lanes.waiting == 0
        assert core.ledger.running == 0
    assert simulation.remaining._coming == [0] * 4


def test_nothing_to_do_in_a_step_is_done_at_once() -> None:
    steps = (StepPlan(BatchCurve.linear(0.004, 0.001)), StepPlan(BatchCurve.linear(1.0, 0.0), 1e-6, (0,)))
    simulation = StepSimulation(steps, Promise(2.0, 64), lambda step, n, *_: steps[step].curve.times[n])
    (ride,) = simulation.play([Arrival(0.0)]).rides
    assert ride.latency == pytest.approx(0.005)


def test_one_step_is_bounded_as_one_model_is() -> None:
    curve = BatchCurve.linear(0.004, 0.001)
    steps = (StepPlan(curve),)
    assert capacity(steps, 0.05) == pytest.approx(slo_capacity(curve, 0.05), rel=0.01)
    for rate in (300.0, 1000.0, 3000.0):
        assert bound(steps, 0.05, rate) == pytest.approx(fluid_bound(curve, 0.05, rate), rel=0.01)


def test_one_device_for_all_steps_carries_less() -> None:
    steps = read_steps(("4+0.5", "3+0.5@4.2"))
    assert 0 < capacity(steps, 0.1, shared=True) < 0.9 * capacity(steps, 0.1)
    assert capacity(steps, 0.001) == capacity(steps, 0.001, shared=True) == 0


def test_a_fan_out_has_its_mean() -> None:
    random, fan_out = Random(1), FanOut(4.2)
    drawn = [fan_out.draw(random) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(4.2, rel=0.03)
    assert min(drawn) == 0
    assert max(drawn) == 20
    assert {FanOut(1.0).draw(random) for _ in range(10)} == {1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "4"),
        ("4+1@0", "above 0"),
        ("4+1@-2", "must be like"),
        ("4+1 after 2", "only after steps before it"),
        ("4+1 after 1", "only after steps before it"),
        ("", "must be like"),
    ],
)
def test_a_step_that_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_steps([text])


def test_steps_are_read() -> None:
    first, second, third = read_steps(("4+1", "1:6,4:9@4.2", "2+0.5@2 after 1, 2"))
    assert (first.after, second.after, third.after) == ((), (0,), (0, 1))
    assert (first.images, second.images, third.images) == (1.0, 4.2, 2.0)
    assert second.curve.max_batch == 4


def sleeping(slow: float, own: float, crops: int = 2) -> tuple[StepSimulation, int]:
    """Two models that take 135 ms a batch and 76 ms an image, whose profile says `slow` times that; each has
    an SLO of its own (0: that of the whole, which is 2 s). How many of 50 are answered, one a second."""
    takes = (BatchCurve.linear(0.135, 0.0, 8), BatchCurve.linear(0.0, 0.076, 8))
    profiled = (BatchCurve.linear(0.135 * slow, 0.0, 8), BatchCurve.linear(0.0, 0.076 * slow, 8))
    steps = (StepPlan(profiled[0], slo=own), StepPlan(profiled[1], 4.0, (0,), own))
    simulation = StepSimulation(steps, Promise(2.0, 64), lambda step, n, *_: takes[step].times[n])
    for fan_out in simulation._fan_outs[1:]:
        fan_out.draw = lambda _: crops  # type: ignore[method-assign]
    rides = simulation.play([Arrival(float(second)) for second in range(50)]).rides
    return simulation, sum(ride.latency is not None and ride.latency <= 2.0 for ride in rides)


@pytest.mark.parametrize("own", [0.5, 0.0])
@pytest.mark.parametrize("slow", [1.0, 2.0, 3.5, 12.0])
def test_an_idle_pipeline_answers_whatever_the_forecast_says(own: float, slow: float) -> None:
    """Also where the steps' own SLOs are shorter than what the steps after them take, and where the profile
    was taken on a busy machine and says that not even the whole can be within its SLO."""
    assert sleeping(slow, own)[1] == 50


def test_an_idle_pipeline_learns_that_its_profile_was_taken_slow() -> None:
    simulation, _ = sleeping(12.0, 0.0)
    assert simulation.remaining.alone() < 1.0


def test_a_pipeline_that_is_too_slow_is_tried_now_and_then() -> None:
    """Its probes prove the forecast right: one for each time that all of it was idle for an SLO."""
    steps = (StepPlan(BatchCurve.linear(0.9, 0.0, 8)), StepPlan(BatchCurve.linear(1.5, 0.0, 8), 1.0, (0,)))
    simulation = StepSimulation(steps, Promise(2.0, 64), lambda step, n, *_: steps[step].curve.times[n])
    rides = simulation.play([Arrival(float(second)) for second in range(60)]).rides
    assert 10 <= sum(ride.probe for ride in rides) <= 20
    assert all(ride.refused for ride in rides if not ride.probe)
