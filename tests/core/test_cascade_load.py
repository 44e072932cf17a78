"""Cascades in virtual time: three times the load, when the cheap model may answer for the big one."""

from __future__ import annotations

from random import Random

import pytest

from carpool.core.arbiter import Arbiter
from carpool.core.curve import BatchCurve
from carpool.core.job import Job
from carpool.core.objectives import Promise
from carpool.core.remaining import Remaining, Step
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Outcome, Scenario, measure
from carpool.sim.step_simulation import FanOut, StepSimulation, UnderLoad, read_steps

SLO = 0.1
WAYS: tuple[UnderLoad, UnderLoad] = ("quick", "refuse")
STEPS = read_steps(("2+0.3", "6+2@0.3"))


def outcome(load: float, under_load: UnderLoad, seed: int = 1, seconds: float = 2.0) -> Outcome:
    scenario = Scenario(
        STEPS[0].curve,
        SLO,
        Promise(SLO, 64),
        1.0,
        seconds=seconds,
        seed=seed,
        steps=STEPS,
        shared=True,
        under_load=under_load,
    )
    return measure(scenario.at_load(load))


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("seed", "seconds"),
    [(1, 2.0), *(pytest.param(s, 8.0, marks=pytest.mark.conformance) for s in range(2, 6))],
)
def test_at_three_times_the_load_nearly_all_get_an_answer(seed: int, seconds: float) -> None:
    quick, refuse = (outcome(3.0, way, seed, seconds) for way in WAYS)
    assert quick.attainment >= 0.75
    assert 0.25 <= refuse.attainment <= 0.4
    assert quick.p99_ms <= 101
    assert quick.cascade is not None
    assert refuse.cascade is not None
    assert quick.cascade["degraded_fraction"] > 0.1
    assert refuse.cascade["degraded_fraction"] == 0.0


def test_the_big_model_gets_what_there_is_time_for() -> None:
    found = {load: outcome(load, "quick", seconds=1.5) for load in (0.9, 1.3, 2.0)}
    shares = [(one.cascade or {})["hard_by_big_fraction"] for one in found.values()]
    assert shares[0] >= 0.98
    assert shares[1] >= 0.55
    assert shares[2] >= 0.15
    assert all(one.attainment >= 0.95 for one in found.values())


@pytest.mark.parametrize("under_load", ["quick", "refuse"])
def test_every_request_ends_once_and_degraded_ones_are_marked(under_load: UnderLoad) -> None:
    simulation = StepSimulation(
        STEPS,
        Promise(SLO, 64),
        lambda step, n, *_: STEPS[step].curve.times[n],
        shared=True,
        seed=5,
        under_load=under_load,
    )
    run = simulation.play(poisson(2500, 0.6, Random(5)))
    by_big = {id(job.payload) for batch, _, step in run.batches if step == 1 for job in batch.jobs}
    for ride in run.rides:
        assert ride.refused + ride.given_up * (not ride.refused) + (ride.latency is not None) == 1
        assert not ride.jobs
        assert ride.images[1] in (0, 1)
        if ride.latency is not None:
            asked_for_big = bool(ride.images[1])
            assert ride.degraded == (asked_for_big and id(ride) not in by_big)
    assert any(ride.degraded for ride in run.rides) == (under_load == "quick")
    for core in simulation.schedulers:
        assert core.lanes.waiting == 0
        assert core.ledger.running == 0
    assert simulation.remaining._coming == [0, 0]


def test_nothing_is_left_for_a_step_that_can_be_done_without() -> None:
    cores = [Scheduler(step.curve, Promise(SLO, 64)) for step in STEPS]
    needed = Remaining([Step(cores[0]), Step(cores[1], (0,), 0.3)])
    optional = Remaining([Step(cores[0]), Step(cores[1], (0,), 0.3, optional=True)])
    assert needed.planned(0, 0.0) == pytest.approx(0.008)
    assert optional.planned(0, 0.0) == optional.at_gate(0, 1, 0.0) == 0.0


def test_an_escalation_is_none_or_one() -> None:
    random, fan_out = Random(1), FanOut(0.3, at_most_one=True)
    drawn = [fan_out.draw(random) for _ in range(20_000)]
    assert set(drawn) == {0, 1}
    assert sum(drawn) / len(drawn) == pytest.approx(0.3, abs=0.01)


def test_only_two_steps_of_which_one_gets_a_share_are_a_cascade() -> None:
    for texts in (("2+1", "6+2@1.5"), ("2+1",), ("2+1", "6+2@0.3", "1+1")):
        with pytest.raises(ValueError, match="a cascade has two steps"):
            StepSimulation(read_steps(texts), Promise(SLO, 64), lambda *_: 0.01, under_load="quick")


def cascade_on_one_device() -> tuple[Scheduler, Scheduler]:
    cheap, big = (Scheduler(BatchCurve.linear(0.004, 0.001), Promise(SLO, 16)) for _ in range(2))
    arbiter = Arbiter()
    arbiter.join(cheap, list(cheap.instances)).cheap_of = frozenset({"animals"})
    arbiter.join(big, list(big.instances)).big_of = frozenset({"animals"})
    return cheap, big


def test_the_big_model_goes_first_until_too_much_waits_for_the_cheap_one() -> None:
    cheap, big = cascade_on_one_device()
    for core in (cheap, big):
        assert core.offer(Job(0.0), 0.0) is None
    assert cheap.decide(0.0).batch is None
    assert big.decide(0.0).batch is not None

    cheap, big = cascade_on_one_device()
    assert big.offer(Job(0.0), 0.0) is None
    for _ in range(24):  # 24 of 16 a batch of 20 ms: 30 ms of 100
        assert cheap.offer(Job(0.0), 0.0) is None
    assert big.decide(0.0).batch is None
    assert cheap.decide(0.0).batch is not None
