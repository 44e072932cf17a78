"""Latest frame wins: of each live source one frame waits, the newest, in the place of the previous one."""

from __future__ import annotations

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import INFINITY, Job, JobState, Reason
from carpool.core.objectives import FixedBatching, Promise, QueueLimits
from carpool.core.scheduler import Scheduler

CURVE = BatchCurve.parse("4+1")


def promise(**settings: int) -> Scheduler:
    return Scheduler(CURVE, Promise(0.050, 64, **settings))


def frame(at: float, source: str = "gate", **more: float) -> Job:
    return Job(at, more.get("deadline", INFINITY), source=source, latest=True)


def busy(core: Scheduler, images: int = 30) -> None:
    """An instance that is at work for a while."""
    assert core.offer(Job(0.0, images=images), 0.0) is None
    assert core.decide(0.0).batch is not None


def gone(core: Scheduler, now: float) -> list[tuple[Job, Reason]]:
    return [(gone.job, gone.reason) for gone in core.decide(now).given_up]


def test_a_newer_frame_takes_the_place_of_a_waiting_one_which_is_told_at_the_next_look() -> None:
    core = promise()
    busy(core)
    old, new = frame(0.001), frame(0.002)
    assert core.offer(old, 0.001) is core.offer(new, 0.002) is None
    assert (old.state, new.state) == (JobState.GONE, JobState.READY)
    assert core.lanes.requests == 1
    assert gone(core, 0.002) == [(old, Reason.REPLACED)]
    assert gone(core, 0.002) == []
    assert core.ledger.given_up[Reason.REPLACED] == 1


def test_of_frames_that_are_being_decoded_the_first_stays_and_the_newest_is_next() -> None:
    core = promise()
    busy(core)
    first, second, third = frame(0.001), frame(0.002), frame(0.003)
    for job in (first, second, third):
        assert core.offer(job, job.arrived, ready=False) is None
    assert gone(core, 0.003) == [(second, Reason.REPLACED)]
    core.ready(first, 0.004)
    assert (first.state, third.state) == (JobState.READY, JobState.OFFERED)
    core.ready(third, 0.005)
    assert (first.state, third.state) == (JobState.GONE, JobState.READY)
    assert gone(core, 0.005) == [(first, Reason.REPLACED)]
    assert len(core.lanes.frames) == core.lanes.requests == 1


def test_a_frame_whose_input_comes_after_that_of_a_newer_one_is_replaced_by_it() -> None:
    core = promise()
    busy(core)
    old, new = frame(0.001), frame(0.002)
    core.offer(old, 0.001, ready=False)
    core.offer(new, 0.002, ready=False)
    core.ready(new, 0.003)
    core.ready(old, 0.004)
    assert (old.state, new.state) == (JobState.GONE, JobState.READY)
    assert gone(core, 0.004) == [(old, Reason.REPLACED)]


def test_a_source_that_sends_faster_than_it_is_decoded_is_served_all_the_same() -> None:
    """A frame every 5 ms, of which each takes 12 ms to decode, one at a time."""
    core = promise()
    decoding: Job | None = None
    done_at = now = 0.0
    served = 0
    wanted: list[Job] = []
    batch = None
    for tick in range(1, 1000):
        now = tick / 1000
        if tick % 5 == 0:
            job = frame(now)
            if core.offer(job, now, ready=False) is None:
                wanted.append(job)
        if decoding is not None and now >= done_at:
            core.ready(decoding, now)
            decoding = None
        wanted = [job for job in wanted if job.state is JobState.OFFERED and job is not decoding]
        if decoding is None and wanted:
            decoding, done_at = wanted.pop(0), now + 0.012
        if batch is not None and now >= batch.started + 0.005:
            served += len(core.finished(batch, now, 0.005))
            batch = None
        batch = core.decide(now).batch or batch
    assert served > 60


def test_a_running_frame_is_not_replaced() -> None:
    core = promise()
    old, new = frame(0.0), frame(0.001)
    core.offer(old, 0.0)
    batch = core.decide(0.0).batch
    assert batch is not None
    core.offer(new, 0.001)
    assert gone(core, 0.001) == []
    assert core.finished(batch, 0.005, 0.005) == [old]


