"""Pictures on their way to being inputs: when will one that comes now be decoded, and when would it run?

They wait for a few threads that share their cores with everything else on the machine. So what counts is the
wall time that decoding takes now, with whatever neighbours there are, and not what it would take alone.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, exp
from typing import TYPE_CHECKING

from carpool.core.constants import CONSTANTS, Constants

if TYPE_CHECKING:
    from carpool.core.instance import Instance
    from carpool.core.job import Job
    from carpool.core.scheduler import Scheduler


class DecodeForecast:
    """Learns what decoding takes, from every picture. `weight` is how much work one is, in any unit."""

    __slots__ = (
        *("_busy", "_constants", "_pace", "_running", "_surprise", "_surprised", "_threads", "_waiting"),
    )

    def __init__(self, threads: int, constants: Constants = CONSTANTS) -> None:
        self._threads = threads
        self._constants = constants
        self._pace = 0.0  # seconds for a weight of 1, in one thread
        self._waiting = 0.0  # weight
        self._running = 0.0
        self._busy = 0  # threads
        self._surprise = 0.0  # how much later than foreseen pictures were decoded lately
        self._surprised = 0.0  # when

    def joined(self, weight: float) -> None:
        """It waits for a thread, or will as soon as it is let in."""
        self._waiting += weight

    def left(self, weight: float) -> None:
        """It is not wanted any more."""
        self._waiting -= weight

    def began(self, weight: float) -> None:
        self._waiting -= weight
        self._running += weight
        self._busy += 1

    def ended(self, weight: float, seconds: float) -> None:
        self._running -= weight
        self._busy -= 1
        c, pace = self._constants, seconds / weight
        if self._pace:
            # One that takes for ever says little of the next; if they all do, so will the forecast.
            pace = self._pace + c.decode_weight * (min(pace, c.decode_most * self._pace) - self._pace)
        self._pace = pace

    def came_true(self, foreseen: float, taken: float, now: float) -> None:
        """It was said to take so many seconds until it is there, and took that many."""
        surprise = self._surprise_at(now)
        gap = taken - foreseen
        if gap > surprise:
            surprise += self._constants.decode_surprise * (gap - surprise)
        self._surprise, self._surprised = surprise, now

    def _surprise_at(self, now: float) -> float:
        since = now - self._surprised
        return (
            self._surprise * exp(-since / self._constants.decode_memory_s) if since > 0.0 else self._surprise
        )

    def seconds(self, weight: float, now: float) -> float:
        """Until one that comes now is decoded."""
        ahead = 0.0
        if self._waiting > 0.0 or self._busy >= self._threads:
            ahead = max(0.0, self._waiting + self._running / 2) / self._threads
        return (ahead + weight) * self._pace + self._surprise_at(now)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs: a forecast could only speak of the past."""
        return not self._busy and self._waiting <= 0.0


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
