"""Promise mode as short stories: 4 ms + 1 ms per image, a promise of 50 ms, virtual time."""

from __future__ import annotations

from carpool.core.batcher import batch_size, reason_to_give_up
from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import Job, Reason
from carpool.core.objectives import Promise
from carpool.core.scheduler import Decision, Scheduler


def scheduler(instances: int = 1, curve: str = "4+1", slo: float = 0.050) -> Scheduler:
    return Scheduler(BatchCurve.parse(curve, 64), Promise(slo, 64), instances)


def batch_of(decision: Decision) -> Batch:
    assert decision.batch is not None
    return decision.batch


def saturate(core: Scheduler, now: float) -> None:
    """Small batches cannot keep up with this."""
    core.refused_elsewhere(images=1000, requests=1000, reason=Reason.OVERLOAD, now=now)


def test_nobody_waits_while_an_instance_is_idle() -> None:
    core = scheduler()
    job = Job(0.0)
    core.offer(job, 0.0)
    assert batch_of(core.decide(0.0)).jobs == [job]


def test_those_who_came_meanwhile_ride_together() -> None:
    core = scheduler()
    core.offer(Job(0.0), 0.0)
    first = batch_of(core.decide(0.0))
    jobs = [Job(0.001 * n) for n in range(1, 5)]
    for job in jobs:
        core.offer(job, job.arrived)
    assert core.decide(0.004).batch is None
    core.finished(first, 0.005, 0.005)
    assert batch_of(core.decide(0.005)).jobs == jobs


def test_the_earliest_deadline_goes_first() -> None:
    core = scheduler(curve="1:5,2:40")
    core.offer(Job(0.0), 0.0)
    first = batch_of(core.decide(0.0))
    patient, urgent = Job(0.001), Job(0.002, deadline=0.020)
    core.offer(patient, 0.001)
    core.offer(urgent, 0.002)
    core.finished(first, 0.005, 0.005)
    assert batch_of(core.decide(0.005)).jobs == [urgent]


def test_a_picture_that_is_not_decoded_cannot_run() -> None:
    core = scheduler()
    undecoded, decoded = Job(0.0), Job(0.0)
    core.offer(undecoded, 0.0, ready=False)
    core.offer(decoded, 0.0)
    assert core.lanes.waiting == 2
    first = batch_of(core.decide(0.0))
    assert first.jobs == [decoded]
    core.ready(undecoded, 0.001)
    core.finished(first, 0.005, 0.005)
    assert batch_of(core.decide(0.005)).jobs == [undecoded]


def test_shapes_never_share_a_batch_and_the_most_urgent_shape_goes_first() -> None:
    core = scheduler()
    jobs = [Job(0.0, shape=shape) for shape in ("a", "b", "a", "b")]
    for job in jobs:
        core.offer(job, 0.0)
    first = batch_of(core.decide(0.0))
    assert first.jobs == [jobs[0], jobs[2]]
    core.finished(first, 0.006, 0.006)
    assert batch_of(core.decide(0.006)).jobs == [jobs[1], jobs[3]]


def test_large_requests_count_as_what_they_hold_and_are_not_passed_over() -> None:
    core = Scheduler(BatchCurve.parse("4+1", 8), Promise(0.1, 8))
    jobs = [Job(0.0, images=n) for n in (3, 3, 3, 1)]
    for job in jobs:
        core.offer(job, 0.0)
    first = batch_of(core.decide(0.0))
    assert (first.jobs, first.images) == (jobs[:2], 6)
    core.finished(first, 0.01, 0.01)
    assert batch_of(core.decide(0.01)).jobs == jobs[2:]


def test_under_overload_the_oldest_is_given_up_for_a_full_batch() -> None:
    core = scheduler()
    core.offer(Job(0.0, images=20), 0.0)
    first = batch_of(core.decide(0.0))
    for n in range(40):
        core.offer(Job(n / 2000), n / 2000)
    saturate(core, 0.024)
    core.finished(first, 0.040, 0.040)  # it stalled
    decision = core.decide(0.040)
    assert {gone.reason for gone in decision.given_up} == {Reason.GIVEN_UP}
    assert all(
        gone.job.arrived <= min(j.arrived for j in batch_of(decision).jobs) for gone in decision.given_up
    )
    assert batch_of(decision).images >= 8


def test_who_is_late_is_told_at_once_even_while_the_device_hangs() -> None:
    core = scheduler()
    core.offer(Job(0.0), 0.0)
    core.decide(0.0)
    job = Job(0.001)
    core.offer(job, 0.001)
    decision = core.decide(0.001)
    assert decision.look_again is not None
    assert decision.look_again == job.deadline
    gone = core.decide(decision.look_again).given_up
    assert [(g.job, g.reason) for g in gone] == [(job, Reason.DEADLINE)]
    assert core.lanes.waiting == 0


def test_a_burst_is_shared_by_the_instances_that_are_free() -> None:
    core = scheduler(instances=2)
    for _ in range(20):
        core.offer(Job(0.0), 0.0)
    assert [batch_of(core.decide(0.0)).images for _ in range(2)] == [10, 10]


def test_a_protected_request_shrinks_the_batch_and_others_are_given_up_for_it() -> None:
    core = scheduler()
    core.offer(Job(0.0, priority=1), 0.0)
    first = batch_of(core.decide(0.0))
    for n in range(200):
        core.offer(Job(0.001 + n * 1e-4), 0.001 + n * 1e-4)
    protected = Job(0.021, deadline=0.035, priority=1)
    core.offer(protected, 0.021)
    core.finished(first, 0.022, 0.022)
    decision = core.decide(0.022)
    assert batch_of(decision).jobs[0] is protected
    assert batch_of(decision).images < 10


