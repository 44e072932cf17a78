"""A process that somebody else starts: one that never begins ends all the same, for whoever watches it."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

from carpool.link.child_process import Child, control_pair
from carpool.link.forked_child import _Born

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


def test_one_that_is_born_when_nobody_wants_it_any_more_is_ended() -> None:
    async def live() -> int:
        child, born = await unborn()
        child.kill()
        pid = os.fork()
        if pid == 0:
            signal.pause()
        assert born.born(pid) == -1
        return pid

    pid = asyncio.run(live())
    assert not os.path.exists(f"/proc/{pid}")  # noqa: PTH110
