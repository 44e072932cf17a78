"""The gate, case by case: an instance that takes 4 ms + 1 ms per image, and a promise of 50 ms."""

from __future__ import annotations

import pytest

from carpool.core.admission import backed_up
from carpool.core.curve import BatchCurve
from carpool.core.intake import Intake
from carpool.core.job import Job, Reason
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler

SLO = 0.050


def scheduler(instances: int = 1, slo: float = SLO) -> Scheduler:
    return Scheduler(BatchCurve.parse("4+1"), Promise(slo, 64), instances)


def test_an_idle_instance_takes_anybody() -> None:
    assert scheduler().offer(Job(0.0), 0.0) is None


def test_a_deadline_shorter_than_the_model_is_refused_with_the_predicted_finish() -> None:
    refusal = scheduler().offer(Job(0.0, deadline=0.004), 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert refusal.terms.predicted == pytest.approx(0.005)
    assert refusal.terms.margin == pytest.approx(0.0005)  # a tenth for caution
    assert refusal.retry_after == 0.0


def test_who_lost_its_time_on_the_way_may_come_back_at_once() -> None:
    refusal = scheduler().offer(Job(0.0, deadline=0.04), 0.036)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert 0.0 < refusal.retry_after < 0.01
    core = scheduler()
    core.offer(Job(0.0, images=40), 0.0)
    core.decide(0.0)
    behind = core.offer(Job(0.0, deadline=0.04), 0.036)
    assert behind is not None
    assert behind.retry_after > 0.0


def test_who_would_wait_too_long_is_refused() -> None:
    core = scheduler()
    core.offer(Job(0.0, images=40), 0.0)
    core.decide(0.0)
    refusal = core.offer(Job(0.001, deadline=0.045), 0.001)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert refusal.retry_after == pytest.approx(0.043)


def test_overload_is_refused_before_the_queue_fills() -> None:
    core = scheduler()
    core.offer(Job(0.0, images=30), 0.0)
    core.decide(0.0)
    core.refused_elsewhere(images=100, requests=100, reason=Reason.OVERLOAD, now=0.0)
    refusals = [core.offer(Job(0.001 + n * 1e-5), 0.001 + n * 1e-5) for n in range(500)]
    reasons = {refusal.reason for refusal in refusals if refusal is not None}
    accepted = sum(refusal is None for refusal in refusals)
    assert Reason.OVERLOAD in reasons
    assert 0 < accepted < 150


def test_a_source_beyond_its_share_is_told_so() -> None:
    core = scheduler()
    core.offer(Job(0.0, source="modest"), 0.0)
    core.decide(0.0)
    reasons = set()
    for n in range(2000):
        now = 0.001 + n * 1e-4
        refusal = core.offer(Job(now, source="flood"), now)
        reasons.add(refusal.reason if refusal else None)
        if n % 100 == 99:
            for instance in core.instances:
                if instance.batch is not None:
                    core.finished(instance.batch, now, 0.02)
            core.decide(now)
    assert Reason.OVER_SHARE in reasons


def test_more_images_than_a_batch_holds_can_never_run() -> None:
    refusal = scheduler().offer(Job(0.0, images=65), 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.TOO_LARGE


def test_the_queue_is_bounded() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(10.0, 64, max_queue=8))
    refusals = [core.offer(Job(0.0), 0.0) for _ in range(9)]
    assert refusals[:8] == [None] * 8
    assert refusals[8] is not None
    assert refusals[8].reason is Reason.QUEUE_FULL


def test_a_device_believed_too_slow_gets_one_probe_per_promise() -> None:
    core = scheduler(slo=0.012)
    instance = core.instances[0]
    for _ in range(5):
        instance.speed.learn(4.0)
    instance.free_at = instance.idle_since = 1.0
    core.instances.refresh()
    assert core.offer(Job(1.001), 1.001) is not None  # it ran a moment ago
    own_deadline = core.offer(Job(1.020, deadline=1.025), 1.020)
    assert own_deadline is not None  # a client's short deadline is no test of the promise
    assert core.offer(Job(1.020), 1.020) is None
    decision = core.decide(1.020)
    assert decision.batch is not None
    assert core.offer(Job(1.021), 1.021) is not None  # the probe is out; the others wait for its news


def test_all_parts_of_a_pipelines_probe_run_whatever_is_believed() -> None:
    core = scheduler(slo=0.012)
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 100.0
    probes = [Job(0.0), Job(0.0)]
    for job in probes:
        course = job.own_course()
        course.promise, course.probe, course.ready_at = 0.5, True, 0.001
        assert core.offer(job, 0.0, ready=False) is None
        assert (job.deadline, job.due) == (0.5, 0.5)  # the pipeline's SLO, not the model's
        core.ready(job, 0.001)
    for job in probes:
        batch = core.decide(0.01).batch
        assert batch is not None
        assert batch.jobs == [job]
        core.finished(batch, 0.01, 0.001)


def test_a_step_with_less_than_the_models_own_promise_is_no_probe() -> None:
    """A cascade that promises 4 ms cannot have the large model, which takes 5: that is known, and no news."""
    job = Job(0.0, deadline=0.004)
    job.own_course().promise = 0.004
    refusal = scheduler().offer(job, 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH


def test_a_step_with_others_after_it_is_no_probe_of_its_own() -> None:
    core = scheduler(slo=0.012)
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 100.0
    first = Job(0.0)
    course = first.own_course()
    course.promise, course.later = 0.5, 0.1
    assert core.refuses(first, 0.0) is not None
    course.later = 0.0
    assert core.refuses(first, 0.0) is None


def test_without_instances_the_answer_is_no_at_once() -> None:
    core = scheduler(instances=2)
    core.instances[1].speed.mean = 3.0
    for instance in core.instances:
        core.set_available(instance, False)
    refusal = core.offer(Job(0.0), 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.RESTARTING
    core.set_available(core.instances[1], True)
    assert core.offer(Job(0.0), 0.0) is None


def test_uneven_instances_are_judged_by_the_one_that_carries() -> None:
    core = scheduler(instances=2, slo=0.020)
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 5.0
    core.instances.refresh()
    assert core.instances.uneven
    assert core.offer(Job(0.0), 0.0) is None


def test_who_has_not_set_out_is_refused_while_others_are_long_on_their_way() -> None:
    core = scheduler()
    slo = core.policy.settings.slo  # type: ignore[attr-defined]
    assert core.refuses(Job(1.0), 1.0) is None
    for _ in range(200):
        core.lag.seen(0.15 * slo, 1.0)
    assert core.refuses(Job(1.0), 1.0) is None
    for _ in range(200):
        core.lag.seen(0.5 * slo, 1.0)
    refusal = core.refuses(Job(1.0), 1.0)
    assert refusal is not None
    assert refusal.reason is Reason.OVERLOAD
    assert refusal.retry_after == pytest.approx(0.5 * slo, rel=0.01)
    assert core.offer(Job(1.0), 1.0) is None  # whoever is here already is judged by its deadline


def test_in_a_line_that_models_share_only_the_one_who_asks_for_too_much_is_turned_away() -> None:
    flooded, modest = scheduler(), scheduler()
    slo = flooded.slo
    intake = Intake()
    flooded.entrance, modest.entrance = intake.join(), intake.join()
    for moment in range(200):
        now = 1.0 + moment * 1e-3
        for _ in range(10):
            flooded.offer(Job(now), now)
        flooded.refused_elsewhere(100, 100, Reason.OVERLOAD, now)
        if moment % 20 == 0:
            modest.offer(Job(now), now)
        for core in (flooded, modest):
            core.lag.seen(0.15 * slo, now)
    newcomer = Job(now)
    assert backed_up(modest, newcomer, now) is None
    refusal = backed_up(flooded, newcomer, now)  # though alone it would be allowed that
    assert refusal is not None
    assert refusal.reason is Reason.OVERLOAD
    flooded.entrance = Intake().join()  # beside nobody
    flooded.entrance.takes(now)
    assert backed_up(flooded, newcomer, now) is None
    for _ in range(200):
        modest.lag.seen(10.0, now)
    modest.entrance, other = intake.join(), intake.join()
    modest.entrance.takes(now)
    for _ in range(100):
        other.takes(now)
    assert backed_up(modest, newcomer, now) is None  # its requests wait for those of the other one


def test_a_lag_that_nobody_sees_any_more_is_forgotten() -> None:
    core = scheduler()
    for _ in range(200):
        core.lag.seen(10.0, 1.0)
    assert core.refuses(Job(1.0), 1.0) is not None
    assert core.refuses(Job(3.0), 3.0) is None


def test_without_a_promise_there_is_no_lag_to_speak_of() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), FixedBatching(max_batch=8))
    for _ in range(200):
        core.lag.seen(10.0, 1.0)
    assert core.refuses(Job(1.0), 1.0) is None


def coming(at: float, ready_at: float) -> Job:
    job = Job(at)
    job.own_course().ready_at = ready_at
    return job


def test_one_whose_input_comes_too_late_is_refused_with_when_it_would_finish() -> None:
    core = scheduler()
    assert core.offer(coming(0.0, 0.040), 0.0, ready=False) is None
    refusal = core.offer(coming(0.0, 0.048), 0.0, ready=False)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert refusal.terms.predicted >= 0.053


def test_one_whose_input_misses_a_batch_rides_in_the_next() -> None:
    core = scheduler(slo=0.030)
    core.offer(Job(0.020, images=8), 0.020)
    core.decide(0.020)
    core._supply.add(1000, 0.020)  # so many become ready that batches follow each other
    free_at = core.instances[0].free_at
    assert core.offer(coming(0.020, free_at - 0.001), 0.020, ready=False) is None
    refusal = core.offer(coming(0.020, free_at + 0.004), 0.020, ready=False)
    assert refusal is not None
    assert 0.020 + refusal.terms.predicted > free_at + 0.005


def test_of_pictures_no_more_gather_than_are_let_in() -> None:
    """What is asked beyond what can be decoded asks nothing of the device."""
    core = scheduler()
    core.refused_elsewhere(images=2000, requests=2000, reason=Reason.OVERLOAD, now=0.0)
    assert core.offer(coming(0.0, 0.030), 0.0, ready=False) is None


def test_only_one_of_those_who_are_coming_is_a_probe() -> None:
    core = scheduler()
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 100.0
    assert core.offer(coming(0.0, 0.001), 0.0, ready=False) is None
    refusal = core.offer(coming(0.0, 0.001), 0.0, ready=False)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH


def test_a_picture_of_which_nothing_is_known_is_no_tensor() -> None:
    """Before anything was decoded it is expected at once: still only one of them is a probe."""
    core = scheduler()
    core.instances[0].speed.mean = core.instances[0].speed.cautious = 100.0
    first = coming(0.0, 0.0)
    assert core.offer(first, 0.0, ready=False) is None
    assert core.offer(coming(0.0, 0.0), 0.0, ready=False) is not None
    core.ready(first, 0.001)
    batch = core.decide(0.001).batch  # and that one runs, or nobody would ever learn
    assert batch is not None
    assert batch.jobs == [first]


def test_the_first_that_is_there_leaves_alone_and_the_others_wait_for_it() -> None:
    core = Scheduler(BatchCurve.parse("800+20", 4), Promise(2.0, 4))
    let_in = sum(core.offer(coming(0.0, 0.0), 0.0, ready=False) is None for _ in range(60))
    assert 1 < let_in <= 5  # that one, and at most a batch behind it: not two batches of four


def test_an_idle_instance_starts_a_picture_as_soon_as_it_is_there() -> None:
    core = Scheduler(BatchCurve.parse("120+2", 8), Promise(0.3, 8))
    assert core.offer(coming(0.0, 0.150), 0.0, ready=False) is None  # 150 + 1.1 × 122 ms: no batch is missed
