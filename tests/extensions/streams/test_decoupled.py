"""Answers on their way from a model's thread to the loop: in order, bounded, and none after the end."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from carpool.backends.backend import Rider
from carpool.core.job import GONE, RUNNING
from carpool.engine.run.batch import BatchResult, Outcome, Work
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.streams.decoupled import DecoupledInstance, PartWay
from carpool.types import Array, Datatype, Signature, TensorSpec
from waiting import until_in_loop as until

pytestmark = pytest.mark.interpreted  # the stand-ins are of classes that compiled code takes itself only


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
    work.state, work.own_extras().parts, work.place = RUNNING, sink, cast(Any, Place())
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
        await until(lambda: not thread.is_alive())
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
        await until(lambda: len(sink.heard) >= 8)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sink.heard) == 8
        work.state = GONE  # and one whose client has gone waits no longer
        await until(lambda: not thread.is_alive())
        assert len(sink.heard) == 8
        assert not any(found[9:])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_nothing_is_delivered_after_the_end() -> None:
    async def main() -> None:
        sink = Sink()
        work = rider(sink)
        way = PartWay(asyncio.get_running_loop())
        way.send(work, y(1))
        work.own_extras().parts = None  # it was answered, say because it took too long
        await asyncio.sleep(0)
        assert sink.heard == []

    asyncio.run(asyncio.wait_for(main(), 60))


class Riding:
    """A backend that answers everybody who is aboard in turn, 0, 1, 2 …, as often as the input says."""

    alive, most_open = True, 3

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.fails: CarpoolError | None = None

    def run_many(self, riders: Sequence[Rider], more: Callable[[], Sequence[Rider]]) -> None:
        left = {rider: int(rider.inputs["x"][0]) for rider in riders}
        while left:
            for rider in list(left):
                if self.fails is not None:
                    raise self.fails
                if not left[rider] or not rider.wanted:
                    del left[rider]
                    rider.end(None)
                else:
                    left[rider] -= 1
                    rider.send({"y": np.zeros((1, 1), np.int64)})
            left |= {rider: int(rider.inputs["x"][0]) for rider in more()}

    def close(self) -> None:
        self.closed.set()


SIGNATURE = Signature(
    "m", (TensorSpec("x", Datatype.INT64, (-1,)),), (TensorSpec("y", Datatype.INT64, (-1,)),), 8
)


def asks(count: int) -> Work:
    work = rider(Sink())
    work.inputs = {"x": np.array([count], np.int64)}
    return work


def ridden(story: Callable[[DecoupledInstance, Riding, dict[Any, list[Outcome]]], Awaitable[None]]) -> None:
    async def main() -> None:
        loop, backend, ends = asyncio.get_running_loop(), Riding(), defaultdict[Any, list[Outcome]](list)

        def report(place: Any, result: BatchResult) -> None:
            loop.call_soon_threadsafe(ends[place].extend, result.outcomes)

        instance = DecoupledInstance(cast(Any, backend), SIGNATURE, report, loop)
        await story(instance, backend, ends)
        for place in instance.places:
            assert not backend.closed.is_set()
            place.close()
        await asyncio.to_thread(instance.join, 30.0)
        assert backend.closed.is_set()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_each_place_is_taken_and_left_apart_from_the_others() -> None:
    async def story(instance: DecoupledInstance, _: Riding, ends: dict[Any, list[Outcome]]) -> None:
        first, second, third = instance.places
        endless = asks(10**9)
        first.run([endless])
        for count in (1, 0, 3):
            second.run([asks(count)])
            await until(lambda: ends[second])
            assert [outcome.error for outcome in ends.pop(second)] == [None]
        third.run([asks(2), asks(0)])  # two that came as one batch end as one
        await until(lambda: len(ends[third]) >= 2)
        assert not ends[first]
        endless.own_extras().parts = None  # it was told something else, as when its model is unloaded
        await until(lambda: ends[first])

    ridden(story)


def test_what_ends_all_is_told_each_once() -> None:
    async def story(instance: DecoupledInstance, backend: Riding, ends: dict[Any, list[Outcome]]) -> None:
        for place in instance.places:
            place.run([asks(10**9)])
        works = [work for place in instance.places for work in place._works]
        await until(lambda: all(work.extras.parts.heard for work in works))  # type: ignore[union-attr]
        backend.fails = ModelError("it died")
        await until(lambda: len(ends) >= 3)
        assert [[outcome.error for outcome in one] for one in ends.values()] == [[backend.fails]] * 3
        ends.clear()
        backend.fails = None
        instance.places[1].run([asks(1)])
        await until(lambda: ends)
        assert [outcome.error for outcome in ends[instance.places[1]]] == [None]

    ridden(story)
