"""Holds what the scheduler of one model knows: its queue, its instances, what was learned of both, and where
every job went. Policies read it, and answer the questions of `Policy` from it; scheduler.py changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from carpool.core.constants import Constants
from carpool.core.curve import BatchCurve
from carpool.core.instance import Instance, Instances
from carpool.core.intake import Intake
from carpool.core.job import GONE, INFINITY, ORDINARY, GivenUp, Job, Lane, Reason, Refusal
from carpool.core.learning import Belief, Beliefs, Doubt, Lag, Rate, Trend
from carpool.core.queue import Lanes

LAG_MEMORY_S: Final = 0.005
"""When no request has come for so long, none is on the way any more."""

_AT_ONCE_S = 1e-4  # inputs that come sooner are there


@dataclass(slots=True)
class Ledger:
    """Counts where every job went: offered = refused + given up + cancelled + answered + waiting +
    running."""

    offered: int = 0
    answered: int = 0
    cancelled: int = 0
    running: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)
    given_up: Counter[Reason] = field(default_factory=Counter)


class Policy(Protocol):
    """Defines the two questions, `admit` and `take`, and what is needed to keep the queue in the policy's
    order."""

    by_shape: bool
    preserve_ordering: bool
    looks_ahead: bool  # else `look_ahead` is not called
    max_images: int  # in one request
    max_queue: int

    def admit(self, core: SchedulerState, job: Job, now: float) -> Refusal | None: ...

    def take(
        self, core: SchedulerState, instance: Instance, now: float, given_up: list[GivenUp]
    ) -> tuple[list[Job], float | None]: ...

    def look_ahead(self, core: SchedulerState, now: float, job: Job | None = None) -> None:
        """Something changed: this job became ready, or an instance was freed. Nothing is dispatched yet."""

    def adopt(self, core: SchedulerState, now: float) -> None:
        """What a batch takes is known better now, or it is another kind's turn."""

    def place(self, job: Job, number: int) -> tuple[int, str]:
        """Ranks the job and names its lane."""

    def succeed(self, old: Job, new: Job) -> None:
        """`new`, which is about to be ready, takes the place of `old`, which has left."""

    def expires(self, job: Job) -> float: ...

    def expired(self, core: SchedulerState, job: Job, now: float) -> Reason | None: ...


class SchedulerState:
    """One model's, as its policy sees it. `Scheduler` is one, and adds what happens."""

    def __init__(
        self, curve: BatchCurve, policy: Policy, slo: float, instances: int, constants: Constants
    ) -> None:
        self.constants = constants
        self.slo = slo
        self.kind: Hashable = None  # of work, which is a job's shape: the one whose belief is in force
        self._beliefs = Beliefs(curve, instances, constants)
        self.belief = self._beliefs.of(self.kind, -INFINITY)
        self.curve = curve  # that of the belief: read at every arrival
        self.instances = Instances(self.belief)
        self.policy = policy
        self.lanes = Lanes(by_shape=policy.by_shape, constants=constants)
        self.ledger = Ledger()
        self.age = Lag(constants.rate_memory_s)  # of requests when they leave their front end
        self.lag = Lag(LAG_MEMORY_S)  # from there to here
        self.entrance = Intake(constants).join()  # its own, unless it shares an engine with others
        self.outside = Lag(constants.rate_memory_s)  # what their clients wait beside the queue and the batch
        memory = constants.rate_memory_s
        promises = 0.0 if slo == INFINITY else constants.rate_memory_promises * slo
        self._rate = Rate(max(memory, promises))
        self._supply = Rate(memory)

    def turn_to(self, kind: Hashable, now: float) -> None:
        """The next batch is of another kind: what is believed of that is in force, at the gate as well."""
        self.kind = kind
        belief = self._beliefs.of(kind, now)
        if belief is not self.belief:
            self.instances.rest(now)
            self.belief.laid_aside(now)
            belief.taken_up(now)
            self._believe(belief, now)

    @property
    def trend(self) -> Trend:
        return self.belief.trend

    def rate(self, now: float) -> float:
        """Returns images offered per second, refusals included."""
        return self._rate.at(now)

    def supply(self, now: float) -> float:
        """Images per second that came late and became ready: what batches are made of, where inputs are."""
        return self._supply.at(now)

    def newcomer(self, source: str, now: float) -> Job:
        """One that comes now, as the others did lately: as old when it gets here, with its input as far away,
        and its answer as long on the way."""
        age = self.age.at(now) + self.lag.at(now)
        job = Job(now - age, source=source, outside=self.outside.at(now))
        coming = self.lanes.peek(ORDINARY, source).coming
        seconds = 0.0 if coming is None else coming.at(now)
        if seconds > _AT_ONCE_S:
            job.own_course().ready_at = now + seconds
        return job

    def doubt_of(self, lane: Lane) -> Doubt:
        """Returns what is doubted of a source's requests: no other source's make them later."""
        doubt = lane.doubt
        if doubt is None:
            doubt = lane.doubt = Doubt(self.slo if self.slo < INFINITY else 0.0)
        return doubt

    def saturation(self, now: float) -> float:
        """Returns 0 when a newcomer would run at once, 1 when the wait alone would take its whole promise."""
        if self.slo == INFINITY:
            return 0.0
        batch = self.curve.efficient[min(self.policy.max_images, self.curve.max_batch)]
        ahead = max(0.0, self.instances.next_free.free_at - now)
        ahead += self.lanes.waiting / batch * self.curve.times[batch] / self.instances.pace
        return min(1.0, ahead / self.slo)

    def measured_again(self, profile: BatchCurve, now: float) -> None:
        """The curve that it began with was not right: what was learned by it is forgotten."""
        self._beliefs = Beliefs(profile, len(self.instances), self.constants)
        self._believe(self._beliefs.of(self.kind, now), now)

    def replanned(self, profile: BatchCurve, now: float) -> None:
        """The model is faster or slower from here on; what was learned of everything else stays."""
        self._beliefs.replan(profile)
        self._believe(self.belief, now)

    def give_up(
        self, job: Job, reason: Reason, now: float, *, room: int = 0, needed: int = 0, batch: float = 0.0
    ) -> GivenUp:
        self.lanes.remove(job, GONE)
        if job.course.foreseen < INFINITY:  # it would have ended after it was due
            assert job.lane is not None
            self.doubt_of(job.lane).seen(max(now, job.due) - job.course.foreseen, now)
        self.ledger.given_up[reason] += 1
        return GivenUp(job, reason, room, needed, batch)

    def _believe(self, belief: Belief, now: float) -> None:
        self.belief, self.curve = belief, belief.curve
        self.instances.believe(belief)
        self.policy.adopt(self, now)
