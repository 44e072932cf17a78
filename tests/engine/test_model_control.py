"""The three modes at the engine's end: what is loaded at the start, after a crash, and what is answered."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.config.server import ServerSettings
from carpool.engine.control.engine_questions import ControlDesk
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.errors import ConfigError, InvalidInput, ModelError, NotFound, Unavailable
from carpool.link.catalog import LoadingStep
from carpool.observe.columns import RESTARTS
from carpool.observe.counters import Table, table_bytes
from engine.scripted import Stage, ask, model, run, scripted_stage, states, weights
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]


def desk_of(home: Path, table: Table | None = None, **given: Any) -> tuple[ControlDesk, EngineHost]:
    host = EngineHost(partial(Engine, home, table=table))
    return ControlDesk(host, ServerSettings(**given)), host


def quiet(_step: LoadingStep) -> None:
    """Nobody watches."""


def ready(host: EngineHost) -> list[tuple[str, str]]:
    return sorted(host.catalog.entries)


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, ["a", "b"]),
        ({"model_control_mode": "poll"}, ["a", "b"]),
        ({"model_control_mode": "explicit"}, []),
        ({"model_control_mode": "explicit", "load_models": ("b",)}, ["b"]),
        ({"model_control_mode": "explicit", "load_models": ("*",)}, ["a", "b"]),
    ],
)
def test_what_each_mode_starts_with(
    tmp_path: Path, stage: Stage, given: dict[str, Any], served: list[str]
) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=2.0)

    async def story() -> None:
        desk, host = desk_of(tmp_path, **given)
        await desk.open(quiet)
        assert [name for name, _ in ready(host)] == served
        assert {line.name for line in host.catalog.index} == {"a", "b"}
        await host.drain(5.0)
        assert desk._looking is None or desk._looking.cancelled() or desk._looking.cancelling()

    run(story())


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_a_model_that_fails_stops_the_start_only_where_that_is_asked_for(
    tmp_path: Path, stage: Stage, mode: str
) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=1.0)
    weights(tmp_path, "b", 1, "broken")
    given: dict[str, Any] = {"load_models": ("*",)} if mode == "explicit" else {}

    async def story() -> None:
        desk, host = desk_of(tmp_path, model_control_mode=mode, exit_on_error=True, **given)
        with pytest.raises(ModelError, match="broken weights"):
            await desk.open(quiet)
        assert ready(host) == []
        await until(lambda: stage.open == [])  # what loaded beside it is closed when it is there
        desk, host = desk_of(tmp_path, model_control_mode=mode, **given)
        await desk.open(quiet)
        assert ready(host) == [("a", "1")]
        assert "broken weights" in states(host.engine, "b")["1"]
        assert not host.catalog.ready, "that is said by whoever opened it"
        host.set_ready(True)
        assert host.catalog.ready
        await host.drain(5.0)

    run(story())


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_where_nothing_loads_nothing_is_ready(tmp_path: Path, stage: Stage, mode: str) -> None:
    model(tmp_path, "b", v1=1.0)
    weights(tmp_path, "b", 1, "broken")

    async def story() -> None:
        desk, host = desk_of(tmp_path, model_control_mode=mode)
        if mode == "none":
            with pytest.raises(ModelError, match="broken weights"):
                await desk.open(quiet)
            return
        await desk.open(quiet)
        host.set_ready(True)
        assert not host.catalog.ready
        weights(tmp_path, "b", 1, 2.0)
        await desk.look()
        assert host.catalog.ready
        await host.drain(5.0)

    run(story())


def test_without_strict_readiness_the_first_model_makes_it_ready(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)
    seen: list[tuple[bool, list[tuple[str, str]]]] = []

    async def story() -> None:
        desk, host = desk_of(tmp_path, strict_readiness="false")
        host.listen(lambda catalog: seen.append((catalog.ready, sorted(catalog.entries))))
        await desk.open(quiet)
        await host.drain(5.0)

    run(story())
    assert (False, []) in seen
    assert (True, [("a", "1")]) in seen
    assert (True, []) not in seen
    assert (False, [("a", "1")]) not in seen[: seen.index((True, [("a", "1")]))]


def test_where_all_must_serve_one_that_failed_keeps_the_server_from_being_ready(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=1.0)
    weights(tmp_path, "b", 1, "broken")

    async def story() -> None:
        desk, host = desk_of(tmp_path, strict_readiness="all", model_control_mode="poll")
        await desk.open(quiet)
        host.set_ready(True)
        assert ready(host) == [("a", "1")], "it answers whoever asks it all the same"
        assert not host.catalog.ready
        assert [line.word for line in host.catalog.index] == ["ready", "failed"]
        weights(tmp_path, "b", 1, 2.0)
        await desk.look()
        assert host.catalog.ready
        weights(tmp_path, "b", 1, "broken")
        await desk.look()
        assert host.catalog.ready, "who serves keeps what is good"
        await host.drain(5.0)

    run(story())


def test_an_engine_that_was_started_again_is_ready_with_what_it_has(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=1.0)
    weights(tmp_path, "b", 1, "broken")
    table = Table(bytearray(table_bytes(2)))
    table.block(0).server.add(RESTARTS["engine"])

    async def story() -> None:
        desk, host = desk_of(tmp_path, table, strict_readiness="all")
        await desk.open(quiet)
        host.set_ready(True)
        assert host.catalog.ready
        await host.drain(5.0)

    run(story())


def test_a_model_to_start_with_must_exist(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "detector", v1=1.0)

    async def story() -> None:
        desk, _ = desk_of(tmp_path, model_control_mode="explicit", load_models=("detectr",))
        with pytest.raises(ConfigError, match='did you mean "detector"'):
            await desk.open(quiet)

    run(story())


def test_an_engine_that_comes_back_has_what_the_last_one_had(tmp_path: Path, stage: Stage) -> None:
    for number, name in enumerate(("a", "b", "c", "d")):
        model(tmp_path, name, v1=number)
    table = Table(bytearray(table_bytes(2)))
    given = {"model_control_mode": "explicit", "load_models": ("a", "b")}

    async def before() -> EngineHost:
        desk, host = desk_of(tmp_path, table, **given)
        await desk.open(quiet)
        await host.ask("load", {"model": "c"})
        await host.ask("load", {"model": "d"})
        await host.ask("unload", {"model": "a"})
        await until(lambda: not host.engine.fleet.leaving)
        return host

    async def after() -> None:
        table.block(1).server.add(RESTARTS["engine"])
        weights(tmp_path, "d", 1, "broken")
        desk, host = desk_of(tmp_path, table, **given)
        await desk.open(quiet)
        assert ready(host) == [("b", "1"), ("c", "1")]
        assert "broken" in states(host.engine, "d")["1"]
        assert sorted(table.directory.live().values()) == [("b", "1"), ("c", "1")]
        assert await ask(host.engine, "c") == 2.0
        await host.drain(5.0)

    async def both() -> None:
        dead = await before()  # it says no word to who comes after
        await after()
        await dead.drain(5.0)  # here a process would end, and its threads with it

    run(both())


def test_a_restart_is_patient_where_models_can_be_mended(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=1.0)
    weights(tmp_path, "b", 1, "broken")
    table = Table(bytearray(table_bytes(2)))
    table.block(1).server.add(RESTARTS["engine"])

    async def story() -> None:
        desk, host = desk_of(tmp_path, table, model_control_mode="poll")
        await desk.open(quiet)
        assert ready(host) == [("a", "1")]
        weights(tmp_path, "b", 1, 2.0)
        await desk.look()
        assert ready(host) == [("a", "1"), ("b", "1")]
        await host.drain(5.0)
        weights(tmp_path, "b", 1, "broken")
        desk, host = desk_of(tmp_path, table, exit_on_error=True)
        with pytest.raises(ModelError):
            await desk.open(quiet)

    run(story())


def test_questions_are_answered_when_it_is_done(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        desk, host = desk_of(tmp_path, model_control_mode="explicit")
        await desk.open(quiet)
        stage.hold_loads()
        loading = asyncio.ensure_future(host.ask("load", {"model": "m"}))
        await until(lambda: stage.waiting)
        assert not loading.done()
        assert states(host.engine) == {"1": "LOADING"}
        stage.loading.set()
        assert await loading == {}
        assert ready(host) == [("m", "1")]
        for question, error in [
            ({"model": "x"}, NotFound),
            ({"model": "m", "config": 3}, InvalidInput),
            ({"model": "m", "files": {"1/a": None}}, InvalidInput),
        ]:
            with pytest.raises(error):
                await host.ask("load", question)
        assert await host.ask("unload", {"model": "m", "dependents": True}) == {}
        assert ready(host) == []
        await host.drain(5.0)
        with pytest.raises(Unavailable, match="stopping"):
            await host.ask("load", {"model": "m"})

    run(story())


def test_a_folder_that_cannot_be_read_is_told_of_once(
    tmp_path: Path, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "models"
    model(home, v1=1.0)

    async def story() -> None:
        desk, host = desk_of(home, model_control_mode="poll")
        await desk.open(quiet)
        home.rename(tmp_path / "away")
        for _ in range(3):
            await desk.look()
        assert caplog.text.count("repository-not-read") == 1
        assert await ask(host.engine) == 1.0
        (tmp_path / "away").rename(home)
        weights(home, "m", 1, 2.0)
        await desk.look()
        assert await ask(host.engine) == 2.0
        await host.drain(5.0)

    run(story())
