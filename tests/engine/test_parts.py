"""Answers on their way from a model's thread to the loop: in order, bounded, and none after the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import numpy as np

from carpool.core.job import GONE, RUNNING
from carpool.engine.batch import Work
from carpool.engine.parts import PartWay
from carpool.types import Array


class Place:
    def part(self, rows: Any) -> bytes:
        return bytes(rows["y"].data)


class Sink:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.full = False

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        self.heard.append(int.from_bytes(payload, "little"))


def rider(sink: Sink) -> Work:
    work = Work({}, lambda _work, _outcome: None)
    work.state, work.parts, work.place = RUNNING, sink, cast(Any, Place())
    return work


def y(number: int) -> dict[str, Array]:
    return {"y": np.array([number], np.int64)}


async def sent(way: PartWay, work: Work, count: int) -> tuple[threading.Thread, list[bool]]:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(way.send(work, y(n)) for n in range(count)))
    thread.start()
    return thread, found


def test_a_model_faster_than_the_loop_waits_for_it() -> None:
    async def main() -> None:
        sink = Sink()
        thread, found = await sent(PartWay(asyncio.get_running_loop()), rider(sink), 500)
        while thread.is_alive():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert found == [True] * 500
        assert sink.heard == list(range(500))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_front_end_that_takes_nothing_stops_its_models() -> None:
    async def main() -> None:
        sink = Sink()
        sink.full = True
        work = rider(sink)
        thread, found = await sent(PartWay(asyncio.get_running_loop()), work, 500)
        while len(sink.heard) < 8:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sink.heard) == 8
        work.state = GONE  # and one whose client has gone waits no longer
        while thread.is_alive():
            await asyncio.sleep(0)
        assert len(sink.heard) == 8
        assert not any(found[9:])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_nothing_is_delivered_after_the_end() -> None:
    async def main() -> None:
        sink = Sink()
        work = rider(sink)
        way = PartWay(asyncio.get_running_loop())
        way.send(work, y(1))
        work.parts = None  # it was answered, say because it took too long
        await asyncio.sleep(0)
        assert sink.heard == []

    asyncio.run(asyncio.wait_for(main(), 60))
