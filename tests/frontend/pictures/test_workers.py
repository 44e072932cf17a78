"""Threads for pictures: order, bounds, refusals before work, and an end that tells everybody."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from carpool.config.usable_cores import threads_for
from carpool.errors import CarpoolError
from carpool.frontend.pictures.workers import PictureDecoding, Workers
from frontend.picture_models import begin
from waiting import PATIENCE_S
from waiting import until_in_loop as until


def test_results_and_errors_come_back_in_the_loop() -> None:
    async def main() -> None:
        workers = Workers(2)
        loop_thread = threading.get_ident()
        seen: list[Any] = []

        def then(result: Any, error: BaseException | None) -> None:
            seen.append((result, error, threading.get_ident() == loop_thread))

        def broken() -> None:
            raise CarpoolError("no")

        begin(workers, lambda: 7, then)
        await until(lambda: len(seen) == 1)
        workers.finish(broken, then)
        await until(lambda: len(seen) == 2)
        assert seen[0] == (7, None, True)
        assert isinstance(seen[1][1], CarpoolError)
        assert seen[1][2]
        workers.close()

    asyncio.run(main())


def test_clients_get_equal_parts_of_the_threads_whatever_their_deadlines() -> None:
    async def main() -> None:
        workers, go, order = Workers(1), threading.Event(), list[str]()
        begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: None, client="large")

        def decoded(name: str) -> None:
            order.append(name)
            if name == "large":
                time.sleep(0.06)  # more than what counts as even

        for _ in range(12):
            begin(workers, partial(decoded, "large"), lambda *_: None, 1.0, 49e6, "large")
        begin(workers, partial(decoded, "small"), lambda *_: None, 9.0, 1e6, "small")
        go.set()
        await until(lambda: len(order) == 13)
        assert order.index("small") <= 2
        workers.close()

    asyncio.run(main())


def test_a_forecast_leaves_out_what_other_clients_do_later() -> None:
    async def main() -> None:
        workers, go = Workers(1), threading.Event()
        done: list[float] = []
        begin(workers, lambda: time.sleep(0.01), lambda *_: done.append(0.0), weight=1e6)
        await until(lambda: len(done) == 1)
        begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: None, client="large", weight=1.0)
        await until(lambda: not workers.waiting)
        for _ in range(12):
            begin(workers, int, lambda *_: None, weight=49e6, client="large")
        small, large = (workers.foresee(1e6, 0.0, client) for client in ("small", "large"))
        assert small < large / 10
        assert workers.refuses("m", large / 2, 0.0, 1e6, client="small") is None
        assert workers.refuses("m", large / 2, 0.0, 1e6, client="large") is not None
        go.set()
        workers.close()

    asyncio.run(main())


def test_only_so_many_pixels_are_decoded_at_a_time() -> None:
    async def main() -> None:
        workers, go, begun = Workers(8), threading.Event(), list[float]()

        def decode(weight: float) -> None:
            begun.append(weight)
            go.wait(PATIENCE_S)

        for number, weight in enumerate((49e6, 49e6, 49e6, 10e6)):
            begin(workers, partial(decode, weight), lambda *_: None, number, weight, f"client {number}")
        await until(lambda: len(begun) == 2)
        assert sorted(begun) == [10e6, 49e6], "two large ones do not fit, and what is small passes them"
        for number in range(2):
            begin(workers, partial(decode, 20e6), lambda *_: None, 9.0, 20e6, f"other {number}")
        begin(workers, partial(decode, 1e6), lambda *_: None, 99.0, 1e6, "last")
        await until(lambda: len(begun) == 3)
        assert begun[-1] == 1e6
        go.set()
        await until(lambda: len(begun) == 7)
        workers.close()

    asyncio.run(main())


def test_pictures_that_take_long_leave_a_thread_to_the_others() -> None:
    async def main(threads: int) -> None:
        workers, go, begun = Workers(threads), threading.Event(), list[str]()

        def decode(name: str) -> None:
            begun.append(name)
            if name == "long":
                go.wait(PATIENCE_S)

        workers.foresee(5e6, time.monotonic(), "client 0")  # two clients: what takes less counts as long
        workers.foresee(5e6, time.monotonic(), "client 1")
        for number in range(4):
            weight = 49e6 if number < 2 else 5e6
            begin(workers, partial(decode, "long"), lambda *_: None, 1.0, weight, f"client {number}")
        await until(lambda: begun == ["long"])
        begin(workers, partial(decode, "short"), lambda *_: None, 9.0, 1e6, "other")
        await until(lambda: begun == ["long", "short"])
        go.set()
        await until(lambda: len(begun) == 5)
        workers.close()

    for threads in (1, 2):
        asyncio.run(main(threads))


def test_a_client_has_a_share_of_those_that_wait() -> None:
    async def main() -> None:
        workers, go = Workers(1, most_waiting=16), threading.Event()
        begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: None)
        await until(lambda: workers.waiting == 0)
        while workers.refuses("m", float("inf"), 1.0, client="greedy") is None:
            begin(workers, lambda: None, lambda *_: None, client="greedy")
        assert workers.waiting == 12
        assert workers.refuses("m", float("inf"), 1.0, client="other") is None
        go.set()
        workers.close()

    asyncio.run(main())


def test_what_finishes_goes_before_what_begins() -> None:
    async def main() -> None:
        workers, go, order = Workers(1), threading.Event(), list[str]()
        begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: None)
        for name in ("begin 1", "begin 2"):
            begin(workers, lambda name=name: order.append(name), lambda *_: None)
        workers.finish(lambda: order.append("finish"), lambda *_: None)
        go.set()
        await until(lambda: len(order) == 3)
        assert order == ["finish", "begin 1", "begin 2"]
        workers.close()

    asyncio.run(main())


def test_a_full_queue_and_a_turn_that_comes_too_late_are_refused() -> None:
    async def main() -> None:
        workers, go, done = Workers(1, most_waiting=2), threading.Event(), list[int]()
        assert workers.refuses("m", 0.0, 1.0) is None  # nobody waits: who is late is told in its turn
        begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: done.append(0))
        await until(lambda: workers.waiting == 0)
        begin(workers, lambda: None, lambda *_: done.append(1))
        assert workers.refuses("m", float("inf"), 1.0) is None
        late = workers.refuses("m", 0.0, 1.0)
        assert late is not None
        assert late.reason == "cannot-finish"
        begin(workers, lambda: None, lambda *_: done.append(2))
        full = workers.refuses("m", float("inf"), 1.0)
        assert full is not None
        assert full.reason == "queue-full"
        go.set()
        await until(lambda: len(done) == 3)
        assert workers.refuses("m", float("inf"), 1.0) is None
        workers.close()

    asyncio.run(main())


def test_closing_tells_those_that_have_not_begun() -> None:
    async def main() -> None:
        workers, go, began = Workers(1), threading.Event(), threading.Event()
        errors: list[BaseException | None] = []

        def first() -> None:
            began.set()
            go.wait(PATIENCE_S)

        begin(workers, first, lambda _result, error: errors.append(error))
        assert began.wait(PATIENCE_S)
        begin(workers, lambda: None, lambda _result, error: errors.append(error))
        workers.close()
        assert len(errors) == 1
        assert isinstance(errors[0], asyncio.CancelledError)
        go.set()
        await until(lambda: len(errors) == 2)
        assert errors[1] is None

    asyncio.run(main())


@pytest.mark.parametrize("frontends", [1, 2, 1000])
def test_cores_are_shared_between_front_ends_and_none_has_nothing(frontends: int) -> None:
    assert threads_for(frontends) >= 1
    assert threads_for(frontends) <= threads_for(1)


def test_what_nobody_waits_for_is_done_last_and_is_bounded() -> None:
    async def main() -> None:
        workers, begun, go, order = Workers(1), threading.Event(), threading.Event(), list[str]()

        def hold() -> None:
            begun.set()
            go.wait(PATIENCE_S)

        begin(workers, hold, lambda *_: order.append("first"))
        assert begun.wait(PATIENCE_S)
        for number in range(10):
            workers.idle(lambda: None, lambda *_, n=number: order.append(f"idle {n}"))
        assert not workers.takes_idle
        begin(workers, lambda: None, lambda *_: order.append("begun"))
        workers.finish(lambda: None, lambda *_: order.append("finished"))
        go.set()
        await until(lambda: len(order) == 7)
        assert order[:3] == ["first", "finished", "begun"]
        assert order[3:] == [f"idle {n}" for n in range(4)]
        assert workers.takes_idle
        workers.close()
        assert not workers.idle(lambda: None, lambda *_: None)

    asyncio.run(main())


def test_a_result_that_cannot_be_delivered_keeps_no_other_from_its_own() -> None:
    async def main() -> None:
        workers, go, seen = Workers(1), threading.Event(), list[int]()

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        workers.finish(lambda: go.wait(PATIENCE_S), lambda *_: None)
        workers.finish(lambda: 1, broken)
        workers.finish(lambda: 2, lambda result, _: seen.append(result))
        workers._delivers = True  # the loop gets all three in one turn
        go.set()
        await until(lambda: len(workers._over) == 3)
        workers._deliver()
        assert seen == [2]
        begin(workers, lambda: go.wait(PATIENCE_S), broken)
        workers.close()

    asyncio.run(main())


def test_a_thread_that_cannot_be_started_leaves_nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        workers, real, seen = Workers(2), threading.Thread.start, list[int]()

        def refused(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            begin(workers, lambda: 1, lambda result, _: seen.append(result))
        assert workers.waiting == 0
        monkeypatch.setattr(threading.Thread, "start", real)
        begin(workers, lambda: 2, lambda result, _: seen.append(result))
        await until(lambda: seen == [2])
        workers.close()

    asyncio.run(main())


class CountedSlot:
    view = memoryview(bytearray(4))

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_slot_of_dropped_decoding_is_given_back_unless_a_thread_writes_to_it(begun: bool) -> None:
    async def main() -> None:
        workers, go, started = Workers(1), threading.Event(), threading.Event()
        ended: list[object] = []
        if not begun:
            begin(workers, lambda: go.wait(PATIENCE_S), lambda *_: None)
            await until(lambda: not workers.waiting)

        def decode(_memory: memoryview) -> float:
            started.set()
            go.wait(PATIENCE_S)
            return 0.1

        slot = CountedSlot()
        decoding = PictureDecoding(workers, 1.0, float("inf"), time.monotonic(), "client")
        decoding.drop()  # before it was begun there is nothing to drop
        decoding.begin(slot, decode, lambda *_: ended.append(decoding))  # type: ignore[arg-type]
        if begun:
            await until(started.is_set)
        decoding.drop()
        decoding.drop()
        assert slot.released == (not begun)
        go.set()
        if begun:
            await until(lambda: ended == [decoding])
        assert slot.released == (not begun)
        assert started.is_set() == begun
        workers.close()

    asyncio.run(main())
