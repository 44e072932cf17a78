"""Jobs that belong to one instance each, in virtual time: they run there, in order, and nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import INFINITY, Job, Reason, Refusal
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.extensions.sequences.law import LiveSequence, SequenceShare, SequenceStep
from carpool.extensions.sequences.pinned import pin
from later import many

MAX_BATCH = 4
CURVE = BatchCurve.parse("4+1", MAX_BATCH)
LONGEST = CURVE.times[MAX_BATCH]

fixed = st.builds(
    FixedBatching,
    max_batch=st.just(MAX_BATCH),
    preferred=st.sampled_from([(), (4,), (2, 3)]),
    max_delay=st.sampled_from([0.0, 0.003, 0.02]),
    across_shapes=st.just(True),
)
arrivals = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2]),  # the first instance has most to do
        st.sampled_from([0.0, 0.0, 0.001, 0.007]),
        st.sampled_from(["", "", "wide"]),
        st.sampled_from([False, False, False, True]),  # its client leaves when the next one comes
    ),
    max_size=50,
)


class Play:
    def __init__(self, policy: Promise | FixedBatching) -> None:
        self.core = Scheduler(CURVE, policy, 3)
        pin(self.core, policy if isinstance(policy, FixedBatching) else None)
        self.delay = (
            policy.max_delay if isinstance(policy, FixedBatching) else INFINITY
        )  # else its deadline counts
        self.now = 0.0
        self.look_again: float | None = None
        self.running: list[tuple[float, Batch]] = []
        self.bound: dict[Job, float] = {}  # by when it runs, whatever the other instances have to do
        self.started: list[Job] = []
        self.outcomes: Counter[str] = Counter()

    def offer(self, instance: int, shape: str | None) -> Job:
        sequence = LiveSequence(("", len(self.bound) + 1), len(self.bound) + 1, SequenceShare("", 1.0))
        sequence.instance = instance
        job = Job(self.now, INFINITY, 1, shape)
        job.payload = SequenceStep(job, sequence, len(self.bound), start=True, end=True)
        waiting = sum(other.payload.instance == instance for other in self.core.lanes.everybody())
        busy = any(batch.instance.index == instance for _, batch in self.running)
        self.bound[job] = self.now + self.delay + (waiting + busy) * LONGEST + 1e-9
        if self.core.offer(job, self.now) is not None:
            self.outcomes["refused"] += 1
        self.decide()
        return job

    def cancel(self, job: Job) -> None:
        self.core.cancel(job, self.now)
        self.decide()

    def decide(self) -> None:
        while True:
            decision = self.core.decide(self.now)
            self.outcomes["given up"] += len(decision.given_up)
            self.look_again = decision.look_again
            if decision.batch is None:
                assert self.look_again is None or self.look_again > self.now
                return
            batch = decision.batch
            assert {job.payload.instance for job in batch.jobs} == {batch.instance.index}
            assert 0 < len(batch.jobs) <= MAX_BATCH
            assert all(job not in self.started for job in batch.jobs)
            assert all(self.now <= min(self.bound[job], job.due) for job in batch.jobs)
            self.started += batch.jobs
            self.running.append((self.now + CURVE.times[batch.images], batch))

    def until(self, time: float) -> bool:
        """The next thing that happens by then, if any does."""
        ends = min(self.running, key=lambda entry: entry[0], default=None)
        times = [*([ends[0]] if ends else []), *([self.look_again] if self.look_again is not None else [])]
        if not times or min(times) > time:
            return False
        self.now = min(times)
        if ends is not None and ends[0] <= self.now:
            self.running.remove(ends)
            self.outcomes["answered"] += len(self.core.finished(ends[1], self.now))
        self.decide()
        return True

    def everything(self, listed: list[tuple[int, float, str, bool]]) -> None:
        leaving: Job | None = None
        for instance, gap, shape, leaves in listed:
            at = self.now + gap
            while self.until(at):
                pass
            self.now = at
            if leaving is not None:
                self.cancel(leaving)
            job = self.offer(instance, shape)
            leaving = job if leaves else None
        while self.until(INFINITY):
            pass
        lanes = self.core.lanes
        assert (lanes.everybody(), lanes.requests, lanes.waiting, lanes.ready) == ([], 0, 0, 0)
        assert not self.running
        self.outcomes["cancelled"] = self.core.ledger.cancelled
        assert self.outcomes.total() == len(self.bound)


@settings(max_examples=many(400), deadline=None)
@given(fixed, arrivals)
def test_with_fixed_all_run_where_they_belong_in_order_and_in_time(
    policy: FixedBatching, listed: list[tuple[int, float, str, bool]]
) -> None:
    play = Play(policy)
    play.everything(listed)
    assert set(+play.outcomes) <= {"answered", "cancelled"}
    for kind in {(job.payload.instance, job.shape) for job in play.started}:
        numbers = [job.payload.number for job in play.started if (job.payload.instance, job.shape) == kind]
        assert numbers == sorted(numbers)


@settings(max_examples=many(400), deadline=None)
@given(st.sampled_from([0.008, 0.05, 0.5]), arrivals)
def test_with_a_promise_each_runs_where_it_belongs_or_is_told(
    slo: float, listed: list[tuple[int, float, str, bool]]
) -> None:
    Play(Promise(slo=slo, max_batch=MAX_BATCH)).everything(listed)


def test_an_idle_instance_takes_nothing_of_one_that_is_busy() -> None:
    play = Play(FixedBatching(max_batch=1, across_shapes=True))
    for instance in (0, 0, 0, 2):
        play.offer(instance, "")
    assert [job.payload.instance for job in play.started] == [0, 2]
    play.everything([])


def test_what_waits_for_one_instance_is_not_shared_out_among_the_others() -> None:
    play = Play(Promise(slo=0.5, max_batch=MAX_BATCH))
    for _ in range(4):
        play.offer(0, "")
    (first,) = play.started
    assert play.until(LONGEST)
    assert [len(batch.jobs) for _, batch in play.running] == [3]
    assert first not in play.running[0][1].jobs
    play.everything([])


def test_nobody_waits_for_a_faster_instance_that_is_not_theirs() -> None:
    """Only the other one could be in time: it is told now, and not when its time has passed."""
    play = Play(Promise(slo=0.02, max_batch=MAX_BATCH))
    for instance in play.core.instances:
        instance.idle_since = instance.free_at = 0.0
    slow = play.core.instances[0]
    slow.speed.mean = slow.speed.cautious = 5.0
    play.core.instances.refresh()
    assert play.core.instances.uneven
    play.offer(0, None)
    assert play.outcomes["given up"] == 1
    assert not play.core.lanes.everybody()
    play.offer(1, None)
    assert len(play.started) == 1


def test_an_instance_that_rests_lets_nobody_through_who_belongs_to_another() -> None:
    """Its rest proves nothing about the one that is busy, and whose sequences cannot go elsewhere."""
    slo = CURVE.times[1] / 2  # nothing fits into the promise, as after a device was slow
    core = Scheduler(CURVE, Promise(slo, MAX_BATCH), 2)
    pin(core, None)

    def offer(instance: int, now: float) -> Refusal | None:
        sequence = LiveSequence(("", 1), 1, SequenceShare("", 1.0))
        sequence.instance = instance
        job = Job(now, now + slo)
        job.payload = SequenceStep(job, sequence, 1, start=True, end=True)
        return core.offer(job, now)

    now = 100.0  # both have rested for long
    assert offer(0, now) is None  # the probe of the one that rests
    assert core.decide(now).batch is not None
    refusal = offer(0, now)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert offer(1, now) is None
