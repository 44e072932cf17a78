"""A real engine behind real links, while its models change: nobody is sent away who could not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.errors import NotFound, Unavailable
from carpool.link.records import SEEN, to_engine
from engine.scripted import Stage, model, scripted_stage, settings, weights
from link.joined import MAX_ANSWER, Client, Joined, run
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]

ZERO = np.zeros((1, 1), np.float32)
RIDES = np.ones((1, 1), np.float32)


@asynccontextmanager
async def served(home: Path) -> AsyncIterator[tuple[Joined, EngineHost]]:
    host = EngineHost(partial(Engine, home))
    await host.engine.start()
    host.set_ready(True)
    side = EngineSide(host, max_answer_bytes=MAX_ANSWER)
    together = Joined(host, side, [])  # type: ignore[arg-type]
    try:
        yield together, host
    finally:
        side.close()
        for client in together.clients:
            client.door.close()
        await until(lambda: not side.links)
        await host.engine.stop()


async def value(client: Client, entry: object = "m") -> float:
    asked = client.infer(entry, ZERO)  # type: ignore[arg-type]
    await until(lambda: asked.answers)
    ((answer,),) = await asked.output()
    return float(answer)


async def error(client: Client, entry: object) -> BaseException | None:
    asked = client.infer(entry, ZERO)  # type: ignore[arg-type]
    await until(lambda: asked.answers)
    return asked.answers[0].error


def test_a_door_that_has_not_heard_of_it_is_served_by_the_old_one(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            client = await link.door()
            deaf, _ = await link.raw()
            with deaf:
                old = client.model("m")
                assert await value(client) == 1.0
                weights(tmp_path, "m", 1, 2.0)
                await host.engine.load("m")
                assert [entry.key for entry in host.catalog.leaving] == [old.key]
                await until(lambda: client.door.catalog.number == host.catalog.number)
                assert client.door.catalog.leaving == [old]
                assert await value(client) == 2.0
                assert await value(client, old) == 1.0  # as if the word had not reached it yet
                another = np.zeros((2, 1), np.float32)  # a template that the engine has not seen
                asked = client.infer(old, another)
                await until(lambda: asked.answers)
                assert await asked.output() == [[1.0], [1.0]]
                assert stage.open == [1.0, 2.0]
                deaf.send(to_engine(SEEN, host.catalog.number))
                await until(lambda: stage.open == [2.0])
                await until(lambda: not host.catalog.leaving)
                await until(lambda: not client.door.catalog.leaving)
                assert await value(client, old) == 2.0  # what serves in its place takes it

    run(main())


def test_riders_over_a_link_hold_the_old_one(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            client = await link.door()
            rider = client.infer("m", RIDES)
            driver = host.engine.find("m").runtime.driver
            await until(lambda: not driver.idle)
            weights(tmp_path, "m", 1, 2.0)
            await host.engine.load("m")
            await until(lambda: client.door.catalog.number == host.catalog.number)
            assert await value(client) == 2.0
            assert stage.open == [1.0, 2.0]
            stage.riding.set()
            await until(lambda: rider.answers)
            assert await rider.output() == [[1.0]]
            await until(lambda: stage.open == [2.0])

    run(main())


def test_a_version_that_was_dropped_is_not_found(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, v2=2.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            client = await link.door()
            first = client.door.catalog.entries["m", "1"]
            second = client.model("m")
            assert await value(client, first) == 1.0
            settings(tmp_path, policy="[2]")
            await host.engine.load("m")
            await until(lambda: not host.catalog.leaving)
            await until(lambda: client.door.catalog.number == host.catalog.number)
            assert stage.open == [2.0]
            assert isinstance(await error(client, first), NotFound)
            assert client.door.catalog.entries.keys() == {("m", "2")}
            kept = client.model("m")
            assert kept.key == second.key
            assert kept.published.config["version_policy"] == {"specific": {"versions": [2]}}
            assert await value(client, second) == 2.0

    run(main())


def test_a_successor_that_takes_other_requests_is_no_stand_in(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            client = await link.door()
            old = client.model("m")
            settings(tmp_path, head="execution_timeout_ms = 1000")
            text = (tmp_path / "m" / "model.toml").read_text()
            (tmp_path / "m" / "model.toml").write_text(text.replace("shape = [1]", "shape = [2]", 1))
            await host.engine.load("m")
            await until(lambda: not host.catalog.leaving)
            await until(lambda: client.door.catalog.number == host.catalog.number)
            found = await error(client, old)
            assert isinstance(found, Unavailable)
            assert found.reason == "model-replaced"

    run(main())


def test_a_door_that_is_stuck_does_not_keep_memory_for_ever(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.fleet.fleet._SEEN_WITHIN_S", 0.01)
    model(tmp_path, v1=1.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            deaf, _ = await link.raw()
            with deaf:
                weights(tmp_path, "m", 1, 2.0)
                await host.engine.load("m")
                await until(lambda: stage.open == [2.0])

    run(main())


def test_the_index_follows(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    model(tmp_path, "n", v1=3.0)

    async def main() -> None:
        async with served(tmp_path) as (link, host):
            client = await link.door()
            stage.hold_loads()
            weights(tmp_path, "m", 2, 2.0)
            loading = asyncio.ensure_future(host.engine.load("m"))
            await until(lambda: stage.waiting)

            def index() -> list[tuple[str, str, str]]:
                return [(line.name, line.version, line.state) for line in client.door.catalog.index]

            await until(lambda: ("m", "2", "LOADING") in index())
            assert index() == [("m", "1", "READY"), ("m", "2", "LOADING"), ("n", "1", "READY")]
            stage.loading.set()
            await loading
            await until(lambda: ("m", "2", "READY") in index())
            await host.engine.unload("n")
            await until(lambda: client.door.catalog.index[-1].reason == "unloaded")
            assert "n" not in client.door.catalog.newest

    run(main())
