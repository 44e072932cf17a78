"""Fixed batching settings: batches exactly as Triton's dynamic batcher forms them.

Triton sets batches aside ahead of time. While every instance is busy it goes on forming up to two batches per
instance; one that is still open takes newcomers until it reaches a preferred size or starts to run. With
priorities or queue limits it does not: then it looks at the queue only when an instance is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from carpool.core.instance import Instance
from carpool.core.job import INFINITY, READY, GivenUp, Job, Lane, Line, Reason, Refusal
from carpool.core.objectives import FixedBatching, QueueLimits, TimeoutAction
from carpool.core.scheduler_state import SchedulerState

_AHEAD = 2  # batches set aside per instance
_COMPACT_AT = 64
_BEHIND_ALL = 1e15  # added to the rank of a delayed job: after every request that has not timed out


@dataclass(slots=True)
class _Aside:
    """Represents a batch set aside. A `sealed` one takes no more jobs; `other_shape` says that a shape closed
    it."""

    jobs: list[Job] = field(default_factory=list)
    images: int = 0
    sealed: bool = False
    other_shape: bool = False


@dataclass(slots=True)
class _Gathered:
    """Holds what could join a batch: the jobs, how many of them make a preferred size, and what stopped
    it."""

    jobs: list[Job] = field(default_factory=list)
    images: int = 0
    preferred: int = 0
    full: bool = False
    other_shape: bool = False
    past_preferred: bool = False


class FixedBatchingPolicy:
    """First come, first served within a priority level; batches close by size, delay or shape."""

    looks_ahead = True

    def __init__(self, settings: FixedBatching) -> None:
        self.settings = settings
        self.by_shape = settings.across_shapes
        self.preserve_ordering = settings.preserve_ordering
        self.max_images = settings.max_batch
        self.max_queue = settings.max_queue
        self._preferred = frozenset(settings.preferred or (settings.max_batch,))
        self._largest_preferred = max(self._preferred)
        self._aside: deque[_Aside] = deque()
        self._behind: deque[Job] = deque()  # ready, in order of arrival, and not set aside yet
        limits = settings.limits
        self._looks_ahead = not (
            settings.across_shapes
            or settings.priority_levels
            or limits.timeout
            or limits.allow_override
            or limits.max_size
        )
        # Whatever there is may leave, as far as a batch has room: nothing is to be gathered first.
        self._takes_first = (
            settings.across_shapes
            and not settings.max_delay
            and self._largest_preferred == settings.max_batch
            and len(self._preferred) in (1, settings.max_batch)
        )
        self._wait_until: float | None = None
        self._seated: Job | None = None  # is about to be ready, and has a place already

    def adopt(self, core: SchedulerState, now: float) -> None:
        """Does nothing: fixed settings do not depend on how long batches take."""

    def place(self, job: Job, number: int) -> tuple[int, str]:
        job.rank = float(number)
        return self._level(job), ""

    def _level(self, job: Job) -> int:
        known = 1 <= job.options.priority <= self.settings.priority_levels
        return job.options.priority if known else self.settings.default_priority

    def succeed(self, old: Job, new: Job) -> None:
        """First come, first served: a source that sends faster than the queue moves would never be served."""
        if old.rank < _BEHIND_ALL:
            new.rank = old.rank
        alike = old.shape == new.shape and old.images == new.images
        for jobs in (*(batch.jobs for batch in self._aside if alike), self._behind):
            if old in jobs:
                jobs[jobs.index(old)] = new
                self._seated = new

    def expires(self, job: Job) -> float:
        return min(job.deadline, self._times_out(job))

    def expired(self, core: SchedulerState, job: Job, now: float) -> Reason | None:
        """Returns the reason to give the job up, or nothing when it only moves behind the others."""
        if now >= job.deadline:
            return Reason.DEADLINE
        if self._limits(job).action is TimeoutAction.REJECT:
            return Reason.TIMEOUT
        rank = job.rank + _BEHIND_ALL
        if job.state is READY and job.lane is not None:
            shape = job.shape if self.by_shape else None
            job.lane.lines[shape].move_to_back(job, rank)
        job.rank = rank
        return None

    def admit(self, core: SchedulerState, job: Job, now: float) -> Refusal | None:
        assert job.lane is not None
        limit = self._limits(job).max_size
        if limit and job.lane.requests >= limit:
            return Refusal(Reason.QUEUE_FULL)
        return None

    def look_ahead(self, core: SchedulerState, now: float, job: Job | None = None) -> None:
        """Set batches aside, as far ahead as Triton does."""
        self._wait_until = None
        if not self._looks_ahead:
            return
        self._drop_deserted()
        seated, self._seated = self._seated, None
        if job is not None and job is not seated:
            if not self._behind and self._joins(job, _AHEAD * len(core.instances)):
                return
            self._behind.append(job)
            if len(self._behind) > _COMPACT_AT + 2 * core.lanes.requests:
                self._behind = deque(job for job in self._behind if job.state is READY)
        while self._behind and len(self._aside) < _AHEAD * len(core.instances):
            is_open = bool(self._aside) and not self._aside[-1].sealed
            batch = self._aside[-1] if is_open else _Aside()
            if not self._grow(core, batch, now):
                return
            if not is_open:
                self._aside.append(batch)

    def _joins(self, job: Job, most: int) -> bool:
        """Handles the common case cheaply: no job waits to gather, and the others are not affected."""
        if self.settings.max_delay or len(self._aside) >= most:
            return False
        batch = self._aside[-1] if self._aside else None
        if batch is None or batch.sealed:
            batch = _Aside()
        elif batch.jobs[0].shape != job.shape:
            return False
        images = batch.images + job.images
        if images >= self._largest_preferred or images in self._preferred:
            return False
        if not batch.jobs:
            self._aside.append(batch)
        batch.jobs.append(job)
        batch.images = images
        return True

    def take(
        self, core: SchedulerState, instance: Instance, now: float, given_up: list[GivenUp]
    ) -> tuple[list[Job], float | None]:
        """Returns the jobs to run now, or when to look again."""
        lane = core.lanes.only_ready() if self._takes_first else None
        if lane is not None:
            jobs = core.lanes.serve_first(lane, lane.earliest()[1], self.max_images)
        else:
            if self._looks_ahead:
                batch = self._next_aside(now)
            else:
                batch = _Aside()
                self._grow(core, batch, now)
            jobs = [job for job in batch.jobs if job.state is READY]
            core.lanes.serve_all(jobs)
        if jobs and jobs[0].shape != core.kind:
            core.turn_to(jobs[0].shape, now)
        return jobs, self._wait_until

    def _next_aside(self, now: float) -> _Aside:
        """Returns the oldest batch, with those behind it that have waited out their delay as well, where they
        fit."""
        self._drop_deserted()
        if not self._aside:
            return _Aside()
        batch = self._aside.popleft()
        delay = self.settings.max_delay
        while delay and self._aside and not batch.other_shape:
            following = self._aside[0]
            if following.other_shape or not now - min(job.arrived for job in following.jobs) > delay:
                break
            following.sealed = True
            if batch.images + following.images > self.settings.max_batch:
                break
            if batch.jobs[0].shape != following.jobs[0].shape:
                break
            self._aside.popleft()
            batch.jobs += following.jobs
            batch.images += following.images
        return batch

    def _drop_deserted(self) -> None:
        """A batch whose jobs have all left must not keep the place of one that could be set aside."""
        aside = self._aside
        while aside:
            for job in aside[0].jobs:
                if job.state is READY:
                    return
            aside.popleft()

    def _grow(self, core: SchedulerState, batch: _Aside, now: float) -> bool:
        """Adds to a batch what may leave with it; returns False if nothing may, or it is better to wait."""
        found = self._gather(core, batch)
        if not found.jobs:
            batch.sealed |= found.past_preferred
            batch.other_shape |= found.other_shape
            return False
        delay = self.settings.max_delay
        oldest = min([job.arrived for job in found.jobs]) if delay > 0 else now
        delay_over = delay > 0 and now >= oldest + delay
        count = len(found.jobs)
        seal = found.past_preferred
        size = batch.images
        if found.preferred and not delay_over:
            count = found.preferred
            seal |= delay == 0
        elif found.full or size + found.images >= self._largest_preferred:
            seal = True
        elif not (delay_over or delay == 0 or (size and not seal and size not in self._preferred)):
            self._wait_until = oldest + delay
            return False
        joining = found.jobs[:count]
        batch.jobs += joining
        all_join = count == len(found.jobs)
        batch.images += found.images if all_join else sum([job.images for job in joining])
        while self._looks_ahead and self._behind.popleft() is not joining[-1]:
            """Those before it join too, or have left meanwhile."""
        batch.sealed |= seal
        batch.other_shape |= found.other_shape
        return True

    def _gather(self, core: SchedulerState, batch: _Aside) -> _Gathered:
        found = _Gathered()
        size = batch.images
        shape = batch.jobs[0].shape if batch.jobs else None
        for job in self._behind if self._looks_ahead else _in_order(core, self.by_shape):
            if job.state is not READY:
                continue
            grown = size + found.images + job.images
            if batch.jobs or found.jobs:
                if grown > self._largest_preferred and not found.preferred:
                    found.preferred = len(found.jobs)
                    found.past_preferred = True
                found.other_shape = grown <= self.settings.max_batch and job.shape != shape
                found.full = grown > self.settings.max_batch or found.other_shape
                if found.full:
                    break
            else:
                shape = job.shape
            found.jobs.append(job)
            found.images += job.images
            if grown in self._preferred:
                found.preferred = len(found.jobs)
        return found

    def _limits(self, job: Job) -> QueueLimits:
        return self.settings.level_limits.get(self._level(job), self.settings.limits)

    def _times_out(self, job: Job) -> float:
        if job.rank >= _BEHIND_ALL:
            return INFINITY  # it has, and was delayed for it
        limits = self._limits(job)
        timeout = limits.timeout
        if limits.allow_override and 0 < job.options.timeout < timeout:
            timeout = job.options.timeout
        return job.arrived + timeout if timeout else INFINITY


def _in_order(core: SchedulerState, by_shape: bool) -> Iterable[Job]:
    """Returns jobs of higher levels first, then in order of arrival; by shape, only the shape that has waited
    longest."""
    lanes = [lane for lane in core.lanes if lane.ready]
    if len(lanes) == 1:  # as nearly always: nothing stands between its jobs and who looks at them
        return _line(lanes[0], by_shape)
    lanes.sort(key=lambda lane: lane.level)
    return chain.from_iterable(_line(lane, by_shape) for lane in lanes)


def _line(lane: Lane, by_shape: bool) -> Line:
    return lane.earliest()[1] if by_shape else lane.lines[None]
