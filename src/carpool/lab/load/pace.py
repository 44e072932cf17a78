"""Which requests are due: the open loop follows its schedule, the closed loop its clients. Told the time."""

from __future__ import annotations

from bisect import insort
from math import inf
from typing import Protocol

from carpool.lab.load.load_plan import Closed, Open
from carpool.lab.load.schedule import Schedule
from carpool.lab.load.ticket import Ticket


class Pace(Protocol):
    """Decides what is to be sent now, and when to look again."""

    @property
    def next_at(self) -> float:
        """Nothing is due before; infinity if only an answer can change that, or if all has been sent."""

    @property
    def finished(self) -> bool:
        """Whether everything that will ever be due has been."""

    def due(self, now: float, most: int) -> list[Ticket]:
        """The requests to send now, the longest overdue first; what is over `most` stays due."""

    def answered(self, now: float) -> None:
        """A request has ended, one way or another."""

    def stop(self) -> None:
        """Nothing more is due, ever."""


class OpenLoop:
    """Every `of`th request of the schedule, from the `part`th on, at its time."""

    def __init__(self, schedule: Schedule, part: int = 0, of: int = 1) -> None:
        self._schedule = schedule
        self._next = part
        self._step = of
        self._end = len(schedule)

    @property
    def next_at(self) -> float:
        return self._schedule.times[self._next] if self._next < self._end else inf

    @property
    def finished(self) -> bool:
        return self._next >= self._end

    def due(self, now: float, most: int) -> list[Ticket]:
        schedule = self._schedule
        found: list[Ticket] = []
        number = self._next
        while number < self._end and schedule.times[number] <= now and len(found) < most:
            phase, images = schedule.phases[number], schedule.images[number]
            found.append(Ticket(number, schedule.times[number], phase, images, schedule.source(number)))
            number += self._step
        self._next = number
        return found

    def answered(self, now: float) -> None:
        """Makes no difference: that is the point of an open loop."""

    def stop(self) -> None:
        self._end = 0


class ClosedLoop:
    """Clients that ask again `think` seconds after they were answered."""

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

    def answered(self, now: float) -> None:
        insort(self._ready, now + self._think)

    def stop(self) -> None:
        self._ended = True


def pace_of(load: Open | Closed, part: int = 0, of: int = 1) -> Pace:
    if isinstance(load, Closed):
        return ClosedLoop(load, part, of)
    return OpenLoop(Schedule(load.phases, load.traffic, load.seed), part, of)
