"""A run: the clock, the target and the ledger brought together. The one place of the generator that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from carpool.lab.load.alarm import Alarm
from carpool.lab.load.histogram import Histogram
from carpool.lab.load.ledger import Ledger, Record
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.load_report import Report, report
from carpool.lab.load.pace import Pace, pace_of
from carpool.lab.load.tally import Slice, Tally
from carpool.lab.load.target import Target
from carpool.lab.load.ticket import Answer, Ticket

Watch = Callable[[float, Slice], None]
"""Called a few times a second with the time since the start and what happened since the last call."""

_AT_ONCE = 64  # requests sent in one turn of the loop: answers must be read in between
_TICK_S = 0.02
_WATCH_S = 0.25
_OPEN_AT_FIRST = 16  # connections of an open loop, at least, before its first request; more come when needed


@dataclass
class Part:
    """What one generating process found."""

    tallies: list[Tally]
    seconds: float  # from the start until nothing more was due
    last_answer: float
    stopped_early: bool
    processor_seconds: float
    wall_seconds: float
    loop_lag: Histogram
    facts: dict[str, int] = field(default_factory=dict)


async def run(
    plan: Plan,
    target: Target,
    *,
    watch: Watch | None = None,
    stop: asyncio.Event | None = None,
    record: Record | None = None,
) -> Report:
    """Send what the plan says to the target and tell what came back. `stop` ends it early."""
    part = await run_part(plan, target, pace_of(plan.load), watch=watch, stop=stop, record=record)
    return report(plan, [part], target.name)


async def run_part(
    plan: Plan,
    target: Target,
    pace: Pace,
    *,
    of: int = 1,
    start_at: float | None = None,
    watch: Watch | None = None,
    stop: asyncio.Event | None = None,
    record: Record | None = None,
) -> Part:
    """What one of `of` processes does; `start_at` is on the clock of `time.monotonic()`."""
    generator = _Generator(plan, target, pace, watch, record)
    try:
        await target.open(generator.told, generator.clock, at_once(plan, of))
        return await generator.run(start_at, stop or asyncio.Event())
    finally:
        await target.close()


def at_once(plan: Plan, of: int = 1) -> int:
    """Requests that one of `of` processes will have open: as many as it has clients; or as arrive within a
    promise, since who opens connections under full load is late with what it sends."""
    load = plan.load
    if isinstance(load, Closed):
        return ceil(load.concurrency / of)
    busiest = max((phase.rate for phase in load.phases), default=0.0)
    return max(_OPEN_AT_FIRST, ceil(busiest * (plan.slo or 0.0) / of))


class _Generator:
    def __init__(
        self, plan: Plan, target: Target, pace: Pace, watch: Watch | None, record: Record | None
    ) -> None:
        self._plan = plan
        self._target = target
        self._pace = pace
        self._watch = watch
        self._ledger = Ledger(len(plan.load.phases), slo=plan.slo, timeout=plan.timeout, record=record)
        self._loop = asyncio.get_running_loop()
        self._loop_lag = Histogram()
        self._start = 0.0
        self._sent_all = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._alarm = Alarm(self._loop, self._turn)
        self._looks_at = 0.0  # when the alarm will ring
        self._tick: asyncio.TimerHandle | None = None
        self._watched_at = 0.0
        self._turning = False
        self._failure: Exception | None = None

    def clock(self) -> float:
        return time.monotonic() - self._start

    async def run(self, start_at: float | None, stop: asyncio.Event) -> Part:
        self._start = time.monotonic() + 0.01 if start_at is None else start_at
        processor = time.process_time()
        self._alarm.set(self._start)
        self._tick = self._loop.call_later(_TICK_S, self._ticked, time.monotonic() + _TICK_S)
        stopping = asyncio.ensure_future(self._stop_early(stop))
        try:
            await self._sent_all.wait()
            seconds = self.clock()
            stopped_early = stopping.done() and stop.is_set()
            if self._failure is not None:
                raise self._failure
            await self._drain()
        finally:
            stopping.cancel()
            self._alarm.close()
            self._tick.cancel()
        self._show()
        return Part(
            tallies=self._ledger.tallies,
            seconds=seconds,
            last_answer=self._ledger.last_answer,
            stopped_early=stopped_early,
            processor_seconds=time.process_time() - processor,
            wall_seconds=max(self.clock(), 1e-9),
            loop_lag=self._loop_lag,
            facts=self._target.facts(),
        )

    async def _stop_early(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._pace.stop()
        self._check_end()

    async def _drain(self) -> None:
        """Wait for what is open, but not for ever."""
        if self._ledger.open:
            waiting = asyncio.ensure_future(self._all_ended.wait())
            await asyncio.wait([waiting], timeout=self._plan.drain)
            waiting.cancel()
        for ticket in self._ledger.abandon(self.clock()):
            self._target.let_go(ticket)

    # ---- while it runs

    def _turn(self) -> None:
        """Send what is due."""
        self._turning = True  # a target may answer at once: what follows from that is looked at below
        try:
            for ticket in self._pace.due(self.clock(), _AT_ONCE):
                self._ledger.start(ticket, self.clock())
                self._target.send(ticket)
        except Exception as error:  # nobody awaits a turn: without this, the run would hang
            self._failure = error
            self._pace.stop()
        self._turning = False
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._looks_at = next_at = self._pace.next_at
        if next_at < float("inf"):
            self._alarm.set(self._start + next_at)
        self._check_end()

    def told(self, ticket: Ticket, answer: Answer) -> None:
        """The target's word on one request."""
        now = self.clock()
        if self._ledger.end(ticket, now, answer):
            self._ended(now)

    def _ended(self, now: float) -> None:
        self._pace.answered(now)
        if self._turning:
            return
        if self._pace.next_at <= now:
            self._turning = True
            self._loop.call_soon(self._turn)
        elif self._pace.next_at < self._looks_at:  # a client that thinks before it asks again
            self._look_ahead()
        elif not self._ledger.open:
            self._check_end()

    def _check_end(self) -> None:
        if self._pace.finished:
            self._sent_all.set()
            if not self._ledger.open:
                self._all_ended.set()

    def _ticked(self, expected: float) -> None:
        now = time.monotonic()
        self._loop_lag.add(now - expected)
        for ticket in self._ledger.expire(self.clock()):
            self._target.let_go(ticket)
            self._ended(self.clock())
        if now - self._watched_at >= _WATCH_S:
            self._watched_at = now
            self._show()
        self._tick = self._loop.call_later(_TICK_S, partial(self._ticked, now + _TICK_S))

    def _show(self) -> None:
        if self._watch is not None:
            self._watch(self.clock(), self._ledger.cut())
