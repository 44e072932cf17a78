"""Implements the state machine: what happens to a model's queue and instances, and a policy that is asked two
questions.

It is notified of what happened and when; it answers with values. It never waits, and never looks at a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from carpool.core.admission import backed_up
from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve
from carpool.core.fixed_batching import FixedBatchingPolicy
from carpool.core.instance import Batch, Instance
from carpool.core.job import (
    DONE,
    GONE,
    INFINITY,
    OFFERED,
    ORDINARY,
    READY,
    RUNNING,
    GivenUp,
    Job,
    Lane,
    Reason,
    Refusal,
    Terms,
)
from carpool.core.learning import Lag
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler_state import Policy, SchedulerState

if TYPE_CHECKING:
    from carpool.core.background import BackgroundTurn


@dataclass(slots=True)
class Decision:
    """Dispatch this batch, or look again at that time, or (neither) idle until something happens."""

    batch: Batch | None = None
    look_again: float | None = None
    given_up: list[GivenUp] = field(default_factory=list)


_MOST_ROOM = 64  # requests: a queue that has room for more need not count them


class Scheduler(SchedulerState):
    """Represents one model's scheduler. A job is offered, made ready, dispatched in a batch, and finished
    with it."""

    def __init__(
        self,
        curve: BatchCurve,
        settings: Promise | FixedBatching,
        instances: int = 1,
        constants: Constants = CONSTANTS,
    ) -> None:
        policy: Policy
        if isinstance(settings, Promise):
            from carpool.core.batcher import PromisePolicy  # few models of a server need both policies

            policy, slo = PromisePolicy(settings, curve, constants), settings.slo
        else:
            policy, slo = FixedBatchingPolicy(settings), INFINITY
        super().__init__(curve, policy, slo, instances, constants)
        self._number = 0
        self._expiries: list[tuple[float, int, Job]] = []
        self._in_order: deque[Job] = deque()
        self._replaced: list[GivenUp] = []  # not reported yet
        self.asked_for = 0  # images, ever; without those that another server was asked for before
        self.background: BackgroundTurn | None = None  # work that no client waits for, once there is any

    # ---- what happened ------------------------------------------------------------------------------

    def offer(self, job: Job, now: float, *, ready: bool = True) -> Refusal | None:
        """A request has arrived. Refused (the reason comes back), or counted in the queue from now on. With
        `ready=False` it waits for its picture: call `ready` when the tensor is there."""
        self.ledger.offered += 1
        self._number += 1
        self.entrance.takes(now)
        self.outside.seen(job.outside, now)
        level, source = self.policy.place(job, self._number)
        job.lane = lane = self.lanes.lane(level, source, now)
        if not ready:
            if lane.coming is None:
                lane.coming = Lag(self.constants.rate_memory_s)
            lane.coming.seen(job.course.ready_at - now, now)
        if job.origin.holder != lane.holder or job.origin.weight != lane.weight:
            lane.belongs_to(job)
        old = self.lanes.frames.replaced_by(job, ready=ready) if job.options.latest else None
        self._count_arrival(job, lane, now, more=old is None)
        refusal = self._admit(job, old, now)
        if refusal is not None:
            job.state = GONE
            lane.refused = now
            self.ledger.refused[refusal.reason] += 1
            return refusal
        self.lanes.offer(job, lane)
        self._watch(job)
        if ready:
            self._ready(job, old, now)
        else:
            self.lanes.coming[job] = None
        return None

    def refuses(self, job: Job, now: float, ahead: int = 0) -> Refusal | None:
        """Returns what the gate says to a request that is still on its way, as are so many images of its
        source `ahead` of it: nothing is counted yet."""
        job.lane = lane = self.lanes.peek(*self.policy.place(job, self._number))
        lane.waiting += ahead
        self.lanes.waiting += ahead
        try:
            return self._limits(job, now) or backed_up(self, job, now) or self.policy.admit(self, job, now)
        finally:
            lane.waiting -= ahead
            self.lanes.waiting -= ahead

    def room(self, job: Job, now: float) -> tuple[int, Refusal | None]:
        """Returns about how many like this one, which is still on its way, would be let in now one after the
        other, none of them decided about in between; and what the gate says to the next."""
        refusal, ahead = self.refuses(job, now), 0
        lane = job.lane
        assert lane is not None
        while refusal is None and ahead < _MOST_ROOM:
            ahead = 2 * ahead or 1
            lane.waiting += ahead
            self.lanes.waiting += ahead
            refusal = self.refuses(job, now)
            lane.waiting -= ahead
            self.lanes.waiting -= ahead
        return ahead, refusal

    def refused_elsewhere(
        self, images: int, requests: int, reason: Reason, now: float, source: str = ""
    ) -> None:
        """A front end said no on its own: the traffic counts as offered all the same."""
        self.ledger.offered += requests
        self.ledger.refused[reason] += requests
        self.entrance.spared(requests, now)
        self._rate.add(images, now)
        lane = self.lanes.lane(ORDINARY, source, now)
        lane.rate.add(images, now)
        lane.refused = now

    def ready(self, job: Job, now: float) -> None:
        """The job's input is there: it may run. Too late for one that has left meanwhile."""
        if job.state is OFFERED:
            self._supply.add(job.images, now)
            old = self.lanes.frames.replaced_by(job, ready=True) if job.options.latest else None
            if old is not None and old.arrived > job.arrived:  # that one's input was there before
                self._replace(job)
                return
            if old is not None:
                self._replace(old)
            self._ready(job, old, now)

    def cancel(self, job: Job, now: float) -> bool:
        """The client has gone. True if that spared the work; a running batch goes on without an answer."""
        if job.lane is None and self.background is not None:
            return self.background.cancel(job)
        if job.state in (OFFERED, READY):
            self.lanes.remove(job, GONE)
            self.ledger.cancelled += 1
            return True
        if job.state is RUNNING:
            job.state = GONE
            self.ledger.running -= 1
            self.ledger.cancelled += 1
        return False

    def finished(self, batch: Batch, now: float, seconds: float | None = None) -> list[Job]:
        """A batch has ended. Returns the jobs to answer now, in order where that was promised.

        `seconds` is what it took on the instance, if that is worth learning from: its kind's curve does.
        """
        if batch.turn is not None and batch.turn.is_background():
            return batch.turn.finished(batch, now, seconds)
        self.instances.finish(batch, now, seconds)
        if seconds is not None:
            self._learn(batch, seconds, now)
        done = [job for job in batch.jobs if job.state is RUNNING]
        for job in done:
            job.state = DONE
            if job.course.foreseen < INFINITY:
                lane = job.lane
                assert lane is not None
                (lane.doubt or self.doubt_of(lane)).seen(now - job.course.foreseen, now)
        self.ledger.running -= len(done)
        self.ledger.answered += len(done)
        return self._release() if self.policy.preserve_ordering else done

    def set_available(self, instance: Instance, available: bool) -> None:
        """An instance has died, or is back."""
        instance.available = available
        self.instances.refresh()
        if instance.turn is not None and not available:
            instance.turn.gives_way()  # it may have been first in line for the device

    # ---- what to do ---------------------------------------------------------------------------------

    def decide(self, now: float, *, background_too: bool = True) -> Decision:
        """Returns the next thing to do. Ask again after a batch was returned: another instance may be
        free."""
        if self.background is not None and background_too:
            return self._decide_beside(self.background, now)
        decision = Decision(given_up=self._replaced)
        self._replaced = []
        self._expire(now, decision.given_up)
        if self.policy.looks_ahead:
            self.policy.look_ahead(self, now)
        kind = self.kind
        for instance in self.instances.idle:
            if not self.lanes.ready:
                break
            if instance.turn is not None and not instance.turn.granted(now):
                continue
            jobs, look_again = self.policy.take(self, instance, now, decision.given_up)
            if jobs:
                decision.batch = self._dispatch(instance, jobs, now)
                return decision
            if self.kind is not kind:  # what is run counts, not what was given up
                self.turn_to(kind, now)
            if instance.turn is not None:
                instance.turn.declines()
            decision.look_again = look_again
        if self._expiries:
            decision.look_again = min(self._expiries[0][0], decision.look_again or INFINITY)
        return decision

    def _decide_beside(self, background: BackgroundTurn, now: float) -> Decision:
        """Background work runs where the model has nothing to start."""
        decision = self.decide(now, background_too=False)
        if decision.batch is None:
            decision.batch = background.start(now)
            if background.look_again is not None:
                decision.look_again = min(background.look_again, decision.look_again or INFINITY)
        return decision

    @property
    def next_expiry(self) -> float:
        """Returns when to report a request that will not run: `decide` is not needed for that before."""
        if self._replaced:
            return -INFINITY
        return self._expiries[0][0] if self._expiries else INFINITY

    # ---- inside -----------------------------------------------------------------------------------------

    def _learn(self, batch: Batch, seconds: float, now: float) -> None:
        """On the account of its own kind, whichever is in force by now."""
        belief = batch.belief
        if belief.handover.is_news(belief.curve.times[1], now):
            belief.count_handover(batch.images)
            self._believe(self.belief, now)  # which may be this one
        if not belief.trend.ran(batch.images, seconds, belief.runs, now):
            return
        if self.instances.differ(belief):  # one slow instance is no reason to think worse of all
            belief.trend.put_off(now)
            return
        learned = belief.trend.relearned(belief.runs, now)
        if learned is not None:
            belief.adopt(*learned)
            self._believe(self.belief, now)

    def _count_arrival(self, job: Job, lane: Lane, now: float, *, more: bool) -> None:
        """A frame that takes the place of another asks for no `more` than that one did."""
        if self.instances.idle:
            self.instances.rest(now)
            if job.shape != self.kind and not self.lanes.requests:
                self.turn_to(job.shape, now)  # it would run next: let the gate know what it is
        if more:
            if not job.options.again:
                self.asked_for += job.images
            self._rate.add(job.images, now)
            lane.rate.add(job.images, now)

    def _admit(self, job: Job, old: Job | None, now: float) -> Refusal | None:
        """Asks the gate, which sees the room that the old frame leaves. A rejected one replaces none."""
        if job.options.latest and self.lanes.frames.overtaken(job):
            return Refusal(Reason.REPLACED)
        if old is None:
            return self._limits(job, now) or self.policy.admit(self, job, now)
        state = old.state
        self.lanes.remove(old, GONE)
        refusal = self._limits(job, now) or self.policy.admit(self, job, now)
        self.lanes.put_back(old, state)
        if refusal is None:
            self._replace(old)
        return refusal

    def _replace(self, old: Job) -> None:
        """Removes a frame that a newer one replaces, which the next decision reports."""
        self.lanes.remove(old, GONE)
        self.ledger.given_up[Reason.REPLACED] += 1
        self._replaced.append(GivenUp(old, Reason.REPLACED))

    def _ready(self, job: Job, old: Job | None, now: float) -> None:
        if job.state is OFFERED:
            if old is not None:
                self.policy.succeed(old, job)
            self.lanes.ready_now(job, in_place=old is not None and old.lane is job.lane)
            if self.policy.looks_ahead:
                self.policy.look_ahead(self, now, job)

    def _limits(self, job: Job, now: float) -> Refusal | None:
        if job.images > self.policy.max_images:
            return Refusal(Reason.TOO_LARGE, most=self.policy.max_images, images=job.images)
        waiting, most = self.lanes.waiting, self.policy.max_queue
        if waiting + job.images > most:
            wait = self._until_room_for(waiting + job.images - most, now)
            terms = Terms(deadline=job.deadline - job.arrived)
            return Refusal(
                Reason.QUEUE_FULL, wait, waiting=waiting, most=most, images=job.images, terms=terms
            )
        return None

    def _until_room_for(self, images: int, now: float) -> float:
        """Returns the seconds until so many images have left the queue, if no more requests come."""
        batch = self.curve.efficient[min(self.policy.max_images, self.curve.max_batch)]
        batches = (images - 1) // batch
        ahead = max(self.curve.times[1], self.instances.next_free.free_at - now)
        return ahead + batches * self.curve.times[batch] / self.instances.pace

    def _dispatch(self, instance: Instance, jobs: list[Job], now: float) -> Batch:
        self.ledger.running += len(jobs)
        if self.policy.preserve_ordering:
            self._in_order.extend(jobs)
        return self.instances.start(instance, jobs, now)

    def _release(self) -> list[Job]:
        """Answers leave in the order in which their requests were taken."""
        released = []
        while self._in_order and self._in_order[0].state is not RUNNING:
            job = self._in_order.popleft()
            if job.state is DONE:
                released.append(job)
        return released

    def _watch(self, job: Job) -> None:
        expires = self.policy.expires(job)
        if expires < INFINITY:
            if len(self._expiries) > 1024 + 2 * self.lanes.requests:
                self._expiries[:] = [e for e in self._expiries if e[2].state < RUNNING]
                heapify(self._expiries)
            self._number += 1
            heappush(self._expiries, (expires, self._number, job))

    def _expire(self, now: float, given_up: list[GivenUp]) -> None:
        expiries = self._expiries
        while expiries and (expiries[0][2].state >= RUNNING or expiries[0][0] <= now):
            expiry, _, job = heappop(expiries)
            if job.state < RUNNING:
                reason = self.policy.expired(self, job, now)
                if reason is not None:
                    batch = max(0.0, job.due - expiry) if reason is Reason.DEADLINE else 0.0
                    given_up.append(self.give_up(job, reason, now, batch=batch))
                else:
                    self._watch(job)