def test_only_frames_of_that_source_that_asked_for_it_are_replaced() -> None:
    core = promise()
    busy(core)
    others = [Job(0.001, source="gate"), Job(0.001), frame(0.001, "door")]
    for job in others:
        assert core.offer(job, 0.001) is None
    core.offer(frame(0.002), 0.002)
    core.offer(Job(0.003, source="gate"), 0.003)
    assert gone(core, 0.003) == []
    assert core.lanes.requests == 5


def test_admission_sees_the_room_that_the_old_frame_leaves() -> None:
    core = Scheduler(CURVE, FixedBatching(8, limits=QueueLimits(max_size=1)))
    busy(core, 1)
    assert core.offer(frame(0.001), 0.001) is None
    refusal = core.offer(frame(0.002, "door"), 0.002)
    assert refusal is not None
    assert refusal.reason is Reason.QUEUE_FULL
    assert core.offer(frame(0.003), 0.003) is None


def test_a_frame_that_is_refused_replaces_nobody() -> None:
    core = promise()
    busy(core)
    old, hopeless = frame(0.001), frame(0.002, deadline=0.003)
    core.offer(old, 0.001)
    refusal = core.offer(hopeless, 0.002)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert gone(core, 0.002) == []
    assert old.state is JobState.READY
    core.finished(core.instances[0].batch, 0.030, 0.034)  # type: ignore[arg-type]
    batch = core.decide(0.030).batch
    assert batch is not None
    assert batch.jobs == [old]


def test_a_frame_that_was_overtaken_on_its_way_is_told_so_even_after_the_newer_one_ran() -> None:
    core = promise()
    core.offer(frame(0.005), 0.006)
    for state in ("waits", "runs"):
        late = core.offer(frame(0.004), 0.007)
        assert late is not None, state
        assert late.reason is Reason.REPLACED
        core.decide(0.007)


def test_what_is_replaced_asks_for_nothing_more_of_the_device() -> None:
    """Else a camera that sends faster than it is served would look like an overload that is not there."""
    core = promise()
    busy(core)
    for number in range(1, 20):
        core.offer(frame(number / 1000), number / 1000)
    lane = next(lane for lane in core.lanes if lane.source == "gate")
    once = promise()
    once.offer(frame(0.001), 0.001)
    assert lane.rate.at(0.020) == pytest.approx(next(iter(once.lanes)).rate.at(0.020))


@pytest.mark.parametrize("fixed", [FixedBatching(2), FixedBatching(2, limits=QueueLimits(max_size=100))])
def test_first_come_first_served_keeps_the_place_in_the_queue(fixed: FixedBatching) -> None:
    """A camera that sends faster than the queue moves would otherwise always be last."""
    core = Scheduler(CURVE, fixed)
    busy(core, 1)
    old, new = frame(0.001), frame(0.004)
    core.offer(old, 0.001)
    behind = [Job(0.002), Job(0.003)]
    for job in behind:
        core.offer(job, job.arrived)
    core.offer(new, 0.004)
    core.finished(core.instances[0].batch, 0.005, 0.005)  # type: ignore[arg-type]
    batch = core.decide(0.005).batch
    assert batch is not None
    assert batch.jobs == [new, behind[0]]


def test_a_lane_keeps_its_turn_when_its_frame_is_replaced() -> None:
    core = promise()
    busy(core)
    core.offer(frame(0.001), 0.001)
    lane = next(lane for lane in core.lanes if lane.source == "gate")
    before = lane.served
    core.lanes._served[lane.level] = 1000.0  # others were served much meanwhile
    core.offer(frame(0.002), 0.002)
    assert lane.served == before


def test_names_of_sources_take_bounded_memory() -> None:
    core = Scheduler(CURVE, FixedBatching(1))
    for number in range(3000):
        job = frame(number / 1e3, f"camera-{number}")
        core.offer(job, job.arrived)
        core.cancel(job, job.arrived)
    frames = core.lanes.frames
    assert len(frames) == 0
    assert len(frames._newest) <= 1024
