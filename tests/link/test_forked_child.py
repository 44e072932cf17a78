"""A process that somebody else starts: one that never begins ends all the same, for whoever watches it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from carpool.link import forked_child
from carpool.link.child_process import Child, Message, control_pair
from carpool.link.forked_child import _Born
from waiting import until

WAIT_S = 30.0


async def unborn() -> tuple[Child, _Born]:
    ours, theirs = control_pair()
    theirs.close()
    written, writing = os.pipe()
    os.close(writing)
    born = _Born()
    child = Child.around(born, ours, written, "runner")
    born.given_up = partial(child.begin, -1)
    return child, born


def test_its_end_is_waited_for_also_where_a_loop_watches_it() -> None:
    """A loop makes what it watches non-blocking, and duplicates of a descriptor share that."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    born = _Born()
    watched = born.born(process.pid)
    os.set_blocking(watched, False)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(born.wait)
        assert process.stdin is not None
        until(lambda: waiting.done() or waiting.running())
        process.stdin.close()
        assert waiting.result(WAIT_S) == 0
    os.close(watched)
    process.returncode = 0


def test_one_that_is_killed_before_it_is_born_has_ended() -> None:
    async def live() -> int:
        child, _ = await unborn()
        child.kill()
        return await asyncio.wait_for(child.watch(lambda _: None), WAIT_S)

    assert asyncio.run(live()) == -signal.SIGKILL


def test_one_that_is_born_is_watched_to_its_end() -> None:
    async def live() -> tuple[int, int]:
        child, born = await unborn()
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        child.begin(born.born(pid))
        return await asyncio.wait_for(child.watch(lambda _: None), WAIT_S), child.pid - pid

    assert asyncio.run(live()) == (7, 0)


def test_one_that_is_abandoned_is_waited_for_although_its_descriptor_does_not_block() -> None:
    async def live() -> int | None:
        child, born = await unborn()
        pid = os.fork()
        if pid == 0:
            time.sleep(60.0)
            os._exit(0)
        child.begin(born.born(pid))
        os.set_blocking(child._pidfd, False)  # as uvloop does with what it watches
        child.abandon()
        return born.returncode

    assert asyncio.run(live()) == -signal.SIGKILL


@pytest.mark.parametrize("heard", [False, True], ids=["at once", "after its end was heard"])
def test_one_that_is_born_when_nobody_wants_it_any_more_is_ended(heard: bool) -> None:
    reading, writing = os.pipe()

    async def live() -> int:
        child, born = await unborn()
        child.kill()
        if heard:
            await asyncio.wait_for(child.watch(lambda _: None), WAIT_S)
        pid = os.fork()
        if pid == 0:
            time.sleep(5.0)
            os.write(writing, b"nobody ended it")
            os._exit(0)
        assert born.born(pid) == -1
        return pid

    pid = asyncio.run(live())
    until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b""


def one_that_hangs() -> Child:
    """It never reads what it is told."""
    ours, theirs = control_pair()
    written, writing = os.pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            stderr=writing,
            pass_fds=[theirs.fileno()],
        )
    os.close(writing)
    child = Child.around(process, ours, written, "zygote")
    child.begin(os.pidfd_open(process.pid))
    return child


@pytest.mark.parametrize("imports", [False, True], ids=["at rest", "importing"])
def test_a_zygote_that_does_not_fork_is_ended_with_all_who_wait_for_it(
    imports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_child, "START_S", 0.05)

    async def live() -> tuple[bool, list[int]]:
        gone = asyncio.Event()
        zygote = forked_child.Zygote(one_that_hangs(), lambda: None, gone.set, look_s=0.01)
        if not imports:
            zygote._hear(Message({"word": "imported"}))
        waiting = [zygote.fork("runner", "runner") for _ in range(2)]
        codes = [await asyncio.wait_for(child.watch(lambda _: None), WAIT_S) for child in waiting]
        await asyncio.wait_for(gone.wait(), WAIT_S)
        return zygote.usable, codes

    assert asyncio.run(live()) == (False, [-signal.SIGKILL] * 2)


def test_a_zygote_that_has_just_imported_has_as_long_to_fork_as_one_at_rest() -> None:
    async def live() -> list[bool]:
        gone, looks = asyncio.Event(), list[Callable[[], None]]()
        zygote = forked_child.Zygote(one_that_hangs(), lambda: None, gone.set)
        loop = asyncio.get_running_loop()
        call_later = loop.call_later
        loop.call_later = lambda _s, look, *args: looks.append(partial(look, *args))  # type: ignore
        zygote.fork("engine", "engine")
        found = []
        for imported in (False, True, False):
            if imported:
                zygote._hear(Message({"word": "imported"}))
            looks.pop()()
            found.append(bool(looks))  # it looks again
        loop.call_later = call_later  # type: ignore[method-assign]
        await asyncio.wait_for(gone.wait(), WAIT_S)
        return found

    assert asyncio.run(live()) == [True, True, False]
