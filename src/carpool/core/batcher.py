"""Chooses which jobs run next, in promise mode. Read this first: it is the heart of Carpool.

An instance is free. Take the most urgent job and ask how large a batch may be so that it still meets its
deadline. Large enough for what is waiting: run it now, for waiting while an instance is idle never helps.
Too small, but batches that small keep up with the traffic: run it all the same. Otherwise give that job up
and look at the next: under overload some request must lose, and it had better be the one that costs most.

The usual mistake is to shrink the batch until the oldest request still makes it. Under overload the oldest is
always nearly late, so batches shrink to one and hardly any request is served. Here a request that would
shrink the batch below what the traffic needs is given up instead, so that those behind it get a full batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heapreplace
from math import ceil

from carpool.core.admission import gate, is_probe
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve
from carpool.core.instance import Instance
from carpool.core.job import (
    INFINITY,
    ORDINARY,
    PROTECTED,
    GivenUp,
    Job,
    Lane,
    Line,
    Reason,
    Refusal,
    level_of,
    planned,
)
from carpool.core.objectives import Promise
from carpool.core.scheduler_state import SchedulerState
from carpool.core.shares import DeviceShares


def next_batch(
    core: SchedulerState,
    shares: DeviceShares,
    slo: float,
    instance: Instance,
    now: float,
    given_up: list[GivenUp],
) -> list[Job]:
    """The jobs that this instance should run now, taken from the queue; empty when there are none for it."""
    while (lane := _first_lane(core)) is not None:
        head, line = lane.earliest()
        if head.shape != core.kind:
            core.turn_to(head.shape, now)
        want = _wanted(core, head, line, shares.largest, now)
        size = _size(core, shares, instance, head, lane, want, now)
        if size:
            return _fill(core, shares, instance, head.shape, size, now, given_up)
        uneven = core.instances.uneven and not core.lanes.pinned
        if uneven and _faster_one_carries(core, instance, head, now):
            return _from_behind(core, instance, line, slo, want, now)
        if is_probe(core, head, slo, now):
            core.lanes.serve(head)
            return [head]
        _give_up(core, instance, head, want, now, given_up)
    return []


def _first_lane(core: SchedulerState) -> Lane | None:
    """Returns the first lane with ready jobs: lower levels first, then the lane that was served least."""
    first: Lane | None = None
    for lane in core.lanes.by_key.values():
        if lane.ready and (first is None or (lane.level, lane.served) < (first.level, first.served)):
            first = lane
    return first


def _wanted(core: SchedulerState, head: Job, line: Line, largest: int, now: float) -> int:
    """Returns what is waiting, shared with the instances that will be free as well, at an efficient size.
    What is pinned to this one is for no other."""
    waiting = line.images
    if len(core.lanes.by_key) > 1:
        lines = (lane.lines.get(head.shape) for lane in core.lanes)
        waiting = sum(line.images for line in lines if line is not None)
    shared = core.instances.several and not core.lanes.pinned
    free = core.instances.free_within(core.curve.times[1], now) if shared else 1
    return max(core.curve.efficient[min(largest, ceil(waiting / free))], head.images)


def _room(core: SchedulerState, instance: Instance, job: Job, now: float) -> int:
    """Returns the largest batch that meets the job's deadline if it starts now."""
    left = job.due - now
    if job.lane is not None and job.lane.level == PROTECTED:
        left /= core.constants.guard_margin
    return core.instances.fits(instance, left)


def _size(
    core: SchedulerState,
    shares: DeviceShares,
    instance: Instance,
    job: Job,
    lane: Lane,
    want: int,
    now: float,
) -> int:
    left = job.due - now  # as `_room`, without a call for every batch
    if lane.level == PROTECTED:
        left /= core.constants.guard_margin
    room = core.instances.fits(instance, left)
    if room >= want:
        return want
    carried = core.instances.pace * core.curve.throughput(room) if room else 0.0
    keeps_up = carried >= core.constants.keeps_up * shares.to_keep_up_with(core, lane, now)
    return batch_size(job, room, want, core.curve.efficient[room], keeps_up=keeps_up)


def batch_size(head: Job, room: int, want: int, smaller: int, *, keeps_up: bool) -> int:
    """Returns how many images to run with `head` as the most urgent; 0 means that the head is given up.

    `room` is the largest batch that meets the head's deadline, `want` the batch we would like, `smaller` the
    most efficient one within `room`, and `keeps_up` whether batches of `room` carry the offered rate.
    """
    if room >= want:
        return want
    if room >= head.images and keeps_up:
        return max(smaller, head.images)
    return 0


