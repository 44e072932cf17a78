"""Divides one promise over a pipeline: how much of it each step must leave to the steps after it.

A step plans with the end of the promise less what the later steps take, which is learned: nine requests in
ten took no longer. That needs no split of the promise, and follows the load. Two things it does not see: what
already waits for the later steps, which the gate asks for at arrival (`at_gate`), and that a request which
has come far is worth more than one that begins, which on a shared device is the arbiter's to know.

A step is held against the SLO of the whole, not against that of the model which runs it. All of this is a
forecast. Where it says that nothing can be within the SLO although all steps are idle, one request goes
through as a probe: otherwise a forecast that is wrong would never be put right.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import ceil, exp, floor
from typing import Final, NamedTuple

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.job import INFINITY, Job, Reason, Refusal
from carpool.core.scheduler import Scheduler

FAN_OUT_WEIGHT: Final = 0.02
"""One request moves what is thought of how many images later steps get of each by a fiftieth."""


class Step(NamedTuple):
    """Describes a step: the scheduler that it waits in, and the numbers of the steps whose ends it waits for.

    Steps are numbered in an order in which each comes after those that it waits for.
    """

    scheduler: Scheduler
    after: Sequence[int] = ()
    images: float = 1.0  # of each request, on average, before any was seen
    optional: bool = False  # there is an answer without it: no time is left for it. Nothing comes after it


class Spread:
    """The 0.9 quantile of the last times that were seen. When none comes for a while, it is forgotten: who
    is refused for it would otherwise never learn that it is over."""

    __slots__ = ("_at", "_constants", "_ordered", "_recent")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._at = 0.0

    def seen(self, seconds: float, now: float) -> None:
        if len(self._recent) >= self._constants.later_window:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(seconds)
        insort(self._ordered, seconds)
        self._at = now

    def at(self, now: float) -> float:
        if not self._ordered:
            return 0.0
        value = self._ordered[int(self._constants.later_quantile * (len(self._ordered) - 1))]
        silent = now - self._at - self._constants.later_memory_s
        return value if silent <= 0.0 else value * exp(-silent / self._constants.later_memory_s)


class Remaining:
    """Holds all that is known of the way of requests through the steps of one pipeline."""

    def __init__(self, steps: Sequence[Step], constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self.steps = tuple(steps)
        self._later = [Spread(constants) for _ in steps]  # from a step's end to that of all
        self.images = [step.images for step in steps]  # of a request, on average
        self._reached_by = [0] * len(steps)  # requests, so far
        self._under_way = 0  # requests that were let in and are not over
        self._kept = True  # the last request that was answered was so within the SLO
        self._coming = [0] * len(steps)  # requests that are on their way to a step
        needed = [step for step in steps if not step.optional]
        self._ends = [not any(number in other.after for other in needed) for number in range(len(steps))]

    # ---- what happens to a request ------------------------------------------------------------------------

    def enters(self, promise: float = 0.0, deadline: float = INFINITY, *, probe: bool = False) -> Booking:
        """A request was let in; `promise` is the SLO of the whole in seconds, 0 where it has none."""
        for number in range(len(self.steps)):
            self._coming[number] += 1
        self._under_way += 1
        return Booking(self, promise, deadline, probe=probe)

    def _reached(self, step: int, images: int) -> None:
        """Learns how many images reach a step, where the first few count as much as what was assumed before
        them."""
        self._coming[step] -= 1
        self._reached_by[step] += 1
        weight = max(FAN_OUT_WEIGHT, 1.0 / (1 + self._reached_by[step]))
        self.images[step] += weight * (images - self.images[step])

    # ---- what is asked ------------------------------------------------------------------------------------

    def refuses(self, first: int, job: Job, slo: float, now: float, *, alone: bool = False) -> Refusal | None:
        """Returns what the gate says to a request that would begin with this step, where this SLO holds for
        all of them; with `alone`, for the first step only. A request let in as a probe is marked as one."""
        scheduler = self.steps[first].scheduler
        course = job.own_course()
        course.promise = slo
        course.later = 0.0 if alone else self.at_gate(first, job.images, now)
        refusal = scheduler.refuses(job, now)
        if refusal is None:
            return None
        if refusal.reason is Reason.CANNOT_FINISH and self._is_probe(first, job, now):
            course.probe = True
            return None
        scheduler.refused_elsewhere(job.images, 1, refusal.reason, now, job.origin.source or job.origin.payer)
        return refusal

    def _is_probe(self, first: int, job: Job, now: float) -> bool:
        """A request with the whole SLO ahead of it, while every step is idle; the first need not be, if it
        would do. Either the last answer was within the SLO, or the steps have been idle for that long: a
        device that is slow is not tried at all times."""
        whole = job.deadline - job.arrived >= 0.99 * job.course.promise and now < job.deadline - job.outside
        if self._under_way or not whole:
            return False
        job.course.later = 0.0
        for number, step in enumerate(self.steps):
            scheduler = step.scheduler
            since = now if self._kept else now - min(job.course.promise, scheduler.slo)
            idle = any(instance.idle_since <= since for instance in scheduler.instances.idle)
            if (scheduler.lanes.waiting or not idle) and (number != first or scheduler.refuses(job, now)):
                return False
        return True

    def planned(self, step: int, now: float) -> float:
        """Returns seconds that a request in this step leaves to those after it."""
        if self._ends[step]:
            return 0.0
        return max(self._later[step].at(now), self._alone_after(step))

    def at_gate(self, first: int, images: int, now: float) -> float:
        """Returns the same for a newcomer, with what waits for the later steps and is on its way there.

        Some of those will be given up, as in any queue, so that not all are counted; and while the newcomer
        waits for its own batch and runs in it, the later steps go on.
        """
        ends: list[float] = []
        for number, step in enumerate(self.steps):
            if not step.after:
                size = images if number == first else 1
                ends.append(self._queued(step.scheduler, 0.0, now) + self._takes(number, size))
                continue
            ready = max(ends[before] for before in step.after)
            if step.optional:
                ends.append(ready)
                continue
            coming = self._coming[number] * self.images[number]
            queued = self._queued(step.scheduler, coming, now)
            shared = any(_same_device(step.scheduler, self.steps[before].scheduler) for before in step.after)
            begins = ready + queued if shared else max(ready, queued)
            ends.append(begins + self._takes(number, self.images[number]))
        return max(ends) - ends[first]

    def alone(self) -> float:
        """Returns the seconds that all steps take if no other request is there."""
        first = [number for number, step in enumerate(self.steps) if not step.after]
        return max(self._takes(number, 1) + self._alone_after(number) for number in first)

    # ---- inside -------------------------------------------------------------------------------------------

    def _alone_after(self, step: int) -> float:
        """Returns what the steps after this one take if no other request is there, along the longest way."""
        after = [0.0] * len(self.steps)
        for number in range(len(self.steps) - 1, step, -1):
            if self.steps[number].optional:
                continue
            whole = self._takes(number, self.images[number]) + after[number]
            for before in self.steps[number].after:
                after[before] = max(after[before], whole)
        return after[step]

    def _takes(self, step: int, images: float) -> float:
        """Returns the seconds of a request alone; of a fan-out that is mostly nothing, what it takes when it
        is something."""
        scheduler = self.steps[step].scheduler
        curve = scheduler.curve
        size = min(max(1, ceil(images - 1e-9)), curve.max_batch)
        return scheduler.instances.next_free.speed.mean * curve.times[size]

    def _queued(self, scheduler: Scheduler, coming: float, now: float) -> float:
        """Returns the seconds until one that gets there last would begin."""
        instances, curve = scheduler.instances, scheduler.curve
        batch = curve.efficient[min(scheduler.policy.max_images, curve.max_batch)]
        ahead = self._constants.oversell * (scheduler.lanes.waiting + coming)
        behind = floor(ahead / batch) * curve.times[batch] / instances.pace
        return behind + max(0.0, instances.next_free.free_at - now)


def _same_device(one: Scheduler, other: Scheduler) -> bool:
    mine, theirs = one.instances.next_free.turn, other.instances.next_free.turn
    if mine is None or theirs is None or mine.device is None:
        return False
    return mine.device is theirs.device


class Booking:
    """One request that was let in. Whatever carries it says where it is; `done` or `gone` ends it, once."""

    __slots__ = ("_deadline", "_probe", "_promise", "_remaining", "_to_reach", "ended")

    def __init__(self, remaining: Remaining, promise: float, deadline: float, *, probe: bool) -> None:
        self._remaining = remaining
        self._promise, self._deadline, self._probe = promise, deadline, probe
        self._to_reach = set(range(len(remaining.steps)))
        self.ended: dict[int, float] = {}  # by step: when

    def plan(self, step: int, job: Job, arrived: float, deadline: float, now: float) -> float:
        """Give this job, which is its part in a step, the time that it has, and return how much of that is
        left to the later steps. With an SLO for the whole, that is what counts; otherwise the model's own,
        which begins when the step does."""
        later = 0.0 if self._probe else self._remaining.planned(step, now)
        if self._promise:
            job.arrived, job.deadline = arrived, deadline
            course = job.own_course()
            course.later, course.promise, course.probe = later, self._promise, self._probe
        else:
            job.arrived, job.deadline = now, deadline - later
        return later

    def reaches(self, step: int, images: int = 1) -> None:
        """It is offered to this step, with so many images; with none, the step is over at once."""
        if step in self._to_reach:
            self._remaining._reached(step, images)
            self._to_reach.discard(step)

    def ends(self, step: int, now: float) -> None:
        self.ended[step] = now

    def done(self, now: float) -> None:
        """Only those who came through are learned from: who was given up was short of time."""
        try:
            self._remaining._kept = now <= self._deadline
            for step, at in self.ended.items():
                self._remaining._later[step].seen(now - at, now)
        finally:
            self._leave()

    def gone(self) -> None:
        if self._probe:
            self._remaining._kept = False
        self._leave()

    def _leave(self) -> None:
        self._remaining._under_way -= 1
        for step in self._to_reach:
            self._remaining._coming[step] -= 1
        self._to_reach.clear()
