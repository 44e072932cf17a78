"""The simulation of pictures, which threads decode after they were let in and before they are ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp
from typing import Any

from carpool.core.decode_forecast import DecodeForecast
from carpool.core.job import OFFERED, Job
from carpool.core.scheduler import Scheduler
from carpool.sim.simulation import Device, Simulation


@dataclass(frozen=True, slots=True)
class Decoder:
    """How long pictures really take, in so many threads."""

    seconds: float
    threads: int = 2
    noise: float = 0.2  # sigma of a lognormal factor
    slowdown: Callable[[float], float] | None = None  # time → factor


class DecodingSimulation(Simulation):
    """Decodes who was let in, earliest deadline first, and skips who was given up."""

    def __init__(self, scheduler: Scheduler, device: Device, decoder: Decoder, **more: Any) -> None:
        super().__init__(scheduler, device, **more)
        self.decoder = decoder
        self.forecast = DecodeForecast(decoder.threads)
        self.decoded: list[Job] = []
        self._waiting: list[tuple[float, int, Job, float, float]] = []  # … when it joined, what was foreseen
        self._decoding: list[tuple[float, int, Job, float, float, float]] = []  # when it ends … when it began
        self._sequence = 0

    def _refused(self, job: Job, now: float) -> bool:
        job.own_course().ready_at = now + self.forecast.seconds(1.0, float(len(self._waiting)), now)
        if self.scheduler.offer(job, now, ready=False) is not None:
            return True
        self._sequence += 1
        heappush(self._waiting, (job.deadline, self._sequence, job, now, job.course.ready_at - now))
        self._start(now)
        return False

    def _advance(self, until: float, look_again: float | None) -> float | None:
        while self._decoding and self._decoding[0][0] < until:
            at = self._decoding[0][0]
            super()._advance(at, look_again)
            _, _, job, joined, foreseen, began = heappop(self._decoding)
            self.forecast.ended(1.0, at - began)
            self.forecast.came_true(1.0, foreseen, at - joined, at)
            self.decoded.append(job)
            self._start(at)
            self.scheduler.ready(job, at)
            look_again = self._act(at)
        return super()._advance(until, look_again)

    def _act(self, now: float) -> float | None:
        look_again = super()._act(now)
        if any(entry[2].payload.given_up for entry in self._waiting):
            # What waits to be decoded need not be; what is being decoded goes on, for nothing.
            self._waiting = sorted(entry for entry in self._waiting if not entry[2].payload.given_up)
        return look_again

    def _start(self, now: float) -> None:
        while self._waiting and len(self._decoding) < self.decoder.threads:
            _, number, job, joined, foreseen = heappop(self._waiting)
            assert job.state is OFFERED
            self.forecast.began(1.0)
            seconds = self.decoder.seconds * exp(self._random.gauss(0.0, self.decoder.noise))
            if self.decoder.slowdown is not None:
                seconds *= self.decoder.slowdown(now)
            heappush(self._decoding, (now + seconds, number, job, joined, foreseen, now))
