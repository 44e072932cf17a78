"""A run shared by several processes, when one core is not enough: each has a part of the schedule."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import uvloop

from carpool.errors import CarpoolError, InvalidInput
from carpool.lab.load.aim import Aim, take_aim
from carpool.lab.load.generator import Part, Watch, run_part
from carpool.lab.load.load_plan import Plan
from carpool.lab.load.load_report import Report, report
from carpool.lab.load.pace import pace_of
from carpool.lab.load.tally import Slice

_AFTER_S = 0.2  # from the last process that is ready to the common start
_STARTING_S = 60.0
_COLLECT_AT = (50_000, 20, 100)  # requests leave no cycles behind: look for garbage rarely

_STOP = "stop"

Found = TypeVar("Found")


class LostPart(CarpoolError):
    """A generating process ended without a result."""

    reason = "generator-died"


async def run_shared(
    plan: Plan, aim: Aim, processes: int, *, watch: Watch | None = None, stop: asyncio.Event | None = None
) -> Report:
    """The same as `run`, by `processes` others that each make their part of the schedule's requests."""
    spawn = multiprocessing.get_context("spawn")
    children: list[tuple[Any, Connection]] = []
    try:
        for part in range(processes):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(target=_generate, args=(theirs, plan, aim, part, processes), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        pipes = [pipe for _, pipe in children]
        async with asyncio.timeout(_STARTING_S):
            names = await _together(_receive(pipe) for pipe in pipes)
        start_at = time.monotonic() + _AFTER_S
        for pipe in pipes:
            pipe.send(start_at)
        parts = await _collect(pipes, watch, stop or asyncio.Event())
        return report(plan, parts, str(names[0]))
    finally:
        for child, pipe in children:
            pipe.close()
            child.join(1.0)
            if child.is_alive():
                child.kill()
                child.join(5.0)
            child.close()


async def _collect(pipes: list[Connection], watch: Watch | None, stop: asyncio.Event) -> list[Part]:
    async def tell_stop() -> None:
        await stop.wait()
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(_STOP)

    async def collect(pipe: Connection) -> Part:
        while True:
            said = await _receive(pipe)
            if isinstance(said, Part):
                return said
            elapsed, seen = said
            if watch is not None:
                watch(elapsed, seen)

    stopping = asyncio.ensure_future(tell_stop())
    try:
        return await _together(collect(pipe) for pipe in pipes)
    finally:
        stopping.cancel()


async def _together(waiting: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """All of them; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in waiting]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _receive(pipe: Connection) -> Any:
    """The next thing that a process says; its error, if it had one."""
    readable = asyncio.Event()
    _watch(pipe, readable.set)
    try:
        await readable.wait()
        said = pipe.recv()
    except (EOFError, OSError):  # between two messages, or within one
        raise LostPart("a process of the generator died, so that there is no result") from None
    finally:
        asyncio.get_running_loop().remove_reader(pipe.fileno())
    if isinstance(said, CarpoolError):
        raise said
    return said


def _watch(pipe: Connection, readable: Callable[[], None]) -> None:
    """Call it while there is something to read. The pipe blocks as before, which uvloop would change: a
    report that is longer than the socket's buffer comes, and goes, in several pieces."""
    asyncio.get_running_loop().add_reader(pipe.fileno(), readable)
    os.set_blocking(pipe.fileno(), True)


def spare_the_collector() -> None:
    """A collection of everything takes milliseconds, in which no request is sent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def _generate(pipe: Connection, plan: Plan, aim: Aim, part: int, of: int) -> None:
    """One of the processes. Ctrl-C is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = uvloop.run(_generate_part(pipe, plan, aim, part, of))
    except CarpoolError as error:
        pipe.send(_plain(error))
        return
    pipe.send(found)


def _plain(error: CarpoolError) -> CarpoolError:
    """One that can be pickled, whatever arguments its kind takes."""
    kind = InvalidInput if isinstance(error, InvalidInput) else LostPart
    return kind(error.message)


async def _generate_part(pipe: Connection, plan: Plan, aim: Aim, part: int, of: int) -> Part:
    target = take_aim(aim)
    pace = pace_of(plan.load, part, of)
    spare_the_collector()
    pipe.send(target.name)
    start_at = pipe.recv()
    stop = asyncio.Event()
    _watch(pipe, partial(_listen, pipe, stop.set))

    def watch(elapsed: float, seen: Slice) -> None:
        pipe.send((elapsed, seen))

    return await run_part(plan, target, pace, of=of, start_at=start_at, watch=watch, stop=stop)


def _listen(pipe: Connection, stop: Callable[[], None]) -> None:
    """The parent says stop, or is gone: then nobody wants the rest."""
    try:
        pipe.recv()
        stop()
    except EOFError:
        os._exit(1)
