"""The state machine around the policies: ledger, cancellation, order, expiry, instances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve
from carpool.core.fixed_batching import FixedBatchingPolicy
from carpool.core.instance import Batch
from carpool.core.job import GivenUp, Job, JobState, Reason
from carpool.core.objectives import FixedBatching, Promise, QueueLimits
from carpool.core.scheduler import Scheduler

CURVE = BatchCurve.parse("4+1", 8)


def fixed(instances: int = 1, **settings: object) -> Scheduler:
    return Scheduler(CURVE, FixedBatching(max_batch=8, **settings), instances)  # type: ignore[arg-type]


def dispatched(core: Scheduler, now: float) -> Batch:
    batch = core.decide(now).batch
    assert batch is not None
    return batch


def test_a_cancelled_job_leaves_every_count_at_once() -> None:
    for ready in (True, False):
        core = Scheduler(CURVE, Promise(0.05, 8))
        job = Job(0.0, images=2)
        core.offer(job, 0.0, ready=ready)
        assert core.cancel(job, 0.0) is True
        assert (core.lanes.waiting, core.lanes.requests, core.ledger.cancelled) == (0, 0, 1)
        core.ready(job, 0.1)  # its decoder did not know yet
        assert core.decide(0.1).batch is None
        assert core.cancel(job, 0.1) is False


def test_cancelling_a_running_job_only_spares_its_answer() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    stays, leaves = Job(0.0), Job(0.0)
    core.offer(stays, 0.0)
    core.offer(leaves, 0.0)
    batch = dispatched(core, 0.0)
    assert core.cancel(leaves, 0.001) is False
    assert core.finished(batch, 0.006, 0.006) == [stays]
    assert (core.ledger.running, core.ledger.answered, core.ledger.cancelled) == (0, 1, 1)


def test_answers_keep_their_order_across_instances_when_asked() -> None:
    core = fixed(instances=2, preserve_ordering=True)
    first, second = Job(0.0), Job(0.001)
    core.offer(first, 0.0)
    slow = dispatched(core, 0.0)
    core.offer(second, 0.001)
    fast = dispatched(core, 0.001)
    assert core.finished(fast, 0.002) == []
    assert core.finished(slow, 0.009) == [first, second]


def test_a_cancelled_job_does_not_hold_up_the_order() -> None:
    core = fixed(instances=2, preserve_ordering=True)
    first, second = Job(0.0), Job(0.001)
    core.offer(first, 0.0)
    dispatched(core, 0.0)
    core.offer(second, 0.001)
    fast = dispatched(core, 0.001)
    core.cancel(first, 0.002)
    assert core.finished(fast, 0.003) == [second]


def test_a_batch_that_failed_teaches_nothing() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    core.offer(Job(0.0), 0.0)
    core.finished(dispatched(core, 0.0), 3.0, None)
    assert core.instances[0].speed.mean == 1.0


def test_an_instance_that_died_gets_no_work_until_it_is_back() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    core.offer(Job(0.0), 0.0)
    core.set_available(core.instances[0], False)
    assert core.decide(0.0).batch is None
    core.set_available(core.instances[0], True)
    assert core.decide(0.001).batch is not None


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_without_any_instance_a_promise_is_refused_at_once(slower: float) -> None:
    core = Scheduler(CURVE, Promise(0.05, 8), instances=2)
    core.instances[1].speed.mean = slower
    waiting = Job(0.0)
    core.offer(waiting, 0.0)
    for instance in core.instances:
        core.set_available(instance, False)
    refusal = core.refuses(Job(0.0), 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after, refusal.waiting) == (Reason.RESTARTING, 0.05, 1)
    assert core.offer(Job(0.0), 0.0) == refusal
    assert 0.0 <= core.saturation(0.0) <= 1.0
    decision = core.decide(0.0)
    assert (decision.batch, decision.look_again) == (None, 0.05)
    assert core.decide(0.05).given_up == [GivenUp(waiting, Reason.DEADLINE)]


def test_without_any_instance_those_without_a_promise_wait() -> None:
    core = fixed(instances=2)
    core.set_available(core.instances[0], False)
    core.set_available(core.instances[1], False)
    assert core.offer(Job(0.0), 0.0) is None
    assert core.decide(9.0).batch is None
    core.set_available(core.instances[1], True)
    assert core.decide(9.0).batch is not None


def test_client_deadlines_are_kept_in_fixed_mode_too() -> None:
    core = fixed()
    core.offer(Job(0.0), 0.0)
    batch = dispatched(core, 0.0)
    late, fine = Job(0.001, deadline=0.003), Job(0.001)
    core.offer(late, 0.001)
    core.offer(fine, 0.001)
    assert core.decide(0.001).look_again == 0.003
    gone = core.decide(0.003).given_up
    assert [(g.job, g.reason) for g in gone] == [(late, Reason.DEADLINE)]
    core.finished(batch, 0.005)
    assert dispatched(core, 0.005).jobs == [fine]


def test_a_queue_without_a_limit_is_bounded_all_the_same() -> None:
    core = fixed(max_queue=3)
    refusals = [core.offer(Job(0.0), 0.0) for _ in range(4)]
    assert [refusal is None for refusal in refusals] == [True, True, True, False]


def test_watching_deadlines_does_not_keep_jobs_alive() -> None:
    core = fixed(limits=QueueLimits(timeout=3600.0))
    for n in range(5000):
        core.offer(Job(n * 1e-3), n * 1e-3)
        core.finished(dispatched(core, n * 1e-3), n * 1e-3)
    assert len(core._expiries) < 2000


def test_refusals_elsewhere_count_as_traffic() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    core.refused_elsewhere(images=50, requests=10, reason=Reason.OVERLOAD, now=0.0)
    assert core.rate(0.0) == 250.0
    assert (core.ledger.offered, core.ledger.refused[Reason.OVERLOAD]) == (10, 10)


def test_states_only_move_forward() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    job = Job(0.0)
    seen = [job.state]
    core.offer(job, 0.0, ready=False)
    seen.append(job.state)
    core.ready(job, 0.0)
    seen.append(job.state)
    batch = dispatched(core, 0.0)
    seen.append(job.state)
    core.finished(batch, 0.005)
    seen.append(job.state)
    assert seen == [JobState.NEW, JobState.OFFERED, JobState.READY, JobState.RUNNING, JobState.DONE]
    assert "DONE" in repr(job)


def test_asking_ahead_counts_nothing() -> None:
    core = Scheduler(CURVE, Promise(0.05, 8))
    assert core.refuses(Job(0.0), 0.0) is None
    refusal = core.refuses(Job(0.0, deadline=0.001), 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert core.ledger.offered == core.lanes.requests == core.rate(0.0) == len(core.lanes) == 0


def test_across_shapes_alternating_ones_still_ride_together() -> None:
    core = fixed(across_shapes=True)
    core.offer(Job(0.0, shape="plug"), 0.0)
    plug = dispatched(core, 0.0)
    jobs = [Job(0.001, shape=shape) for shape in ("a", "b", "a", "b", "a")]
    for job in jobs:
        core.offer(job, 0.001)
    core.finished(plug, 0.005)
    first = dispatched(core, 0.005)
    assert first.jobs == jobs[0::2]
    core.finished(first, 0.010)
    assert dispatched(core, 0.010).jobs == jobs[1::2]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.sampled_from([0, 0, 0, 2])), max_size=20),
    st.sampled_from([(), (4,), (1, 2, 3, 4), (2, 3)]),
)
def test_taking_the_first_of_one_lane_is_gathering_without_a_delay(
    asked: list[tuple[int, str, int]], preferred: tuple[int, ...]
) -> None:
    def batches(*, gathers: bool) -> list[object]:
        settings = FixedBatching(
            4, preferred=preferred, across_shapes=True, priority_levels=2, default_priority=1
        )
        core = Scheduler(BatchCurve.linear(0.1, 0.0, 4), settings)
        policy = core.policy
        assert isinstance(policy, FixedBatchingPolicy)
        assert policy._takes_first == (preferred != (2, 3))
        if gathers:
            policy._takes_first = False
        jobs = [Job(0.0, images=images, shape=shape, priority=level) for images, shape, level in asked]
        for job in jobs:
            core.offer(job, 0.0)
        seen: list[object] = []
        while (batch := core.decide(0.0).batch) is not None:
            lanes = [(lane.ready, lane.waiting, lane.requests, lane.served) for lane in core.lanes]
            seen.append(([jobs.index(job) for job in batch.jobs], core.kind, core.lanes.ready, lanes))
            core.finished(batch, 0.0)
        assert not core.lanes.requests
        return seen

    assert batches(gathers=False) == batches(gathers=True)


def test_batches_that_everybody_left_do_not_hold_up_a_newcomer() -> None:
    core = Scheduler(BatchCurve.linear(0.1, 0.0, 1), FixedBatching(1))
    core.offer(Job(0.0), 0.0)
    plug = dispatched(core, 0.0)
    gone = [Job(0.0), Job(0.0)]
    for job in gone:
        core.offer(job, 0.0)
    for job in gone:
        core.cancel(job, 0.1)
    late = Job(0.2)
    core.offer(late, 0.2)
    core.finished(plug, 0.3)
    assert dispatched(core, 0.3).jobs == [late]
