"""Threads that decode pictures, under a virtual clock: what stands before a simulated scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, inf
from random import Random

from carpool.core.decode_forecast import DecodeForecast
from carpool.core.job import OFFERED, Job


@dataclass(frozen=True, slots=True)
class Decoder:
    """How long pictures really take, in so many threads."""

    seconds: float
    threads: int = 2
    noise: float = 0.2  # sigma of a lognormal factor
    slowdown: Callable[[float], float] | None = None  # time → factor


class DecodeStage:
    """Decodes who was let in, earliest deadline first; who was given up before its turn is skipped."""

    def __init__(self, decoder: Decoder, random: Random) -> None:
        self.decoder = decoder
        self.forecast = DecodeForecast(decoder.threads)
        self.decoded: list[Job] = []
        self._random = random
        self._waiting: list[tuple[float, int, Job, float, float]] = []  # … when it joined, what was foreseen
        self._running: list[tuple[float, int, Job, float, float, float]] = []  # when it ends … when it began
        self._sequence = 0

    @property
    def next_end(self) -> float:
        return self._running[0][0] if self._running else inf

    def admitted(self, job: Job, now: float) -> None:
        self._sequence += 1
        self.forecast.joined(1.0)
        foreseen = job.ready_at - now
        heappush(self._waiting, (job.deadline, self._sequence, job, now, foreseen))
        self._start(now)

    def given_up(self, job: Job) -> None:
        """One that waits to be decoded need not be; one that is being decoded goes on, for nothing."""
        if any(entry[2] is job for entry in self._waiting):
            self._waiting = sorted(entry for entry in self._waiting if entry[2] is not job)
            self.forecast.left(1.0)

    def end(self, now: float) -> Job:
        """The picture that is decoded now."""
        _, _, job, joined, foreseen, began = heappop(self._running)
        self.forecast.ended(1.0, now - began)
        self.forecast.came_true(foreseen, now - joined, now)
        self.decoded.append(job)
        self._start(now)
        return job

    def _start(self, now: float) -> None:
        while self._waiting and len(self._running) < self.decoder.threads:
            _, number, job, joined, foreseen = heappop(self._waiting)
            assert job.state is OFFERED
            self.forecast.began(1.0)
            seconds = self.decoder.seconds * exp(self._random.gauss(0.0, self.decoder.noise))
            if self.decoder.slowdown is not None:
                seconds *= self.decoder.slowdown(now)
            heappush(self._running, (now + seconds, number, job, joined, foreseen, now))
