"""Implements the gate: rejects at arrival, before any decoding, requests that would miss the SLO."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, floor
from typing import Final

from carpool.core.instance import Instance
from carpool.core.job import INFINITY, READY, SOON, Job, Lane, Reason, Refusal, Terms
from carpool.core.scheduler_state import SchedulerState
from carpool.core.shares import DeviceShares

MOST_LAG: Final = 0.2
"""Requests may spend a fifth of the SLO on their way to the scheduler. A longer lag shows that it cannot take
them as fast as they arrive, whatever the device could do: the front ends must reject them instead."""

SPARED_LAG: Final = 0.05
"""Beside other models, which wait in the same line, a flooded one is held to a twentieth: it has more to
refuse than its device could answer, and loses nothing if that is done before."""


def gate(
    core: SchedulerState, shares: DeviceShares, slo: float, job: Job, lane: Lane, now: float
) -> Refusal | None:
    """Returns nothing, or why the job is rejected. Two questions: can it finish in time, and would it delay
    the others?

    The second reads: the batch that would meet its deadline is smaller than what will be waiting by then, and
    batches that small cannot keep up with the traffic. While every instance is gone the job is rejected at
    once: replacing one takes far longer than any SLO.
    """
    curve, instances = core.curve, core.instances
    coming = job.course.ready_at > -INFINITY  # its input is: none is admitted for which it could be in vain
    oversell = 1.0 if coming else core.constants.oversell
    share = shares.of(lane)
    batch = curve.efficient[shares.largest]
    batches_ahead = floor(oversell * lane.waiting / (batch * share))
    behind = batches_ahead * curve.times[batch] / instances.pace
    if instances.uneven:
        if instances.gone:
            return Refusal(Reason.RESTARTING, retry_after=slo, waiting=core.lanes.waiting)
        instance, wait = _starts_on(core, job, behind, now)
    else:
        instance = instances.next_free
        wait = behind + (instance.free_at - now if instance.free_at > now else 0.0)
    starts = wait
    slack = 0.0
    if coming:
        wait = _wait_of_coming(core, instance, job, batch, wait, now)
        own = curve.times[min(batch, lane.waiting % batch + job.images)]
        job.course.foreseen = now + wait + instance.speed.mean * own
        slack = min(
            (lane.doubt or core.doubt_of(lane)).at(now), slo - 2 * instance.speed.mean * curve.times[1]
        )
        room = curve.fits((job.due - now - wait - slack) / instance.speed.mean)
    else:
        room = instances.fits(instance, job.due - now - wait)
    if room < job.images:
        if is_probe(core, job, slo, now):
            return None
        terms = _terms(core, instance, job, behind, starts, wait, slack, now)
        return _refusal(core, Reason.CANNOT_FINISH, terms)
    if room >= batch:
        return None  # whatever gathers, it runs in a batch of the best size
    most = instances.pace * curve.throughput(batch) * share
    rate = lane.rate.at(now) if share < 1.0 else shares.to_keep_up_with(core, lane, now)
    gathered = oversell * rate * wait / share
    if coming:  # no more gather than are let in, and decoding may carry less than is asked
        gathered = min(gathered, (lane.waiting + job.images) / share)
    enough = core.constants.keeps_up * rate
    sustained = instances.pace * curve.throughput(room) * share
    if room < min(batch, gathered) and sustained < enough:
        reason = Reason.OVERLOAD if share == 1.0 else Reason.OVER_SHARE
        terms = _terms(core, instance, job, behind, starts, wait, slack, now)
        return _refusal(core, reason, terms, rate, most, room, sustained)
    return None


def _wait_of_coming(
    core: SchedulerState, instance: Instance, job: Job, batch: int, wait: float, now: float
) -> float:
    """Returns how long from now it starts, when one whose input is there would start after `wait`.

    If its input is not there by then, batches leave without it, one after the other while there is traffic,
    and it runs in the first that begins when it is.
    """
    idle = len(core.instances.idle)
    if idle > core.lanes.waiting:
        return max(wait, job.course.ready_at - now)  # no request is before it, and an instance is free
    if idle:
        wait += instance.speed.mean * core.curve.times[1]  # the first that is there leaves at once, alone
    late = job.course.ready_at - now - wait
    if late <= 0.0:
        return wait
    step = _batch_s(core, batch, now)
    return wait + ceil(late / step) * step


def _batch_s(core: SchedulerState, batch: int, now: float) -> float:
    """Returns the seconds from one start to the next, in batches just large enough for what becomes ready."""
    curve, pace = core.curve, core.instances.pace
    supply = core.supply(now) / pace
    size = bisect_left(range(1, batch), supply, key=lambda n: curve.throughput(curve.efficient[n])) + 1
    return curve.times[size] / pace


def backed_up(core: SchedulerState, job: Job, now: float) -> Refusal | None:
    """Returns why a new request is rejected because of those still on their way, or nothing.

    It would have to wait behind them: only a request that has not been sent on can avoid that. They may be
    another model's: then that model has to reject, and this one's wait ends with it.
    """
    lag = core.lag.at(now)
    if lag <= SPARED_LAG * core.slo or not core.entrance.is_too_much(now):
        return None
    short = lag <= MOST_LAG * core.slo
    if short and not (_is_flooded(core, now) and core.entrance.has_company(now)):
        return None
    terms = _terms(core, core.instances.next_free, job, lag, lag, lag, 0.0, now)
    most = SPARED_LAG if short else MOST_LAG
    refusal = _refusal(core, Reason.OVERLOAD, terms)
    return refusal._replace(asked=core.rate(now), lag=lag, most_lag=most * core.slo)


def _is_flooded(core: SchedulerState, now: float) -> bool:
    """More is asked than batches of the best size carry: who is refused on the way would be refused here."""
    batch = core.curve.efficient[min(core.policy.max_images, core.curve.max_batch)]
    return core.rate(now) > core.instances.pace * core.curve.throughput(batch)


def is_probe(core: SchedulerState, job: Job, slo: float, now: float) -> bool:
    """Returns whether a job is let in as a probe, whatever is forecast. An instance that has not run for a
    whole promise lets one through. So does a kind of work that was not run for long, though other kinds keep
    the instances busy.

    Without this a device that was slow for a second would reject all requests for ever: nothing runs, so
    nothing is learned. Only a job with the whole promise ahead of it: a client's own short deadline proves
    nothing. Where steps of a pipeline come after this one, that decides for all of them (core/remaining.py).
    """
    if job.course.probe:
        return True
    promise = max(job.course.promise, slo)  # with less than the model's own, a step proves nothing
    if job.course.later or job.deadline - job.arrived < 0.99 * promise or now >= job.due:
        return False
    if job.course.ready_at > -INFINITY and job.state is not READY and core.lanes.waiting:
        return False  # its input is still to come, as another's is, who will show how it is
    idle = core.instances.idle_at(core.lanes.instance_of(job))
    if any(now - instance.idle_since >= slo for instance in idle):
        return True
    return bool(idle) and core.belief.is_overdue(job.images, now)


def _starts_on(core: SchedulerState, job: Job, behind: float, now: float) -> tuple[Instance, float]:
    """Returns, of instances that differ, the one that would run the job, and how long from now it would
    start."""
    instances = core.instances
    starts = [(i, max(0.0, i.free_at - now) + behind) for i in instances if i.available]
    return max(starts, key=lambda start: instances.fits(start[0], job.due - now - start[1]))


def _terms(
    core: SchedulerState,
    instance: Instance,
    job: Job,
    behind: float,
    starts: float,
    wait: float,
    doubt: float,
    now: float,
) -> Terms:
    """Returns what the gate has weighed: it would start after `wait` seconds, or after `starts` with its
    input there, `behind` of which is the queue's. Caution is taken once: `doubt` covers all that is
    foreseen."""
    takes = core.curve.times[job.images]
    speed = instance.speed
    coming = job.course.ready_at > -INFINITY
    return Terms(
        deadline=job.deadline - job.arrived,
        waited=now - job.arrived,
        queue=behind,
        running=starts - behind,
        input=wait - starts,
        batch=speed.mean * takes,
        outside=job.outside,
        later=job.course.later,
        spread=0.0 if coming else (speed.cautious - speed.mean) * takes,
        doubt=doubt,
    )


def _refusal(
    core: SchedulerState,
    reason: Reason,
    terms: Terms,
    asked: float = 0.0,
    answerable: float = 0.0,
    room: int = 0,
    sustained: float = 0.0,
) -> Refusal:
    """Returns a refusal that says when to retry: after the wait, when those ahead are served. Who brings too
    little time even for an idle instance would be refused then as well; who lost it on the way has all of it
    again. What is outside may be less by then."""
    wait = terms.queue + terms.running + terms.input
    alone = terms.batch + terms.spread
    return Refusal(
        reason,
        retry_after=(wait or terms.outside or SOON) if alone <= terms.deadline else 0.0,
        waiting=core.lanes.waiting,
        asked=asked,
        answerable=answerable,
        room=room,
        sustained=sustained,
        terms=terms,
    )
