"""Profiles for whoever looks: the engine is asked rarely, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from carpool.errors import NotFound
from carpool.frontend.documents import _MOST_KEPT, ProfileWatch
from carpool.types import Datatype
from frontend.fake_door import FakeDoor, echo


class Told:
    """A door that counts the questions, a clock that a test can move, and the watch between them."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.door = FakeDoor(*(echo(name, Datatype.FP32) for name in names or ("a",)))
        self.door.answers["profile"] = self._answer
        self.watch = ProfileWatch(self.door, lambda: self.now)

    def _answer(self, arguments: Mapping[str, Any]) -> Any:
        self.asked.append(arguments["name"])
        if self.error is not None:
            raise self.error
        return {"name": arguments["name"], "number": len(self.asked)}

    async def look(self, name: str = "a", version: str = "") -> Any:
        found = self.watch.look(name, version)
        for _ in range(3):  # the turns that a question takes
            await asyncio.sleep(0)
        return found


def test_the_second_look_has_it_and_many_looks_are_one_question() -> None:
    async def run() -> None:
        told = Told()
        assert await told.look() is None
        for _ in range(20):
            assert await told.look(version="1") == {"name": "a", "number": 1}
        told.now += 2
        assert (await told.look())["number"] == 1, "what was known is answered at once"
        assert (await told.look())["number"] == 2
        assert told.asked == ["a", "a"]

    asyncio.run(run())


def test_who_does_not_serve_is_not_asked_about() -> None:
    async def run() -> None:
        told = Told()
        assert await told.look("nobody") is None
        assert await told.look("a", "7") is None
        told.door.serving = False
        assert await told.look() is None
        assert told.asked == []

    asyncio.run(run())


def test_a_model_that_left_is_forgotten() -> None:
    async def run() -> None:
        told = Told()
        await told.look()
        told.now, told.error = 2.0, NotFound("gone")
        await told.look()
        assert await told.look() is None
        told.now, told.error = 4.0, None
        await told.look()
        assert (await told.look())["number"] == 3

    asyncio.run(run())


def test_an_engine_that_does_not_answer_is_asked_once_and_can_be_left() -> None:
    async def run() -> None:
        told = Told()
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        told.door.answers["profile"] = lambda arguments: told.asked.append(arguments["name"]) or never
        for second in range(5):
            told.now = 2.0 * second
            assert await told.look() is None
        assert told.asked == ["a"]
        told.watch.close()
        await asyncio.sleep(0)
        assert never.cancelled()

    asyncio.run(run())


def test_it_keeps_those_that_were_looked_at_last() -> None:
    async def run() -> None:
        names = [f"m{number:03d}" for number in range(_MOST_KEPT + 1)]
        told = Told(*names)
        for name in names:
            await told.look(name)
        assert await told.look(names[-1]) is not None
        assert await told.look(names[0]) is None

    asyncio.run(run())
