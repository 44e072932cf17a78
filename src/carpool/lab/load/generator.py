"""Implements a run: the clock, the target and the ledger brought together, in one process or shared by
several."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import uvloop

from carpool.errors import CarpoolError, InvalidInput
from carpool.lab.load.aim import Aim, take_aim
from carpool.lab.load.load_plan import Pace, Plan, pace_of
from carpool.lab.load.load_report import LoadReport, Part, report
from carpool.lab.load.tally import Answer, Histogram, Kind, Ledger, Record, Slice, Target, Ticket

_MONOTONIC = 1  # CLOCK_MONOTONIC, which time.monotonic() reads
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_TIMES = struct.Struct("@qqqq")  # interval and first time, each in seconds and nanoseconds


class Alarm:
    """Represents one time at which `ring` is called; setting it again forgets the earlier one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time = libc.timerfd_settime
        self._buffer = ctypes.create_string_buffer(_TIMES.size)
        self._loop = loop
        self._ring = ring
        self._again = False
        self._fd: int = libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._rung)

    def set(self, at: float) -> None:
        """`at` is on the clock of `time.monotonic()`; what has passed rings at once."""
        self._again = True
        at = max(at, 1e-9)  # zero would turn it off
        seconds = int(at)
        _TIMES.pack_into(self._buffer, 0, 0, 0, seconds, int((at - seconds) * 1e9))
        self._set_time(self._fd, _ABSOLUTE, self._buffer, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rung(self) -> None:
        self._again = False
        self._ring()
        if not self._again:  # setting it anew also makes it silent, and saves a call
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)


Watch = Callable[[float, Slice], None]
"""Called a few times a second with the time since the start and what happened since the last call."""

_AT_ONCE = 64  # requests sent in one turn of the loop: answers must be read in between
_TICK_S = 0.02
_WATCH_S = 0.25


async def run(
    plan: Plan,
    target: Target,
    *,
    watch: Watch | None = None,
    stop: asyncio.Event | None = None,
    record: Record | None = None,
) -> LoadReport:
    """Sends what the plan says to the target and reports the answers. `stop` ends it early."""
    generator = _Generator(plan, target, pace_of(plan.load), watch, record)
    part = await generator.run(stop or asyncio.Event())
    return report(plan, [part], target.name)


class _Generator:
    def __init__(
        self, plan: Plan, target: Target, pace: Pace, watch: Watch | None, record: Record | None = None
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

    async def run(self, stop: asyncio.Event, of: int = 1, start_at: float | None = None) -> Part:
        """Does what one of `of` processes does; `start_at` is on the clock of `time.monotonic()`."""
        try:
            await self._target.open(self.answered, self.clock, self._plan.at_once(of))
            return await self._run(stop, time.monotonic() + 0.01 if start_at is None else start_at)
        finally:
            await self._target.close()

    async def _run(self, stop: asyncio.Event, start_at: float) -> Part:
        self._start = start_at
        processor = time.process_time()
        self._alarm.set(self._start)
        self._tick = self._loop.call_later(_TICK_S, self._ticked, time.monotonic() + _TICK_S)
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(self._stop_early)
        try:
            await self._sent_all.wait()
            seconds = self.clock()
            stopped_early = stop.is_set()
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

    def _stop_early(self, stopping: asyncio.Future[Any]) -> None:
        if not stopping.cancelled():
            self._pace.stop()
            self._check_end()

    async def _drain(self) -> None:
        """Waits for what is open, but not for ever."""
        if self._ledger.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), self._plan.drain)
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
        except Exception as error:  # no task awaits a turn: without this, the run would hang
            self._failure = error
            self._pace.stop()
        self._turning = False
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._looks_at = next_at = self._pace.next_at
        if next_at < float("inf"):
            self._alarm.set(self._start + next_at)
        self._check_end()

    def answered(self, ticket: Ticket, answer: Answer) -> None:
        """Takes the target's word on one request."""
        now = self.clock()
        if self._ledger.end(ticket, now, answer):
            self._ended(now, failed=answer.kind is Kind.FAILED)

    def _ended(self, now: float, *, failed: bool = False) -> None:
        self._pace.answered(now, failed=failed)
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


