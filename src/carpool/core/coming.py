"""A request that is let in before its input is there: when would it run?"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.core.instance import Instance
    from carpool.core.job import Job
    from carpool.core.scheduler import Scheduler


def wait_of_coming(
    core: Scheduler, instance: Instance, job: Job, batch: int, wait: float, now: float
) -> float:
    """How long from now it starts, when one whose input is there would start after `wait`.

    If its input is not there by then, batches leave without it, one after the other while there is traffic,
    and it rides in the first that begins when it is.
    """
    idle = len(core.instances.idle)
    if idle > core.lanes.waiting:
        return max(wait, job.ready_at - now)  # nobody is before it, and an instance is free
    if idle:
        wait += instance.speed.mean * core.curve.times[1]  # the first that is there leaves at once, alone
    late = job.ready_at - now - wait
    if late <= 0.0:
        return wait
    step = _batch_s(core, batch, now)
    return wait + ceil(late / step) * step


def _batch_s(core: Scheduler, batch: int, now: float) -> float:
    """From one start to the next, in batches just large enough for what becomes ready."""
    curve, pace = core.curve, core.instances.pace
    supply = core.supply(now) / pace
    size = bisect_left(range(1, batch), supply, key=lambda n: curve.throughput(curve.efficient[n])) + 1
    return curve.times[size] / pace
