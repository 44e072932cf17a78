"""Work that nobody waits for, from a front end's door to the model and back, over a real link."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from carpool import Engine
from carpool.backends.fake import FakeBackend
from carpool.core.job import Reason
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.engine.models.served import Served
from carpool.errors import CarpoolError
from carpool.frontend import front_link
from carpool.frontend.link_client import LinkClient
from carpool.link import records
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import BACKGROUND, Ask, Handling
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.observe import columns
from heard import Heard
from link.joined import MAX_ANSWER, Asked, Client, packed, run
from waiting import until_in_loop as until

MODEL = """
versions = "all"
slo_ms = {slo_ms}
max_batch = 8
[fake]
curve = "1+0.1"
{device}
[[input]]
name = "x"
datatype = "FP32"
shape = [1]
[[output]]
name = "y"
datatype = "FP32"
shape = [1]
"""
ONE = np.zeros((1, 1), np.float32)


def two_versions(folder: Path, device: str = "", slo_ms: int = 2000) -> Path:
    for version in ("1", "2"):
        (folder / "m" / version).mkdir(parents=True)
    named = f'device = "{device}"' if device else ""
    (folder / "m" / "model.toml").write_text(MODEL.format(slo_ms=slo_ms, device=named))
    return folder


class Served2:
    """An engine with both versions, and one front end's door."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self.engine = engine
        self.client = client

    def entry(self, version: int) -> ModelEntry:
        return self.client.door.catalog.entries["m", str(version)]

    def served(self, version: int) -> Served:
        return self.engine.served[self.entry(version).key]

    def background(self, version: int) -> Asked:
        entry = self.entry(version)
        body, head, tail = packed(entry, ONE)
        slot = self.client.door.slot(len(body))
        slot.view[:] = body
        heard = Heard()
        ask = Ask(entry, head, slot, tail, asyncio.get_running_loop().time(), handling=BACKGROUND)
        return Asked(self.client.door.infer(ask, heard), heard.answers)

    def counted(self, version: int, column: columns.Column) -> float:
        return float(self.engine.table.cells(self.served(version).counters.slot)[column])


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served2]:
    host = EngineHost(partial(Engine, folder))
    async with host.engine as engine:
        host.set_ready(True)
        side = EngineSide(host, max_answer_bytes=MAX_ANSWER)
        arena = create_memory("test-arena", 8 << 20)
        door = LinkClient(Arena(map_memory(arena)), max_answer_bytes=MAX_ANSWER)
        ours, theirs = socket.socketpair()
        await door.attach(theirs)
        await side.attach(7, ours, os.dup(arena))
        try:
            await until(lambda: door.serving)
            yield Served2(engine, Client(door, arena))
        finally:
            side.close()
            door.close()
            os.close(arena)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No fake model answers before this is set."""
    go, answer = threading.Event(), FakeBackend._answer

    def waits(self: FakeBackend, *given: object) -> object:
        assert go.wait(60)
        return answer(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeBackend, "_answer", waits)
    yield go
    go.set()


@pytest.mark.parametrize("device", ["", "gpu0"])
@pytest.mark.parametrize("version", [1, 2])
def test_it_is_answered_and_is_in_no_figure_of_the_model(tmp_path: Path, device: str, version: int) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path, device)) as both:
            assert await both.background(version).output() == [[0.0]]
            await until(lambda: both.counted(version, columns.BACKGROUND["ran"]) == 1)
            scheduler = both.served(version).scheduler
            assert scheduler.ledger.offered == scheduler.ledger.answered == 0
            assert scheduler.rate(asyncio.get_running_loop().time()) == 0.0
            assert both.counted(version, columns.BATCH_SIZE.sum) == 0
            assert both.counted(version, columns.INFER_SECONDS.sum) == 0
            assert not both.served(version).counters.recent.sizes(asyncio.get_running_loop().time())

    run(main())


@pytest.mark.parametrize("device", ["", "gpu0"])
def test_production_waits_for_a_batch_of_it_but_spare_work_for_production(
    tmp_path: Path, device: str, held: threading.Event
) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path, device)) as both:
            background = both.background(2)
            candidate = both.served(2).scheduler
            await until(lambda: candidate.instances[0].batch is not None)
            asked = both.client.infer(both.entry(1), ONE)
            stable = both.served(1).scheduler
            await until(lambda: stable.lanes.ready)
            await asyncio.sleep(0)
            assert stable.instances[0].batch is None
            held.set()
            assert await background.output() == await asked.output() == [[0.0]]
            held.clear()
            asked = both.client.infer(both.entry(1), ONE)
            await until(lambda: stable.instances[0].batch is not None)
            waiting = both.background(2)
            await until(lambda: candidate.background is not None and candidate.background.everybody())
            waiting.call.cancel()
            await until(lambda: candidate.background is not None and not candidate.background.everybody())
            held.set()
            assert await asked.output() == [[0.0]]
            assert waiting.answers == []

    run(main())


def test_versions_on_processors_take_turns_only_once_there_is_spare_work(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path)) as both:
            schedulers = [both.served(version).scheduler for version in (1, 2)]
            assert await both.client.infer(both.entry(1), ONE).output() == [[0.0]]
            assert [scheduler.instances[0].turn for scheduler in schedulers] == [None, None]
            await both.background(2).output()
            assert all(scheduler.instances[0].turn is not None for scheduler in schedulers)
            assert await both.client.infer(both.entry(1), ONE).output() == [[0.0]]

    run(main())


def test_without_slack_it_is_skipped_and_the_engine_is_not_asked_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_link, "_IN_VAIN_S", 3600.0)  # however long the machine stands still

    async def main() -> None:
        async with serving(two_versions(tmp_path, slo_ms=20)) as both:
            both.served(1).runtime.refused_elsewhere(1000, Reason.OVERLOAD, "")
            answer = await both.background(2).answer()
            assert isinstance(answer.error, CarpoolError)
            assert answer.error.reason == "background"
            await until(lambda: both.counted(2, columns.BACKGROUND["skipped"]) == 1)
            again = await both.background(2).answer()
            assert again.error is not None
            assert again.error.reason == "background"
            assert again.sent == 0.0  # it never left the front end
            assert both.counted(2, columns.BACKGROUND["skipped"]) == 1
            scheduler = both.served(2).scheduler
            assert not scheduler.ledger.refused
            assert not scheduler.ledger.given_up

    run(main())


def test_it_holds_no_more_than_a_part_of_the_memory(tmp_path: Path, held: threading.Event) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path)) as both:
            first = both.background(2)
            door = both.client.door
            entry = both.entry(2)
            _, head, tail = packed(entry, ONE)
            heard = Heard()
            answers = heard.answers
            slot = door.slot(door.arena.size // 16)
            door.infer(Ask(entry, head, slot, tail, 0.0, handling=BACKGROUND), heard)
            await until(lambda: answers)
            assert answers[0].error is not None
            assert answers[0].error.reason == "background"
            held.set()
            assert await first.output() == [[0.0]]
            assert await both.background(2).output() == [[0.0]]

    run(main())


def test_who_waits_for_slack_is_told_when_the_model_goes(tmp_path: Path, held: threading.Event) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path)) as both:
            asked = both.client.infer(both.entry(2), ONE)
            scheduler = both.served(2).scheduler
            await until(lambda: scheduler.instances[0].batch is not None)
            background = both.background(2)
            await until(lambda: scheduler.background is not None and scheduler.background.everybody())
            driver = both.served(2).runtime.driver
            driver.close()
            answer = await background.answer()
            assert answer.error is not None
            assert answer.error.reason == "unloading"
            held.set()
            await asked.answer()

    run(main())


def test_it_cannot_come_before_its_inputs(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(two_versions(tmp_path)) as both:
            entry = both.entry(1)
            body, head, tail = packed(entry, ONE)
            slot = both.client.door.slot(len(body))
            slot.view[:] = body
            heard = Heard()
            both.client.door.infer(
                Ask(entry, head, slot, tail, 0.0, handling=Handling(0.1, background=True)), heard
            )
            await until(lambda: heard.answers)  # the engine gave up the link
            slot.release()

    run(main())
    assert records.BACKGROUND & records.COMING == 0