_AFTER_S = 0.2  # from the last process that is ready to the common start
_STARTING_S = 60.0
_COLLECT_AT = (50_000, 20, 100)  # requests leave no cycles behind: look for garbage rarely

_STOP = "stop"

Result = TypeVar("Result")


class LostPart(CarpoolError):
    """Means that a generating process ended without a result."""

    reason = "generator-died"
    exit_code = 1


async def run_shared(
    plan: Plan, aim: Aim, processes: int, *, watch: Watch | None = None, stop: asyncio.Event | None = None
) -> LoadReport:
    """Does the same as `run`, by `processes` others that each make their part of the schedule's requests."""
    spawn = multiprocessing.get_context("spawn")
    children: list[tuple[Any, Connection]] = []
    with ThreadPoolExecutor(processes) as threads:
        try:
            for part in range(processes):
                ours, theirs = spawn.Pipe()
                args = (theirs, plan, aim, part, processes)
                child = spawn.Process(target=_generate, args=args, daemon=True)
                child.start()
                theirs.close()
                children.append((child, ours))
            pipes = [pipe for _, pipe in children]
            async with asyncio.timeout(_STARTING_S):
                names = await _together(_receive(threads, pipe) for pipe in pipes)
            start_at = time.monotonic() + _AFTER_S
            for pipe in pipes:
                pipe.send(start_at)
            parts = await _collect(threads, pipes, watch, stop or asyncio.Event())
            return report(plan, parts, str(names[0]))
        finally:
            for child, pipe in children:  # each child ends before its pipe, so that no thread waits for it
                child.kill()
                child.join()
                child.close()
                pipe.close()


async def _collect(
    threads: ThreadPoolExecutor, pipes: list[Connection], watch: Watch | None, stop: asyncio.Event
) -> list[Part]:
    async def tell_stop() -> None:
        await stop.wait()
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(_STOP)

    async def collect(pipe: Connection) -> Part:
        while True:
            said = await _receive(threads, pipe)
            if isinstance(said, Part):
                return said
            if watch is not None:
                watch(*said)

    stopping = asyncio.ensure_future(tell_stop())
    try:
        return await _together(collect(pipe) for pipe in pipes)
    finally:
        stopping.cancel()


async def _together(waiting: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All of them; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in waiting]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _receive(threads: ThreadPoolExecutor, pipe: Connection) -> Any:
    """Returns the next thing that a process says; its error, if it had one."""
    try:
        said = await asyncio.get_running_loop().run_in_executor(threads, pipe.recv)
    except (EOFError, OSError):  # between two messages, or within one
        raise LostPart("a process of the generator died, so there is no result") from None
    if isinstance(said, CarpoolError):
        raise said
    return said


def collect_rarely() -> None:
    """A collection of everything takes milliseconds, in which no request is sent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def _generate(pipe: Connection, plan: Plan, aim: Aim, part: int, of: int) -> None:
    """Does the work of one of the processes. Ctrl-C is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = uvloop.run(_generate_part(pipe, plan, aim, part, of))
    except CarpoolError as error:  # sent as one that can be pickled, whatever arguments its kind takes
        pipe.send((InvalidInput if isinstance(error, InvalidInput) else LostPart)(error.message))
        return
    pipe.send(found)


async def _generate_part(pipe: Connection, plan: Plan, aim: Aim, part: int, of: int) -> Part:
    target = take_aim(aim)
    pace = pace_of(plan.load, part, of)
    collect_rarely()
    pipe.send(target.name)
    start_at = pipe.recv()
    stop = asyncio.Event()
    heard = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    threading.Thread(target=_listen, args=(pipe, heard), daemon=True).start()

    def watch(elapsed: float, seen: Slice) -> None:
        pipe.send((elapsed, seen))

    return await _Generator(plan, target, pace, watch).run(stop, of, start_at)


def _listen(pipe: Connection, stop: Callable[[], object]) -> None:
    """Waits until the parent says stop, or is gone, and ends the run. Only this thread reads the pipe."""
    try:
        pipe.recv()
        stop()
    except (EOFError, OSError):
        os._exit(1)