def test_a_protected_request_that_cannot_be_saved_is_given_up_too() -> None:
    core = scheduler()
    core.offer(Job(0.0, images=10), 0.0)
    first = batch_of(core.decide(0.0))
    doomed, fine = Job(0.001, priority=1), Job(0.030)
    core.offer(doomed, 0.001)
    core.offer(fine, 0.030)
    core.finished(first, 0.049, 0.049)
    decision = core.decide(0.049)
    assert [gone.job for gone in decision.given_up] == [doomed]
    assert batch_of(decision).jobs == [fine]


def test_within_a_batch_those_of_other_lanes_who_cannot_make_it_are_given_up() -> None:
    core = scheduler()
    core.offer(Job(0.0, images=10), 0.0)
    first = batch_of(core.decide(0.0))
    old = [Job(0.001, source="old", deadline=0.048), Job(0.001, source="old", deadline=0.049)]
    young = [Job(0.010 + n * 1e-4, source="young") for n in range(5)]
    for job in old + young:
        core.offer(job, job.arrived)
    for source in ("old", "young"):  # both flood, so neither has the right of way
        core.lanes.lane(1, source, 0.030).rate.add(5000, 0.030)
    saturate(core, 0.030)
    core.lanes.lane(1, "old", 0.030).served = 3.5  # not its turn yet
    core.finished(first, 0.040, 0.040)
    decision = core.decide(0.040)
    assert [gone.job for gone in decision.given_up] == old
    assert batch_of(decision).jobs == young


def test_when_nobody_can_be_saved_nobody_runs() -> None:
    core = scheduler()
    core.offer(Job(0.0), 0.0)
    first = batch_of(core.decide(0.0))
    late = [Job(0.001), Job(0.002)]
    for job in late:
        core.offer(job, job.arrived)
    core.finished(first, 0.050, 0.050)
    decision = core.decide(0.0505)
    assert decision.batch is None
    assert [gone.job for gone in decision.given_up] == late


def test_the_least_served_source_goes_first() -> None:
    core = Scheduler(BatchCurve.parse("4+1", 4), Promise(0.1, 4))
    core.offer(Job(0.0, images=4, source="a"), 0.0)
    first = batch_of(core.decide(0.0))
    a = [Job(0.001, source="a") for _ in range(6)]
    b = [Job(0.002, source="b") for _ in range(2)]
    for job in a + b:
        core.offer(job, job.arrived)
    core.finished(first, 0.008, 0.008)
    sources = [job.origin.source for job in batch_of(core.decide(0.008)).jobs]
    assert sources.count("b") == 2


def uneven(slo: float = 0.050) -> Scheduler:
    core = scheduler(instances=2, slo=slo)
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 4.0
    core.instances[0].idle_since = core.instances[0].free_at = 0.0
    core.instances.refresh()
    return core


def test_the_fastest_idle_instance_goes_first() -> None:
    core = uneven()
    core.offer(Job(0.0), 0.0)
    assert batch_of(core.decide(0.0)).instance.index == 1


def test_a_slow_instance_leaves_the_urgent_to_the_fast_one() -> None:
    core = uneven()
    core.offer(Job(0.0, images=10), 0.0)
    fast = batch_of(core.decide(0.0))
    assert fast.instance.index == 1
    urgent = [Job(0.001, deadline=0.029) for _ in range(3)]
    patient = [Job(0.002, deadline=0.040, images=2) for _ in range(3)]
    for job in urgent + patient:
        core.offer(job, job.arrived)
    saturate(core, 0.002)
    decision = core.decide(0.002)
    assert batch_of(decision).instance.index == 0
    assert batch_of(decision).jobs == patient[:2]  # five would be in time, but not six
    assert decision.given_up == []
    core.finished(fast, 0.014, 0.014)
    assert batch_of(core.decide(0.014)).jobs[:3] == urgent


def test_a_slow_instance_with_nobody_to_carry_idles() -> None:
    core = uneven(slo=0.030)
    core.offer(Job(0.0, images=10), 0.0)
    assert batch_of(core.decide(0.0)).instance.index == 1
    core.offer(Job(0.001, images=2), 0.001)
    saturate(core, 0.001)
    decision = core.decide(0.012)
    assert decision.batch is None
    assert decision.given_up == []


# ---- who is given up


def test_what_is_wanted_fits() -> None:
    assert batch_size(Job(0.0), room=20, want=12, smaller=20, keeps_up=False) == 12


def test_a_smaller_batch_will_do_while_it_keeps_up() -> None:
    assert batch_size(Job(0.0), room=8, want=12, smaller=7, keeps_up=True) == 7


def test_a_large_request_is_not_cut() -> None:
    assert batch_size(Job(0.0, images=8), room=8, want=12, smaller=4, keeps_up=True) == 8


def test_who_would_drag_the_others_down_is_given_up() -> None:
    assert batch_size(Job(0.0), room=8, want=12, smaller=8, keeps_up=False) == 0


def test_who_cannot_make_it_is_given_up_even_at_leisure() -> None:
    assert batch_size(Job(0.0, images=3), room=2, want=12, smaller=2, keeps_up=True) == 0


def test_the_reason_tells_the_clock_from_the_choice() -> None:
    job = Job(0.0, deadline=1.0)
    assert reason_to_give_up(job, 0.5) is Reason.GIVEN_UP
    assert reason_to_give_up(job, 1.0) is Reason.DEADLINE
