"""What is outside the scheduler's account: how it is learned, and how a promise is planned shorter by it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.front_load import OUTSIDE_FALL, Outside
from carpool.core.job import Job, Reason, planned
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Device, Report, Simulation, report
from core.playing import NAMED, named
from later import first

SLO = 0.050
waits = st.floats(-0.1, 5.0)
gaps = st.floats(0.0, 3.0)


def scheduler(**settings: object) -> Scheduler:
    return Scheduler(BatchCurve.parse("4+1"), Promise(SLO, 64), **settings)


# ---- the estimate


@given(st.lists(st.tuples(waits, gaps), min_size=1))
def test_an_estimate_is_never_beyond_what_was_seen(answers: list[tuple[float, float]]) -> None:
    outside, now = Outside(), 0.0
    for seconds, gap in answers:
        now += gap
        before = outside.seconds
        outside.seen(seconds, now)
        low, high = sorted((before, max(0.0, seconds)))
        assert low - 1e-12 <= outside.seconds <= high + 1e-12


@given(st.floats(0.0, 1.0), st.floats(0.0, 5.0), st.floats(0.0, 0.05))
def test_it_rises_faster_than_it_falls(before: float, seconds: float, gap: float) -> None:
    """Between answers that are no more than 50 ms apart: after a longer silence the old says little."""
    up, down = Outside(), Outside()
    for outside, held in ((up, before), (down, before + 2 * seconds)):
        for _ in range(200):
            outside.seen(held, 0.0)
        outside.seen(before + seconds, gap)
    risen, fallen = up.seconds - before, before + 2 * seconds - down.seconds
    assert risen >= fallen - 1e-9


def test_a_stall_is_reckoned_with_at_once_and_for_seconds() -> None:
    outside = Outside()
    for number in range(20):
        outside.seen(0.1, 0.001 * number)
    assert outside.seconds > 0.095
    for number in range(100):  # the answers of one good turn do not make it forgotten
        outside.seen(0.001, 0.02 + 1e-5 * number)
    assert outside.seconds > 0.09
    for number in range(1000):
        outside.seen(0.001, 0.03 + 0.01 * number)
    assert outside.seconds < 0.002  # ten seconds later


def test_after_a_silence_the_first_answer_decides() -> None:
    outside = Outside()
    for _ in range(50):
        outside.seen(0.5, 10.0)
    outside.seen(0.002, 10.0 + 1 / OUTSIDE_FALL)
    assert outside.seconds == pytest.approx(0.002)


# ---- the plan


@given(arrived=st.floats(0.0, 1e6), budget=st.floats(-1.0, 10.0), outside=st.floats(0.0, 1e6))
def test_a_plan_is_shorter_by_a_quarter_at_most(arrived: float, budget: float, outside: float) -> None:
    job = Job(arrived, arrived + budget, outside=outside)
    scheduler().offer(job, arrived)
    whole = job.deadline - arrived
    assert whole <= SLO + 1e-9
    assert job.due == job.rank == job.deadline - job.outside
    assert job.outside == planned(outside, whole)
    assert 0.0 <= job.outside <= max(0.0, CONSTANTS.most_outside * whole)
    assert job.outside in (0.0, outside, CONSTANTS.most_outside * whole)


def test_nothing_outside_changes_nothing() -> None:
    job = Job(1.0, 1.03)
    scheduler().offer(job, 1.0)
    assert job.due == job.deadline == job.rank == 1.03


def test_the_gate_counts_what_the_client_sees() -> None:
    assert scheduler().offer(Job(0.0, deadline=0.007), 0.0) is None  # 5 ms, and a tenth for caution
    job = Job(0.0, deadline=0.007, outside=0.0016)
    refusal = scheduler().offer(job, 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    terms = refusal.terms
    assert (terms.predicted, terms.margin) == (pytest.approx(0.005 + 0.0016), pytest.approx(0.0005))
    assert terms.predicted + terms.margin > terms.deadline == job.deadline == 0.007
    assert refusal.retry_after == pytest.approx(0.0016)  # what is outside passes


def test_a_batch_ends_early_enough_for_its_answers_to_leave() -> None:
    sizes = []
    for outside in (0.0, 0.010, 1.0):
        core = scheduler()
        core.offer(Job(0.0, images=1), 0.0)
        core.decide(0.0)
        for _ in range(60):
            core.offer(Job(0.001, outside=outside), 0.001)
        (instance,) = core.instances
        assert instance.batch is not None
        core.finished(instance.batch, 0.005, 0.005)
        batch = core.decide(0.005).batch
        assert batch is not None
        ends = 0.005 + instance.speed.cautious * core.curve.times[batch.images]
        assert ends + planned(outside, SLO) <= 0.001 + SLO + 1e-9
        sizes.append(batch.images)
    assert sizes[0] > sizes[1] > sizes[2] > 20


def test_who_waits_is_told_when_no_answer_could_reach_it_any_more() -> None:
    core = scheduler()
    waiting = Job(0.0, outside=0.010)
    assert core.offer(waiting, 0.0, ready=False) is None
    assert core.next_expiry == pytest.approx(0.040)
    (gone,) = core.decide(0.0401).given_up
    assert (gone.job, gone.reason) == (waiting, Reason.DEADLINE)
    assert waiting.deadline == SLO


def test_an_instance_that_was_idle_for_long_tries_one_whatever_is_believed_to_be_outside() -> None:
    """Else nothing would be answered, and nothing learned of what is outside."""
    core = Scheduler(BatchCurve.parse("40+1"), Promise(SLO, 64))
    assert core.offer(Job(1.0, outside=0.030), 1.0) is None
    assert core.decide(1.0).batch is not None


def test_fixed_know_nothing_of_it() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), FixedBatching(8))
    job = Job(0.0, 0.02, outside=5.0)
    assert core.offer(job, 0.0, ready=False) is None
    assert (job.due, core.next_expiry) == (0.02, 0.02)


def test_the_guard_batch_leaves_room_for_it() -> None:
    sizes = []
    for outside in (0.0, 0.010):
        core = scheduler()
        for number in range(200):
            now = 1e-4 * number
            core.offer(Job(now, priority=number % 2, outside=outside), now)
            batch = core.decide(now).batch
            if batch is not None:
                core.finished(batch, now, None)
        core.offer(Job(now, outside=outside), now)
        core.decide(now)
        sizes.append(core.policy.shares.largest)  # type: ignore[attr-defined]
    assert 1 < sizes[1] < sizes[0]


# ---- what it is worth


def play(name: str, load: float, outside: float, constants: Constants = CONSTANTS) -> Report:
    curve, slo = named(name)
    arrivals = poisson(load * slo_capacity(curve, slo, 1), 20.0, Random(3))
    core = Scheduler(curve, Promise(slo, curve.max_batch), constants=constants)
    run = Simulation(core, Device(curve), slo=slo, seed=3, outside=outside * slo).play(arrivals)
    return report(run, slo, 1)


@pytest.mark.parametrize("name", first(1, NAMED))
def test_under_overload_answers_reach_their_clients_in_time(name: str) -> None:
    slo_ms = NAMED[name][1] * 1e3
    blind = play(name, 2.0, 0.15, Constants(most_outside=0.0))
    seeing = play(name, 2.0, 0.15)
    assert blind.p99_ms > 1.1 * slo_ms
    assert seeing.p99_ms <= slo_ms
    assert seeing.goodput_rps > 1.2 * blind.goodput_rps
    assert seeing.wasted_fraction < 0.02 < 0.2 < blind.wasted_fraction


@pytest.mark.conformance
@pytest.mark.parametrize("name", NAMED)
def test_at_half_load_nobody_is_lost_to_it(name: str) -> None:
    assert play(name, 0.5, 0.15).attainment > 0.99
