"""Different kinds of work for one model: what one teaches is not held against another. In virtual time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from math import inf
from random import Random
from statistics import mean

import pytest

from carpool.core.constants import CONSTANTS
from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import Job
from carpool.core.learning import KIND_MEMORY_S, MAX_KINDS, Beliefs
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from later import later

BUCKETS = (1, 8, 32, 64, 96, 128)
# Ten times as slow as the GPU on which this was seen, so that a test need not play so many requests.
PROFILE = BatchCurve.parse("1:13,8:22.2,32:52.8,64:79.9,96:139.1,128:158.8", 128, BUCKETS)
FILES = BatchCurve.parse("1:13,8:22.2,32:52.8,64:144,96:250,128:286", 128, BUCKETS)
TENSORS = BatchCurve.parse("1:10,8:16,32:36,64:60,96:85,128:105", 128, BUCKETS)
SLO = 1.0

Seconds = Callable[[Batch, float], float]
Arrivals = list[tuple[float, Hashable]]


def play(core: Scheduler, arrivals: Arrivals, seconds: Seconds) -> list[Batch]:
    """A device on which a batch takes what `seconds` says. Returns the batches in order of their start."""
    batches: list[Batch] = []
    ends: list[tuple[float, int, Batch]] = []

    def act(now: float) -> float | None:
        while True:
            decision = core.decide(now)
            if decision.batch is None:
                return decision.look_again
            batches.append(decision.batch)
            heappush(ends, (now + seconds(decision.batch, now), len(batches), decision.batch))

    look_again: float | None = None
    for arrived, shape in [*arrivals, (inf, None)]:
        while min(ends[0][0] if ends else inf, look_again or inf) < arrived:
            now = min(ends[0][0] if ends else inf, look_again or inf)
            if ends and ends[0][0] <= now:
                batch = heappop(ends)[2]
                core.finished(batch, now, now - batch.started)
            look_again = act(now)
        if arrived < inf:
            core.offer(Job(arrived, shape=shape), arrived)
            look_again = act(arrived)
    return batches


def steady(rate: float, begin: float, end: float, *kinds: Hashable) -> Arrivals:
    """Evenly spaced, one kind after the other."""
    count = round((end - begin) * rate)
    return [(begin + number / rate, kinds[number % len(kinds)]) for number in range(count)]


def uneasy(begin: float, end: float, kind: Hashable) -> Arrivals:
    """Now more than files can be carried, now less: batches of all sizes."""
    halves = range(round(2 * (end - begin)))
    return [
        arrival
        for half in halves
        for arrival in steady((1300, 1800)[half % 2], begin + half / 2, begin + (half + 1) / 2, kind)
    ]


def taking(noise: float = 0.0, **curves: BatchCurve) -> Seconds:
    random = Random(1)
    return lambda batch, now: (
        curves[str(batch.jobs[0].shape)].times[batch.images] * random.lognormvariate(0, noise)
    )


def sizes(batches: list[Batch], begin: float, end: float, kind: Hashable) -> float:
    found = [b.images for b in batches if begin <= b.started < end and b.jobs[0].shape == kind]
    return mean(found) if found else 0.0


@pytest.mark.conformance
def test_what_files_taught_does_not_keep_tensors_in_small_batches() -> None:
    """Large batches of files are slow here: 32 is best for them. For tensors it is 128, which nobody would
    ever find out if what files taught held for them too."""
    core = Scheduler(PROFILE, Promise(SLO, 128), 3)
    arrivals = uneasy(0, 15, "files") + steady(4500, 15, 25, "tensors")
    batches = play(core, arrivals, taking(0.05, files=FILES, tensors=TENSORS))
    assert sizes(batches, 10, 15, "files") <= 33
    assert sizes(batches, 16, 25, "tensors") >= 120
    assert sum(b.images for b in batches if 16 <= b.started < 24) / 8 >= 0.95 * 3 * TENSORS.throughput(128)


@pytest.mark.parametrize("instances", [later(1), 3])
@pytest.mark.parametrize("rate", [100, 2000])
def test_each_of_two_kinds_that_alternate_is_predicted_by_its_own_times(instances: int, rate: float) -> None:
    core = Scheduler(PROFILE, Promise(SLO, 128), instances)
    off: dict[Hashable, list[float]] = {"files": [], "tensors": []}
    device = taking(files=FILES, tensors=TENSORS)

    def seconds(batch: Batch, now: float) -> float:
        takes = device(batch, now)
        if now > 20:
            off[batch.jobs[0].shape].append((batch.instance.free_at - now) / takes)
        return takes

    play(core, steady(rate, 0, 40, "files", "tensors"), seconds)
    for ratios in off.values():
        assert len(ratios) > 50
        assert mean(ratios) == pytest.approx(1.0, abs=0.05)


@pytest.mark.conformance
def test_large_batches_come_back_when_the_neighbour_who_made_them_slow_has_left() -> None:
    core = Scheduler(PROFILE, Promise(SLO, 128), 3)
    device = taking(0.05, all=PROFILE)

    def seconds(batch: Batch, now: float) -> float:
        return device(batch, now) * (2.0 if 10 <= now < 18 and batch.images > 32 else 1.0)

    batches = play(core, uneasy(0, 20, "all") + steady(2600, 20, 75, "all"), seconds)
    assert sizes(batches, 20, 30, "all") <= 33
    assert sizes(batches, 70, 75, "all") >= 64


@pytest.mark.conformance
def test_large_batches_that_are_slow_for_good_are_tried_but_cost_little() -> None:
    core = Scheduler(PROFILE, Promise(SLO, 128), 3)
    ends: list[tuple[Batch, float]] = []
    device = taking(0.05, files=FILES)

    def seconds(batch: Batch, now: float) -> float:
        takes = device(batch, now)
        ends.append((batch, now + takes))
        return takes

    play(core, uneasy(0, 10, "files") + steady(1900, 10, 100, "files"), seconds)
    assert any(batch.images > 32 for batch, end in ends if end > 30)
    in_time = sum(end <= job.due for batch, end in ends if 20 <= batch.started < 100 for job in batch.jobs)
    assert in_time / 80 >= 0.95 * 3 * FILES.throughput(32)


def test_a_batch_teaches_its_own_kind_whichever_is_in_force() -> None:
    for policy in (Promise(SLO, 128), FixedBatching(128)):
        core = Scheduler(PROFILE, policy, 2)
        core.offer(Job(0.0, shape="files"), 0.0)
        files = core.decide(0.0).batch
        core.offer(Job(0.0, shape="tensors"), 0.0)
        tensors = core.decide(0.0).batch
        assert files is not None
        assert tensors is not None
        assert core.kind == "tensors"
        assert core.belief is tensors.belief is not files.belief
        core.finished(files, 0.026, 0.026)
        assert files.belief.speeds[files.instance.index].mean > 1.0
        assert {speed.mean for speed in tensors.belief.speeds} == {1.0}
        assert {instance.speed.mean for instance in core.instances} == {1.0}


@pytest.mark.conformance
def test_kinds_that_take_turns_are_told_of_once_each() -> None:
    core = Scheduler(PROFILE, Promise(SLO, 128), 1)
    device = taking(0.03, files=FILES, tensors=TENSORS)
    told = []

    def seconds(batch: Batch, now: float) -> float:
        if core.belief.trend.news(now) is not None:
            told.append((batch.jobs[0].shape, core.belief.trend.told))
        return device(batch, now)

    arrivals = [a for at in range(60) for a in steady(900, at, at + 1, ("files", "tensors")[at % 2])]
    play(core, arrivals, seconds)
    assert len(told) <= 4  # where they settled, perhaps in two steps as batches grew
    assert core.belief.trend.told < 0.8


def test_an_idle_device_judges_a_newcomer_by_its_own_kind() -> None:
    """Nothing of the one kind fits the promise any more; that is no reason to refuse the other."""
    core = Scheduler(PROFILE, Promise(SLO, 128))
    core.offer(Job(0.0, shape="huge"), 0.0)
    batch = core.decide(0.0).batch
    assert batch is not None
    core.finished(batch, 300.0, 300.0)
    for speed in batch.belief.speeds:
        speed.mean = speed.cautious = 200.0
    core.instances.refresh()
    assert core.offer(Job(300.0, shape="huge"), 300.0) is not None
    assert core.offer(Job(300.0, shape="small"), 300.0) is None


def test_a_kind_that_was_slow_for_a_while_gets_tries_beside_another_that_is_busy() -> None:
    """Huge pictures fitted no promise for 20 s. They are given up, but not for good, and cost the others
    little as long as that lasts."""
    huge = BatchCurve.parse("1:300,128:30000", 128)
    core = Scheduler(BatchCurve.parse("1:30,128:3000", 128), Promise(SLO, 128))

    def seconds(batch: Batch, now: float) -> float:
        if batch.jobs[0].shape == "small":
            return TENSORS.times[batch.images]
        return huge.times[batch.images] * (10.0 if 20 <= now < 60 else 1.0)

    arrivals = sorted(steady(300, 0, 100, "small") + steady(1, 0.5, 100, "huge"))
    batches = play(core, arrivals, seconds)
    images = {kind: [b for b in batches if b.jobs[0].shape == kind] for kind in ("small", "huge")}
    slow = [b for b in images["huge"] if 25 <= b.started < 60]
    assert len(slow) <= 6
    assert sum(b.images for b in images["small"] if 25 <= b.started < 60) >= 0.6 * 35 * 300
    assert sum(b.images for b in images["huge"] if 80 <= b.started < 100) >= 15


def test_kinds_are_bounded_and_the_rest_share_one_belief() -> None:
    beliefs = Beliefs(PROFILE, 2, CONSTANTS)
    first = [beliefs.of(kind, 0.0) for kind in range(MAX_KINDS)]
    for belief in first:
        belief.ran = 1.0
    assert len({id(belief) for belief in first}) == MAX_KINDS
    shared = {id(beliefs.of(f"kind {number}", 2.0)) for number in range(1000)}
    assert len(shared) == 1
    assert len(beliefs) == MAX_KINDS + 1
    assert [beliefs.of(kind, 2.0) for kind in range(MAX_KINDS)] == first
    first[3].ran = 50.0
    later = 2.0 + KIND_MEMORY_S
    assert id(beliefs.of("late", later)) not in shared  # the others were not run for a minute
    assert beliefs.of(3, later) is first[3]
    assert len(beliefs) <= MAX_KINDS + 1


@pytest.mark.parametrize("policy", [Promise(SLO, 128), FixedBatching(128)])
def test_any_number_of_shapes_costs_no_memory(policy: Promise | FixedBatching) -> None:
    core = Scheduler(PROFILE, policy, 2)
    arrivals = [(at, number) for number, (at, _) in enumerate(steady(30, 0, 20, None))]
    batches = play(core, arrivals, lambda batch, _: PROFILE.times[batch.images])
    assert len({job.shape for batch in batches for job in batch.jobs}) == len(arrivals)
    assert len({id(batch.belief) for batch in batches}) <= MAX_KINDS + 1
