"""Plans a run: its phases, its schedule, and which requests are due at a time that the caller passes."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from random import Random
from typing import TypeAlias

from carpool.errors import InvalidInput
from carpool.lab.load.tally import Ticket
from carpool.sim.arrivals import Poisson, Traffic

MOST_REQUESTS = 20_000_000  # in one run: some 200 MB of times
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # of a closed loop's clients after failures in a row
_OPEN_AT_FIRST = 16  # connections of an open loop, at least, before its first request; more come when needed


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run with a rate of its own, in requests per second; a warm-up is sent but not counted."""

    rate: float
    seconds: float
    warmup: bool = False

    @property
    def name(self) -> str:
        return "warm-up" if self.warmup else f"{self.rate:g}/s for {self.seconds:g} s"


def check_length(phases: Sequence[Phase]) -> None:
    expected = sum(phase.rate * phase.seconds for phase in phases)
    if not expected <= MOST_REQUESTS:
        raise InvalidInput(
            f"{expected:,.0f} requests are more than the {MOST_REQUESTS:,} that one run may have: lower "
            "the rate or the duration"
        )


class Schedule:
    """Holds times from the start, rising, and which phase, how many images and whose each request is."""

    def __init__(self, phases: Sequence[Phase], traffic: Traffic, seed: int = 1) -> None:
        check_length(phases)
        self.seconds = sum(phase.seconds for phase in phases)
        self.times = array("d")
        self.phases = array("H")
        self.images = array("H")
        self._sources: list[str] = []  # up to the last that is named
        random = Random(seed)
        start = 0.0
        for number, phase in enumerate(phases):
            for arrival in traffic.arrivals(phase.rate, phase.seconds, random):
                if arrival.source:
                    self._sources += [""] * (len(self.times) - len(self._sources))
                    self._sources.append(arrival.source)
                self.times.append(start + arrival.at)
                self.phases.append(number)
                self.images.append(min(arrival.images, 0xFFFF))
            start += phase.seconds

    def __len__(self) -> int:
        return len(self.times)

    def source(self, number: int) -> str:
        return self._sources[number] if number < len(self._sources) else ""


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come when the schedule says, whether the server keeps up or not."""

    phases: tuple[Phase, ...]
    traffic: Traffic = field(default_factory=Poisson)
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Closed:
    """Describes so many clients that each wait for an answer, think, and ask again; until one of the
    limits."""

    concurrency: int
    seconds: float | None = None
    requests: int | None = None
    think: float = 0.0
    warmup: float = 0.0  # seconds before the counted ones

    @property
    def phases(self) -> tuple[Phase, ...]:
        counted = Phase(0.0, self.seconds or 0.0)
        return (Phase(0.0, self.warmup, warmup=True), counted) if self.warmup else (counted,)


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes a run, with times in seconds. `timeout` runs from the intended time; `drain` is for what is
    open at the end."""

    load: Open | Closed
    slo: float | None = None
    timeout: float = 10.0
    drain: float = 10.0
    batch: int = 1  # images in a request, where the schedule does not say otherwise

    def at_once(self, of: int = 1) -> int:
        """Requests that one of `of` processes will have open: as many as it has clients; or as arrive within
        a promise, since who opens connections under full load is late with what it sends."""
        if isinstance(self.load, Closed):
            return ceil(self.load.concurrency / of)
        busiest = max((phase.rate for phase in self.load.phases), default=0.0)
        return max(_OPEN_AT_FIRST, ceil(busiest * (self.slo or 0.0) / of))


class OpenLoop:
    """Sends every `of`th request of the schedule, from the `part`th on, at its time."""

    def __init__(self, schedule: Schedule, part: int = 0, of: int = 1) -> None:
        self._schedule = schedule
        self._next = part
        self._step = of
        self._end = len(schedule)

    @property
    def next_at(self) -> float:
        """Nothing is due before; infinity if only an answer can change that, or if all has been sent."""
        return self._schedule.times[self._next] if self._next < self._end else inf

    @property
    def finished(self) -> bool:
        return self._next >= self._end

    def due(self, now: float, most: int) -> list[Ticket]:
        """The requests to send now, the longest overdue first; what is over `most` stays due."""
        schedule = self._schedule
        found: list[Ticket] = []
        number = self._next
        while number < self._end and schedule.times[number] <= now and len(found) < most:
            phase, images = schedule.phases[number], schedule.images[number]
            found.append(Ticket(number, schedule.times[number], phase, images, schedule.source(number)))
            number += self._step
        self._next = number
        return found

    def answered(self, now: float, *, failed: bool = False) -> None:
        """Makes no difference: that is the point of an open loop."""

    def stop(self) -> None:
        self._end = 0


class ClosedLoop:
    """Implements clients that send again `think` seconds after they were answered.

    After failures in a row they wait longer, up to a second: a server that is gone is not flooded.
    """

    def __init__(self, plan: Closed, part: int = 0, of: int = 1) -> None:
        mine = len(range(part, plan.concurrency, of))
        self._think = plan.think
        self._warm_at = plan.warmup
        self._last_phase = len(plan.phases) - 1
        self._until = inf if plan.seconds is None else plan.warmup + plan.seconds
        self._left = inf if plan.requests is None else len(range(part, plan.requests, of))
        self._ready = [0.0] * mine  # when each client that is not waiting wants to ask, in order
        self._next, self._step = part, of
        self._ended = not mine
        self._failures = 0  # in a row

    @property
    def next_at(self) -> float:
        if self.finished:
            return inf
        return min(self._ready[0], self._until) if self._ready else self._until

    @property
    def finished(self) -> bool:
        return self._ended or self._left <= 0

    def due(self, now: float, most: int) -> list[Ticket]:
        if now >= self._until:
            self._ended = True
        found: list[Ticket] = []
        while self._ready and self._ready[0] <= now and len(found) < most and not self.finished:
            at = self._ready.pop(0)
            warm = at >= self._warm_at
            found.append(Ticket(self._next, at, self._last_phase if warm else 0))
            self._next += self._step
            if warm:
                self._left -= 1
        return found

    def answered(self, now: float, *, failed: bool = False) -> None:
        self._failures = self._failures + 1 if failed else 0
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures, 20)) if failed else 0.0
        insort(self._ready, now + max(self._think, pause))

    def stop(self) -> None:
        self._ended = True


Pace: TypeAlias = OpenLoop | ClosedLoop
"""Decides what is to be sent now, and when to look again."""


def pace_of(load: Open | Closed, part: int = 0, of: int = 1) -> Pace:
    if isinstance(load, Closed):
        return ClosedLoop(load, part, of)
    return OpenLoop(Schedule(load.phases, load.traffic, load.seed), part, of)
