"""Work that nobody waits for, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.arbiter import Arbiter
from carpool.core.background import BackgroundTurn
from carpool.core.curve import BatchCurve
from carpool.core.job import DONE, GONE, Job, Reason
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.sim import simulation
from carpool.sim.simulation import Scenario, report
from core.playing import named
from core.shadowing import play_shadowed
from later import many

CURVE = BatchCurve.linear(0.004, 0.001, 64)
SLO = 0.05


@st.composite
def scenarios(draw: st.DrawFn, least: float, most: float) -> Scenario:
    """Of about two thousand requests, at such a load."""
    curve = BatchCurve.linear(draw(st.floats(0.002, 0.02)), draw(st.floats(0.001, 0.004)), 64)
    slo = curve.times[1] * draw(st.floats(4.0, 30.0))
    instances = draw(st.sampled_from((1, 1, 2)))
    scenario = Scenario(curve, slo, Promise(slo, 64), 0.0, instances=instances, seed=draw(st.integers(0, 99)))
    scenario = scenario.at_load(draw(st.floats(least, most)))
    return replace(scenario, seconds=max(4.0, 2000 / scenario.rate))


SHARES = st.sampled_from((0.05, 0.3, 1.0))
ON = st.sampled_from(({}, {"candidate": False}, {"shared_device": False}))


@settings(max_examples=many(16), deadline=None)
@given(scenarios(0.05, 0.95), SHARES, ON)
def test_production_hardly_notices_a_shadow(scenario: Scenario, share: float, on: dict[str, bool]) -> None:
    alone = report(simulation.play(scenario), scenario.slo, scenario.instances)
    run, _ = play_shadowed(scenario, share, **on)
    beside = report(run, scenario.slo, scenario.instances)
    assert beside.goodput_rps >= 0.995 * alone.goodput_rps
    assert beside.p99_ms <= alone.p99_ms + 0.1 * scenario.slo * 1e3


@pytest.mark.conformance
@settings(max_examples=many(12), deadline=None)
@given(scenarios(1.0, 3.0), SHARES, ON)
def test_from_capacity_on_nothing_is_run(scenario: Scenario, share: float, on: dict[str, bool]) -> None:
    alone = simulation.play(scenario)
    run, part = play_shadowed(scenario, share, **on)
    assert part == 0.0
    assert [ride.latency for ride in run.rides] == [ride.latency for ride in alone.rides]


@pytest.mark.conformance
@pytest.mark.parametrize("on", [{}, {"candidate": False}, {"shared_device": False}])
@pytest.mark.parametrize("name", ["4+1/50", "resnet/100"])
def test_a_small_shadow_beside_a_small_load_is_run(name: str, on: dict[str, bool]) -> None:
    curve, slo = named(name)
    scenario = Scenario(curve, slo, Promise(slo, 64), 0.0, seconds=12.0).at_load(0.3)
    assert play_shadowed(scenario, 0.05, **on)[1] > 0.85  # without the first second


def test_a_model_too_slow_for_a_tenth_of_the_promise_is_run_now_and_then() -> None:
    curve = BatchCurve.linear(0.018, 0.002, 16)
    scenario = Scenario(curve, 0.1, Promise(0.1, 16), 2.0, seconds=120.0)
    alone = report(simulation.play(scenario), 0.1, 1)
    run, part = play_shadowed(scenario, 1.0)
    assert 0.02 < part < 0.5
    assert report(run, 0.1, 1).p99_ms <= alone.p99_ms + 10.0


# ---- the queue and its turn


def joined(
    settings: Promise | FixedBatching | None = None, *, exclusive: bool = True
) -> tuple[Scheduler, BackgroundTurn]:
    """A model that nobody asks, and background work for it."""
    core = Scheduler(CURVE, settings or Promise(SLO, 64))
    arbiter = Arbiter(exclusive=exclusive)
    arbiter.join(core, list(core.instances))
    core.background = arbiter.join_background(core, list(core.instances))
    return core, core.background


def test_it_leaves_no_trace_in_what_the_gate_knows() -> None:
    core, background = joined()
    jobs = [Job(0.0) for _ in range(3)]
    assert all(background.offer(job, 0.0) for job in jobs)
    batch = core.decide(0.0).batch
    assert batch is not None
    assert batch.turn is background
    taken = batch.jobs
    assert core.finished(batch, 0.3, 0.3) == taken  # far longer than was thought
    assert all(job.state is DONE for job in taken)
    assert core.ledger == Scheduler(CURVE, Promise(SLO, 64)).ledger
    assert core.rate(0.3) == 0.0
    assert not core.lanes.by_key
    assert core.instances[0].speed.mean == 1.0
    assert core.trend.factor == 1.0
    assert background.ran == len(taken)


def test_what_waits_too_long_is_skipped() -> None:
    core, background = joined()
    core.offer(Job(0.0), 0.0)
    running = core.decide(0.0).batch
    assert running is not None
    job = Job(0.0)
    assert background.offer(job, 0.0)
    look = core.decide(0.0).look_again
    assert look is not None
    assert look <= 10 * SLO
    assert core.decide(10 * SLO).batch is None
    assert background.told() == [job]
    assert background.told() == []
    assert job.state is GONE
    assert background.skipped == 1


def test_more_than_a_few_are_skipped_at_once() -> None:
    core, background = joined()
    core.offer(Job(0.0), 0.0)
    assert core.decide(0.0).batch is not None
    let_in = [background.offer(Job(0.0), 0.0) for _ in range(100)]
    assert sum(let_in) == 32
    assert background.skipped == 68
    assert not background.offer(Job(0.0, images=65), 0.0)
    for job in background.everybody():
        assert core.cancel(job, 0.0)
    assert background.offer(Job(0.0), 0.0)  # who left makes room


def test_it_starts_only_when_nobody_is_ready() -> None:
    core, background = joined()
    background.offer(Job(0.0), 0.0)
    core.offer(Job(0.0), 0.0)
    first = core.decide(0.0).batch
    assert first is not None
    assert first.turn is not background


def test_a_batch_of_it_holds_up_the_other_model_and_its_gate_knows() -> None:
    arbiter, woken = Arbiter(), []
    production, candidate = Scheduler(CURVE, Promise(SLO, 64)), Scheduler(CURVE, Promise(SLO, 64))
    arbiter.join(production, list(production.instances), wake=lambda: woken.append("production"))
    background = candidate.background = arbiter.join_background(
        candidate, list(candidate.instances), lambda: woken.append("background")
    )
    background.offer(Job(0.0), 0.0)
    batch = candidate.decide(0.0).batch
    assert batch is not None
    assert production.instances.next_free.free_at == pytest.approx(0.005)
    production.offer(Job(0.001), 0.001)
    assert production.decide(0.001).batch is None
    candidate.finished(batch, 0.005, 0.005)
    assert woken == ["production"]
    assert production.decide(0.005).batch is not None


def test_what_is_cancelled_while_it_runs_is_not_answered() -> None:
    core, background = joined()
    job = Job(0.0)
    background.offer(job, 0.0)
    batch = core.decide(0.0).batch
    assert batch is not None
    assert not core.cancel(job, 0.001)
    assert core.finished(batch, 0.005, 0.005) == []


def test_shapes_do_not_mix() -> None:
    core, background = joined()
    for shape in ("a", "b", "a"):
        background.offer(Job(0.0, shape=shape), 0.0)
    batch = core.decide(0.0).batch
    assert batch is not None
    assert {job.shape for job in batch.jobs} == {"a"}


def test_without_a_promise_it_runs_while_nobody_waits() -> None:
    core, background = joined(FixedBatching(8, max_delay=0.02))
    background.offer(Job(0.0), 0.0)
    core.offer(Job(0.0), 0.0)
    assert core.decide(0.0).batch is None  # one waits for others to join it
    batch = core.decide(0.02).batch
    assert batch is not None
    assert batch.turn is not background
    core.finished(batch, 0.03, 0.01)
    core.decide(0.03)  # the first look at the model, which is watched for a second
    background.offer(Job(1.2), 1.2)
    late = core.decide(1.2).batch
    assert late is not None
    assert late.turn is background


def test_processors_are_shared_by_models_but_not_with_spare_work() -> None:
    arbiter = Arbiter(exclusive=False)
    first, second = (Scheduler(CURVE, Promise(SLO, 64)) for _ in range(2))
    for core in (first, second):
        arbiter.join(core, list(core.instances))
    background = second.background = arbiter.join_background(second, list(second.instances))
    background.offer(Job(0.0), 0.0)
    batch = second.decide(0.0).batch
    assert batch is not None
    first.offer(Job(0.0), 0.0)
    assert first.decide(0.0).batch is None
    second.finished(batch, 0.005, 0.005)
    assert first.decide(0.005).batch is not None
    background.offer(Job(0.006), 0.006)
    assert second.decide(0.006).batch is None  # the first runs
    second.offer(Job(0.006), 0.006)
    assert second.decide(0.006).batch is not None  # and that does not keep others out


def test_a_model_that_leaves_while_its_spare_work_runs() -> None:
    core = Scheduler(CURVE, Promise(SLO, 64))
    arbiter = Arbiter()
    turn = arbiter.join(core, list(core.instances))
    background = core.background = arbiter.join_background(core, list(core.instances))
    background.offer(Job(0.0), 0.0)
    batch = core.decide(0.0).batch
    assert batch is not None
    arbiter.leave_background(background)
    core.background = None
    arbiter.leave(turn)
    assert core.finished(batch, 0.005, 0.005) == batch.jobs
    assert core.ledger.answered == 0


def test_a_gate_that_said_no_is_left_alone_for_a_second() -> None:
    core, background = joined()
    core.refused_elsewhere(1, 1, Reason.OVERLOAD, 5.0)
    assert background.offer(Job(5.0), 5.0)
    assert core.decide(5.0).batch is None
    assert core.decide(5.6).batch is None
    assert background.offer(Job(6.1), 6.1)
    assert core.decide(6.1).batch is not None


def test_a_model_that_promises_just_what_it_can_is_run_while_nobody_comes() -> None:
    """An image, and another that comes just after it began, fit into the promise; half an image does not
    help anybody."""
    _, background = joined(Promise(2.2 * CURVE.times[1], 1))
    background.offer(Job(0.0), 0.0)
    assert background.room(0.0) == 1


def test_what_was_measured_again_is_what_is_believed() -> None:
    core = Scheduler(CURVE, Promise(SLO, 64))
    faster = BatchCurve([(size, seconds / 2) for size, seconds in CURVE.points], CURVE.max_batch)
    core.measured_again(faster, 1.0)
    assert core.curve.times == faster.times
    assert core.trend.profile is faster
    assert core.trend.factor == 1.0


def test_what_was_learned_of_the_machine_stays_when_the_model_becomes_faster() -> None:
    """Batches take twice the profile's time: so do they when the profile says half of it."""
    core = Scheduler(CURVE, Promise(SLO, 64))
    for speed in core.belief.speeds:
        for _ in range(100):
            speed.learn(2.0)
    slower = core.belief.slowest(cautious=False)
    points = [(size, seconds * (3 if size == 1 else 1)) for size, seconds in CURVE.points]
    core.belief.adopt(BatchCurve.measured(points, CURVE.max_batch), 1.0)
    faster = BatchCurve([(size, seconds / 2) for size, seconds in CURVE.points], CURVE.max_batch)
    core.replanned(faster, 1.0)
    assert core.belief.slowest(cautious=False) == slower > 1.5
    assert core.curve.times[1] == pytest.approx(3 * CURVE.times[1] / 2), "one that proved slow is still slow"
    assert core.curve.times[64] == pytest.approx(faster.times[64])
    assert core.trend.profile is faster
    assert core.belief is core._beliefs.of(core.kind, 1.0)
