"""Requests that wait for a model to be loaded, and bodies that were here before their plan."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from carpool.core.job import INFINITY
from carpool.errors import Unavailable, retry_after
from carpool.frontend import demands
from carpool.frontend.demands import Demands
from carpool.frontend.http.exchange import Collect, Receive, hand_over
from carpool.link.engine_client import EngineClient


class Engine:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: list[asyncio.Future[Any]] = []

    async def ask(self, what: str, arguments: dict[str, str]) -> Any:
        assert what == "demand"
        self.asked.append(arguments["model"])
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


def made() -> tuple[Engine, Demands]:
    engine = Engine()
    return engine, Demands(cast(EngineClient, engine))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_engine_is_asked_once_for_all_who_wait() -> None:
    async def story() -> None:
        engine, waiting = made()
        three = [asyncio.ensure_future(waiting.loaded("m", INFINITY, 10)) for _ in range(3)]
        other = asyncio.ensure_future(waiting.loaded("n", INFINITY, 10))
        await turns()
        assert engine.asked == ["m", "n"]
        engine.answers[0].set_result({})
        await asyncio.gather(*three)
        assert not other.done()
        engine.answers[1].set_exception(Unavailable("no room", reason="no-room"))
        with pytest.raises(Unavailable, match="no room"):
            await other
        again = asyncio.ensure_future(waiting.loaded("n", INFINITY, 10))
        await turns()
        assert engine.asked == ["m", "n", "n"], "it is asked again"
        waiting.close()
        with pytest.raises(asyncio.CancelledError):
            await again

    asyncio.run(story())


def test_who_cannot_wait_so_long_is_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        engine, waiting = made()
        now = 100.0
        monkeypatch.setattr(demands, "monotonic", lambda: now)  # a machine may stand still meanwhile
        with pytest.raises(Unavailable, match="is being loaded") as late:
            await waiting.loaded("m", now + 0.001, 10)
        assert (late.value.reason, retry_after(late.value)) == ("loading", 2)
        assert engine.asked == ["m"], "it is loaded all the same"
        waiting._took["m"] = 30.0  # as long as it took before
        with pytest.raises(Unavailable) as told:
            await waiting.loaded("m", now + 5.0, 10)
        assert told.value.retry_after_s == 30.0
        waiting._took.clear()
        monkeypatch.setattr(demands, "MOST_BYTES", 15)
        first = asyncio.ensure_future(waiting.loaded("m", INFINITY, 10))
        await turns()
        with pytest.raises(Unavailable):
            await waiting.loaded("m", INFINITY, 10)
        engine.answers[0].set_result({})
        await first
        assert (waiting._waiting, waiting._bytes) == (0, 0)

    asyncio.run(story())


def test_a_body_is_handed_to_whatever_plan_there_is() -> None:
    seen: list[object] = []
    hand_over(Collect(100, lambda body, at: seen.append((bytes(body), at))), b"body", 1.0)
    buffers = [bytearray(3), bytearray(5), bytearray(20)]

    def more(received: int) -> memoryview:
        old = buffers.pop(0)
        buffers[0][:received] = old[:received]
        return memoryview(buffers[0])

    body = b"longer than that"
    hand_over(Receive(memoryview(buffers[0]), seen.append, more), body, 2.0)
    assert seen == [(b"body", 1.0), 2.0]
    assert bytes(buffers[0][: len(body)]) == body
    hand_over(None, b"", 3.0)
    hand_over(Receive(memoryview(bytearray(1)), seen.append, lambda _: None), b"too long", 4.0)
    assert len(seen) == 2, "it was answered meanwhile"
