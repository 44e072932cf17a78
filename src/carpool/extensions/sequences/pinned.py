"""A scheduler whose jobs belong to one instance each, as those of sequences do: `pin` makes it one.

Every instance has lanes of its own, and while it is asked what it should run, no others are seen. What is
counted in all, and what is learned, stays common to all of them; the gate still forecasts as if the first
free instance could run any job.
"""

from __future__ import annotations

from carpool.core.batcher import PromisePolicy
from carpool.core.constants import Constants
from carpool.core.fixed_batching import FixedBatchingPolicy
from carpool.core.instance import Instance
from carpool.core.job import GivenUp, Job, Lane
from carpool.core.objectives import FixedBatching
from carpool.core.queue import Lanes
from carpool.core.scheduler_state import SchedulerState
from carpool.extensions.sequences.law import SequenceStep


class PinnedLanes(Lanes):
    """The lanes of one instance at a time, in `by_key`; the sums are those of all."""

    __slots__ = ("_sets",)

    pinned = True

    def __init__(self, instances: int, *, by_shape: bool, constants: Constants) -> None:
        super().__init__(by_shape=by_shape, constants=constants)
        self._sets: list[dict[tuple[int, str], Lane]] = [{} for _ in range(instances)]
        self.by_key = self._sets[0]

    def show(self, instance: int) -> None:
        self.by_key = self._sets[instance]

    def show_for(self, job: Job) -> None:
        """Shows the lanes of the job's instance; a job that is only forecast names none."""
        step: SequenceStep | None = job.payload
        if step is not None:
            self.by_key = self._sets[step.instance]

    def instance_of(self, job: Job) -> int | None:
        step: SequenceStep | None = job.payload
        return None if step is None else step.instance

    def everybody(self) -> list[Job]:
        lines = (line for lanes in self._sets for lane in lanes.values() for line in lane.lines.values())
        return [*(job for line in lines for job in line), *self.coming]


class PinnedPromise(PromisePolicy):
    lanes: PinnedLanes

    def place(self, job: Job, sequence: int) -> tuple[int, str]:
        self.lanes.show_for(job)
        return super().place(job, sequence)

    def take(
        self, core: SchedulerState, instance: Instance, now: float, given_up: list[GivenUp]
    ) -> tuple[list[Job], float | None]:
        self.lanes.show(instance.index)
        return super().take(core, instance, now, given_up)


class PinnedFixedBatching(FixedBatchingPolicy):
    """Nothing is set aside ahead of time: that would be for whichever instance is free first."""

    looks_ahead = False
    lanes: PinnedLanes

    def __init__(self, settings: FixedBatching) -> None:
        super().__init__(settings)
        self._waits: dict[int, float] = {}  # by instance: until when its requests gather

    def place(self, job: Job, sequence: int) -> tuple[int, str]:
        self.lanes.show_for(job)
        return super().place(job, sequence)

    def take(
        self, core: SchedulerState, instance: Instance, now: float, given_up: list[GivenUp]
    ) -> tuple[list[Job], float | None]:
        """When to look again is for the sake of all: the last instance that is asked has the word."""
        self.lanes.show(instance.index)
        self._wait_until = None
        jobs, wait = super().take(core, instance, now, given_up)
        if wait is None:
            self._waits.pop(instance.index, None)
        else:
            self._waits[instance.index] = wait
        if not self._waits:
            return jobs, None
        return jobs, min((until for until in self._waits.values() if until > now), default=None)


def pin(scheduler: SchedulerState, settings: FixedBatching | None) -> None:
    """Makes `SequenceStep`s of the jobs to come, before it has any. Fixed settings have to gather across
    shapes, which keeps them from looking ahead."""
    constants, old = scheduler.constants, scheduler.policy
    policy: PinnedPromise | PinnedFixedBatching
    if settings is None:
        assert isinstance(old, PromisePolicy)
        policy = PinnedPromise(old.settings, scheduler.curve, constants)
    else:
        assert settings.across_shapes
        policy = PinnedFixedBatching(settings)
    lanes = PinnedLanes(len(scheduler.instances), by_shape=policy.by_shape, constants=constants)
    scheduler.policy, scheduler.lanes = policy, lanes
    policy.lanes = lanes
