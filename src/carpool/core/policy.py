"""The rules of the promise; those of the knobs are in knobs.py, and what is asked of both is `Policy` in
scheduler_state.py."""

from __future__ import annotations

from carpool.core.admission import gate
from carpool.core.batcher import next_batch
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve
from carpool.core.instance import Instance
from carpool.core.job import INFINITY, GivenUp, Job, Reason, Refusal, planned
from carpool.core.objectives import Promise
from carpool.core.scheduler_state import SchedulerState
from carpool.core.shares import ORDINARY, DeviceShares, level_of


class PromisePolicy:
    """Answer within the SLO, or say no early: earliest deadline first behind a gate; nobody waits while an
    instance is idle."""

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

    def place(self, job: Job, sequence: int) -> tuple[int, str]:
        """The job's lane, after giving it its place in that lane's order."""
        arrived, deadline = job.arrived, job.deadline
        slo = job.promise or self.settings.slo
        if deadline > arrived + slo:
            deadline = job.deadline = arrived + slo
        outside = job.outside = planned(job.outside, deadline - arrived, self._constants)
        job.rank = job.due = deadline - outside - job.later
        return level_of(job.priority) if job.priority else ORDINARY, job.source

    def succeed(self, old: Job, new: Job) -> None:
        """Its lane keeps its turn; within the lane the earliest deadline still goes first."""

    def expires(self, job: Job) -> float:
        """One whose input is still to come is too late when it could not run any more; so it is told, and
        its input need not be made. Who waits with its input is judged when an instance is free."""
        there = job.probe or job.ready_at == -INFINITY
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
