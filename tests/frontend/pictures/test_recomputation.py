"""An answer that is computed again: it ends once, whatever fails on its way, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.recomputation import Aside, Recomputation, in_threads
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.observe.counters import Table, table_bytes
from frontend.fake_door import FakeDoor
from frontend.picture_models import classifier


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: object, **_named: object) -> None:
        raise error

    return function


class Again(Recomputation[str]):
    """`ends` has how it ended."""

    def __init__(self, service: PictureService, entry: ModelEntry, aside: Aside) -> None:
        super().__init__(service, entry, aside)
        self.over = asyncio.Event()
        self.ends: list[str] = []
        self.compares: Callable[[Answer], str] = lambda answer: answer.outputs[0].name
        self.bugs = 0  # so often its end fails

    def _compare(self, answer: Answer) -> str:
        return self.compares(answer)

    def _compared(self, found: str) -> None:
        if self.bugs:
            self.bugs -= 1
            raise KeyError("a bug")
        self._end(found)

    def _skipped(self, why: str) -> None:
        self._end(why)

    def _end(self, how: str) -> None:
        self.ends.append(how)
        self.over.set()


class Bench:
    def __init__(self, *, off_workers: bool) -> None:
        self.door = FakeDoor(classifier())
        row = Table(bytearray(table_bytes(1))).block(0).server
        self.service = PictureService(self.door, 1, lambda _: row)
        self.threads = ThreadPoolExecutor(1)
        aside = in_threads(self.threads) if off_workers else self.service.workers.idle
        entry = self.door.catalog.newest["namer"]
        self.head = self.service.model(entry).head
        self.again = Again(self.service, entry, aside)
        self.write: Callable[[memoryview], object] = lambda _memory: None

    async def ends(self) -> list[str]:
        try:
            self.again.prepare(self.head, self.head.tail_size, self.write)
            await asyncio.wait_for(self.again.over.wait(), 30.0)
        finally:
            self.service.close()
            self.threads.shutdown()
        assert not self.door.slots_in_use
        return self.again.ends


def no_memory(bench: Bench) -> None:
    bench.door.slots = 0


def no_idle_thread(bench: Bench) -> None:
    bench.service.workers.close()


def bad_picture(bench: Bench) -> None:
    bench.write = raises(ModelError("no picture"))


def no_way_to_the_engine(bench: Bench) -> None:
    bench.door.infer = raises(Unavailable("it is gone"))  # type: ignore[method-assign]


def model_that_fails(bench: Bench) -> None:
    bench.door.models["namer", "1"].function = raises(ModelError("it broke"))


def answers_that_cannot_be_compared(bench: Bench) -> None:
    bench.again.compares = raises(CarpoolError("no sense"))


def bug_at_the_end(bench: Bench) -> None:
    bench.again.bugs = 1


def nothing(_bench: Bench) -> None:
    """It is compared."""


@pytest.mark.parametrize("off_workers", [True, False])
@pytest.mark.parametrize(
    ("what", "end"),
    [
        (nothing, "logits"),
        (no_memory, "slots"),
        (no_idle_thread, "busy"),
        (bad_picture, "failed"),
        (no_way_to_the_engine, "slots"),
        (model_that_fails, "busy"),
        (answers_that_cannot_be_compared, "failed"),
        (bug_at_the_end, "failed"),
    ],
)
def test_it_ends_once_and_gives_its_memory_back(
    what: Callable[[Bench], None], end: str, off_workers: bool
) -> None:
    async def story() -> list[str]:
        bench = Bench(off_workers=off_workers)
        what(bench)
        return await bench.ends()

    assert asyncio.run(story()) == [end]


def test_threads_that_are_gone_skip_it() -> None:
    async def story() -> list[str]:
        bench = Bench(off_workers=True)
        bench.threads.shutdown()
        return await bench.ends()

    assert asyncio.run(story()) == ["busy"]