def _fill(
    core: SchedulerState,
    shares: DeviceShares,
    instance: Instance,
    shape: Hashable,
    size: int,
    now: float,
    given_up: list[GivenUp],
) -> list[Job]:
    """Takes up to `size` images of this shape, one job at a time from the lane that was served least."""
    if len(core.lanes.by_key) == 1:
        (only,) = core.lanes.by_key.values()
        return core.lanes.serve_first(only, only.lines[shape], size)
    batch: list[Job] = []
    used = 0
    lanes = [
        (lane.level, lane.served, order, lane, lane.lines[shape])
        for order, lane in enumerate(core.lanes)
        if shape in lane.lines
    ]
    heapify(lanes)
    while lanes and used < size:
        level, _, order, lane, line = lanes[0]
        job = line.head()
        if job is None or used + job.images > size:
            heappop(lanes)  # no job is passed over within a lane, so that large requests get their turn
            continue
        size_for_job = _size(core, shares, instance, job, lane, size, now)
        if size_for_job < used + job.images:
            _give_up(core, instance, job, size, now, given_up)
            continue
        size = min(size, size_for_job)
        core.lanes.serve(job)
        batch.append(job)
        used += job.images
        heapreplace(lanes, (level, lane.served, order, lane, line))
    return batch


def _give_up(
    core: SchedulerState, instance: Instance, job: Job, want: int, now: float, given_up: list[GivenUp]
) -> None:
    room = _room(core, instance, job, now)
    given_up.append(core.give_up(job, reason_to_give_up(job, now), now, room=room, needed=want))


def reason_to_give_up(job: Job, now: float) -> Reason:
    """Too late is the clock's doing; anything else is ours, and says so."""
    return Reason.DEADLINE if now >= job.due else Reason.GIVEN_UP


def _faster_one_carries(core: SchedulerState, instance: Instance, job: Job, now: float) -> bool:
    """Leave to a faster instance what only it can finish in time."""
    return any(
        core.instances.fits(other, job.due - max(now, other.free_at)) >= job.images
        for other in core.instances
        if other.available and other.speed.mean < instance.speed.mean
    )


def _from_behind(
    core: SchedulerState, instance: Instance, line: Line, slo: float, want: int, now: float
) -> list[Job]:
    """Takes the largest batch of less urgent jobs that a slow instance still finishes in time."""
    low, high = 0, min(want, core.instances.fits(instance, slo))
    while low < high:
        size = (low + high + 1) // 2
        in_time = line.ranked_from(now + instance.speed.cautious * core.curve.times[size])
        low, high = (size, high) if sum(job.images for job in in_time) >= size else (low, size - 1)
    batch: list[Job] = []
    used = 0
    for job in line.ranked_from(now + instance.speed.cautious * core.curve.times[low]) if low else ():
        if used + job.images > low:
            break
        core.lanes.serve(job)
        batch.append(job)
        used += job.images
    return batch


class PromisePolicy:
    """Answers within the SLO, or rejects early: earliest deadline first, behind a gate.

    No request waits while an instance is idle. scheduler_state.py has the interface, `Policy`, and
    fixed_batching.py the other policy.
    """

    by_shape = True
    preserve_ordering = False
    looks_ahead = False

    def __init__(self, settings: Promise, curve: BatchCurve, constants: Constants = CONSTANTS) -> None:
        self.settings = settings
        self._constants = constants
        self._curve = curve
        self.shares = DeviceShares(settings.slo, self._largest(curve))
        self.max_images = settings.max_batch
        self.max_queue = settings.max_queue

    def _largest(self, curve: BatchCurve) -> int:
        """A batch that takes the whole promise even at the profile's speed can never be useful."""
        return max(1, min(self.settings.max_batch, curve.max_batch, curve.fits(self.settings.slo)))

    def adopt(self, core: SchedulerState, now: float) -> None:
        self._curve = core.curve
        self.shares.cap(self._largest(core.curve))
        self.shares.refresh(core, now)

    def place(self, job: Job, number: int) -> tuple[int, str]:
        """Returns the job's lane, after giving it its place in that lane's order."""
        arrived, deadline = job.arrived, job.deadline
        slo = job.course.promise or self.settings.slo
        if deadline > arrived + slo:
            deadline = job.deadline = arrived + slo
        outside = job.outside = planned(job.outside, deadline - arrived, self._constants)
        job.rank = job.due = deadline - outside - job.course.later
        priority, origin = job.options.priority, job.origin
        return level_of(priority) if priority else ORDINARY, origin.source or origin.payer

    def succeed(self, old: Job, new: Job) -> None:
        """Its lane keeps its turn; within the lane the earliest deadline still goes first."""

    def expires(self, job: Job) -> float:
        """Returns when a job is too late. One whose input is still to come is, when it could not run any
        more: then it is given up, and its input need not be made. One with its input is judged when an
        instance is free."""
        there = job.course.probe or job.course.ready_at == -INFINITY
        return job.due if there else job.due - self._curve.times[job.images]

    def expired(self, core: SchedulerState, job: Job, now: float) -> Reason | None:
        return Reason.DEADLINE

    def admit(self, core: SchedulerState, job: Job, now: float) -> Refusal | None:
        assert job.lane is not None
        return gate(core, self.shares, self.settings.slo, job, job.lane, now)

    def look_ahead(self, core: SchedulerState, now: float, job: Job | None = None) -> None:
        """Nothing is set aside: the later a batch is chosen, the better it is."""

    def take(
        self, core: SchedulerState, instance: Instance, now: float, given_up: list[GivenUp]
    ) -> tuple[list[Job], float | None]:
        self.shares.refresh(core, now)
        jobs = next_batch(core, self.shares, self.settings.slo, instance, now, given_up)
        core.lanes.credit = self.shares.largest
        return jobs, None
