"""Any sequence of events: nobody is lost or answered twice, no batch is too large, no count has a ghost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import INFINITY, Job, JobState
from carpool.core.objectives import FixedBatching, Promise, QueueLimits, TimeoutAction
from carpool.core.scheduler import Scheduler
from later import many

MAX_BATCH = 8
SLO = 0.050

promises = st.builds(Promise, slo=st.sampled_from([0.008, SLO, 0.5]), max_batch=st.just(MAX_BATCH))
limits = st.builds(
    QueueLimits,
    max_size=st.sampled_from([0, 3]),
    timeout=st.sampled_from([0.0, 0.01, 0.1]),
    allow_override=st.booleans(),
    action=st.sampled_from(TimeoutAction),
)
fixed = st.builds(
    FixedBatching,
    max_batch=st.just(MAX_BATCH),
    preferred=st.sampled_from([(), (4,), (2, 6)]),
    max_delay=st.sampled_from([0.0, 0.005]),
    priority_levels=st.sampled_from([0, 2]),
    default_priority=st.just(1),
    limits=limits,
    preserve_ordering=st.booleans(),
)
speeds = st.sampled_from([1.0, 3.0])
moves = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("offer", "offer", "offer", "undecoded", "undecoded", "ready", "ready", "cancel"),
                *("finish", "finish", "wait", "lose", "lose_all", "bring_back"),
            ]
        ),
        st.integers(0, 1000),
        st.floats(0, 0.03),
    ),
    max_size=80,
)


class Player:
    """Keeps its own books, and compares them with the scheduler's after every move."""

    def __init__(self, policy: Promise | FixedBatching, instances: int, slower: float) -> None:
        self.core = Scheduler(BatchCurve.parse("4+1", MAX_BATCH), policy, instances)
        self.slower = slower  # each instance than the previous one it, by this factor
        self.policy = policy
        self.now = 0.0
        self.jobs: list[Job] = []
        self.refused: set[Job] = set()
        self.given_up: set[Job] = set()
        self.cancelled: set[Job] = set()
        self.answered: list[Job] = []
        self.taken: list[Job] = []
        self.running: list[Batch] = []

    def move(self, name: str, pick: int, seconds: float) -> None:
        self.now += seconds if name == "wait" else seconds / 100
        getattr(self, name)(pick)
        self.ask_everything(pick)
        self.decide()
        self.check_books()

    def offer(self, pick: int, ready: bool = True) -> None:
        job = Job(
            self.now,
            self.now + 0.02 if pick % 5 == 0 else INFINITY,
            images=1 + pick % 10 if pick % 3 == 0 else 1,
            shape=pick % 2 if pick % 7 == 0 else None,
            priority=pick % 4,
            source=f"source-{pick % 3}",
            latest=pick % 2 == 1,
            timeout=0.005 if pick % 4 == 0 else 0.0,
            outside=0.002 * (pick % 11),
        )
        if not ready:
            job.own_course().ready_at = self.now + 0.005 * (pick % 6)
        self.jobs.append(job)
        refusal = self.core.offer(job, self.now, ready=ready)
        if refusal is not None:
            self.refused.add(job)
        if isinstance(self.policy, Promise) and not any(i.available for i in self.core.instances):
            assert refusal is not None  # to replace an instance takes longer than is promised

    def undecoded(self, pick: int) -> None:
        self.offer(pick, ready=False)

    def ready(self, pick: int) -> None:
        if self.jobs:
            self.core.ready(self.jobs[pick % len(self.jobs)], self.now)

    def cancel(self, pick: int) -> None:
        if self.jobs:
            job = self.jobs[pick % len(self.jobs)]
            alive = job.state in (JobState.OFFERED, JobState.READY, JobState.RUNNING)
            self.core.cancel(job, self.now)
            if alive:
                self.cancelled.add(job)

    def finish(self, pick: int) -> None:
        if self.running:
            batch = self.running.pop(pick % len(self.running))
            took = (self.now - batch.started + 1e-4) * self.slower**batch.instance.index
            self.answered += self.core.finished(batch, self.now, took if batch.instance.available else None)

    def lose(self, pick: int) -> None:
        """An instance dies, whether it runs something or not; what it ran is told when it is found out."""
        self.core.set_available(self.core.instances[pick % len(self.core.instances)], False)

    def lose_all(self, pick: int) -> None:
        for instance in self.core.instances:
            self.core.set_available(instance, False)

    def bring_back(self, pick: int) -> None:
        self.core.set_available(self.core.instances[pick % len(self.core.instances)], True)

    def ask_everything(self, pick: int) -> None:
        """Questions that have an answer at any time, and change nothing."""
        core, before = self.core, self.core.ledger.offered
        deadline = INFINITY if pick % 2 else self.now + 0.02
        core.refuses(Job(self.now, deadline, source=f"source-{pick % 4}", priority=pick % 4), self.now)
        assert 0.0 <= core.saturation(self.now) <= 1.0
        assert core.rate(self.now) >= 0.0
        assert core.next_expiry is not None
        assert core.ledger.offered == before

    def wait(self, pick: int) -> None:
        """Only time passes."""

    def decide(self) -> None:
        while True:
            decision = self.core.decide(self.now)
            for gone in decision.given_up:
                assert gone.job not in self.given_up
                self.given_up.add(gone.job)
            if decision.batch is None:
                assert decision.look_again is None or decision.look_again > self.now
                if self.core.instances.idle and self.core.lanes.ready:
                    assert decision.look_again is not None  # or whoever waits might wait for ever
                return
            self.check_batch(decision.batch)
            self.running.append(decision.batch)
            self.taken += decision.batch.jobs

    def check_batch(self, batch: Batch) -> None:
        assert batch.instance.available
        assert 0 < batch.images == sum(job.images for job in batch.jobs) <= MAX_BATCH
        assert len({job.shape for job in batch.jobs}) == 1
        assert batch.jobs[0].shape == self.core.kind
        assert batch.belief is self.core.belief
        assert not set(batch.jobs) & (self.refused | self.given_up | self.cancelled | set(self.taken))
        for job in batch.jobs:
            assert job.state is JobState.RUNNING
            assert job.due > self.now  # in promise mode a probe may be late, but nobody starts late
        if isinstance(self.policy, Promise) and len(batch.jobs) > 1:
            most_urgent = min(job.due for job in batch.jobs)
            needs = batch.instance.speed.cautious * self.core.curve.times[batch.images]
            assert self.now + needs <= most_urgent + 1e-9

    def check_books(self) -> None:
        core, ledger = self.core, self.core.ledger
        waiting = [j for j in self.jobs if j.state in (JobState.OFFERED, JobState.READY)]
        ready = [j for j in waiting if j.state is JobState.READY]
        running = [j for j in self.jobs if j.state is JobState.RUNNING]
        live = [job for job in waiting if job.options.latest]
        assert len(live) == len(core.lanes.frames)
        with_input = Counter(job.origin.source for job in live if job.state is JobState.READY)
        without = Counter(job.origin.source for job in live if job.state is JobState.OFFERED)
        assert max(with_input.values(), default=0) <= 1
        assert max(without.values(), default=0) <= 2
        assert core.lanes.requests == len(waiting) == sum(lane.requests for lane in core.lanes)
        assert core.lanes.ready == sum(j.images for j in ready) == sum(lane.ready for lane in core.lanes)
        assert core.lanes.waiting == sum(j.images for j in waiting)
        assert ledger.running == len(running)
        assert (
            ledger.offered
            == len(self.jobs)
            == (
                ledger.refused.total()
                + ledger.given_up.total()
                + ledger.cancelled
                + ledger.answered
                + len(waiting)
                + len(running)
            )
        )
        assert len(set(self.answered)) == len(self.answered)
        assert not set(self.answered) & (self.refused | self.given_up)

    def drain(self) -> None:
        """Instances are back, batches end: after some time everybody must have got an answer of some kind."""
        for instance in self.core.instances:
            self.core.set_available(instance, True)
        for job in self.jobs:
            self.core.ready(job, self.now)
        for _ in range(3 * len(self.jobs) + 3):
            self.decide()
            while self.running:
                self.now += 0.004
                self.finish(0)
            self.now += 0.05
            self.decide()
        self.check_books()
        ended = self.refused | self.given_up | self.cancelled | set(self.answered)
        assert ended == set(self.jobs)


@settings(max_examples=many(150), deadline=None)
@given(policy=promises, instances=st.integers(1, 3), slower=speeds, moves=moves)
def test_promise(policy: Promise, instances: int, slower: float, moves: list[tuple[str, int, float]]) -> None:
    player = Player(policy, instances, slower)
    for move in moves:
        player.move(*move)
    player.drain()


@settings(max_examples=many(150), deadline=None)
@given(policy=fixed, instances=st.integers(1, 3), slower=speeds, moves=moves)
def test_fixed(
    policy: FixedBatching, instances: int, slower: float, moves: list[tuple[str, int, float]]
) -> None:
    player = Player(policy, instances, slower)
    for move in moves:
        player.move(*move)
    player.drain()
    if policy.preserve_ordering:
        answered = set(player.answered)
        assert player.answered == [job for job in player.taken if job in answered]
