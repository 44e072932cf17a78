"""The engine through its public face: what models do right, and everything they can do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import carpool
from carpool.config.model import Mode
from carpool.core.job import Reason
from carpool.engine.engine import Engine
from carpool.engine.models.served import VersionState
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import (
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Replaced,
    Unavailable,
)
from engine import repositories, scripted
from engine.scripted import Stage, scripted_stage
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]
T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


def row(*values: float) -> np.ndarray[Any, Any]:
    return np.array([values], np.float32)


def test_answers_with_and_without_the_batch_dimension(tmp_path: Path) -> None:
    repositories.python(tmp_path, "def predict(x): return x * 2")

    async def story() -> None:
        async with carpool.Engine(tmp_path) as engine:
            assert (await engine.infer("model", {"x": row(1, 2)}))["y"].tolist() == [[2, 4]]
            assert (await engine.infer("model", np.float32([3, 4])))["y"].tolist() == [6, 8]
            assert engine.find("model").config.mode is Mode.EAGER

    run(story())


def test_requests_that_come_together_ride_together(tmp_path: Path) -> None:
    repositories.python(tmp_path, "import numpy\ndef predict(x): return x * 0 + len(x)")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.infer("model", row(0, 0))
            answers = await asyncio.gather(*(engine.infer("model", row(n, n)) for n in range(8)))
            assert {answer["y"][0, 0] for answer in answers} == {8.0}

    run(story())


def test_every_rider_gets_its_own_rows(tmp_path: Path) -> None:
    repositories.python(tmp_path, "def predict(x): return x + 1")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            batches = [np.full((n % 3 + 1, 2), n, np.float32) for n in range(40)]
            answers = await asyncio.gather(*(engine.infer("model", batch) for batch in batches))
            for batch, answer in zip(batches, answers, strict=True):
                assert (answer["y"] == batch + 1).all()

    run(story())


def test_one_poisoned_input_costs_one_error(tmp_path: Path) -> None:
    repositories.python(
        tmp_path, "def predict(x):\n    if (x == 13).any(): raise ValueError('unlucky')\n    return x"
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            values = [1, 2, 13, 4, 5, 6, 7, 8]
            calls = (engine.infer("model", row(value, 0)) for value in values)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for value, answer in zip(values, answers, strict=True):
                if value == 13:
                    assert isinstance(answer, ModelError)
                    assert "unlucky" in answer.message
                else:
                    assert not isinstance(answer, BaseException)
                    assert answer["y"][0, 0] == value

    run(story())


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import numpy\ndef predict(x): return numpy.zeros((len(x), 3), 'float32')", "shape"),
        ("import numpy\ndef predict(x): return {'y': numpy.zeros((len(x), 2), 'int64')}", "int64"),
        ("def predict(x): return {'z': x}", "no output 'y'"),
    ],
)
def test_an_answer_that_is_not_what_was_declared_names_the_output(
    tmp_path: Path, code: str, says: str
) -> None:
    repositories.python(tmp_path, code)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(ModelError, match=says) as caught:
                await engine.infer("model", row(1, 2))
            assert "y" in caught.value.message

    run(story())


def test_a_model_that_hangs_is_replaced_and_its_riders_are_told(tmp_path: Path) -> None:
    repositories.python(
        tmp_path,
        "import threading\ndef predict(x):\n    if x[0, 0] == 13: threading.Event().wait()\n    return x",
        head="execution_timeout_ms = 4000",
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(DeadlineExceeded, match="4000 ms") as caught:
                await engine.infer("model", row(13, 0))
            assert caught.value.reason == "execution-timeout"
            assert (await engine.infer("model", row(1, 2)))["y"].tolist() == [[1, 2]]

    run(story())


def test_a_model_that_dies_is_restarted(tmp_path: Path) -> None:
    repositories.python(
        tmp_path, "import os\ndef predict(x):\n    if x[0, 0] == 13: os._exit(3)\n    return x"
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(ModelError, match="died"):
                await engine.infer("model", row(13, 0))
            assert (await engine.infer("model", row(1, 2)))["y"].tolist() == [[1, 2]]

    run(story())


def test_when_it_cannot_be_restarted_nobody_waits_for_ever(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    repositories.python(
        tmp_path,
        f"""
        import os, pathlib
        if pathlib.Path({str(flag)!r}).exists(): raise RuntimeError('still broken')
        def predict(x):
            if x[0, 0] == 13: os._exit(3)
            return x
        """,
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            flag.touch()
            with pytest.raises(ModelError):
                await engine.infer("model", row(13, 0))
            with pytest.raises(Unavailable, match="restarted"):
                await engine.infer("model", row(1, 2))
            flag.unlink()
            await until(lambda: any(i.available for i in engine.find("model").scheduler.instances))
            assert (await engine.infer("model", row(1, 2)))["y"].tolist() == [[1, 2]]

    run(story())


@pytest.mark.parametrize("promised", [True, False], ids=["promise", "no promise"])
def test_who_comes_between_a_death_and_the_restart(tmp_path: Path, stage: Stage, promised: bool) -> None:
    """Under a promise they are told at once, and so are those who wait; others may wait."""
    scripted.model(tmp_path, v1=5.0)
    scripted.settings(tmp_path, head="slo_ms = 20000" if promised else "")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            scheduler = engine.find("m").scheduler
            stage.hold_loads()
            stage.dying.clear()
            killer = asyncio.ensure_future(scripted.ask(engine, "m", x=13.0))
            await until(lambda: scheduler.ledger.running)
            waiting = asyncio.ensure_future(scripted.ask(engine, "m"))
            await until(lambda: scheduler.lanes.requests)
            stage.dying.set()
            with pytest.raises(ModelError, match="died"):
                await killer
            newcomer = asyncio.ensure_future(scripted.ask(engine, "m"))
            await until(lambda: stage.waiting)
            if promised:
                for told in (waiting, newcomer):
                    with pytest.raises(Unavailable, match="is down and is being restarted") as caught:
                        await told
                    assert caught.value.reason == "restarting"
                assert engine.find("m").runtime.driver.idle
            else:
                assert not waiting.done()
                assert not newcomer.done()
            stage.loading.set()
            if not promised:
                assert await asyncio.gather(waiting, newcomer) == [5.0, 5.0]
            await until(lambda: scheduler.instances[0].available)
            assert await scripted.ask(engine, "m") == 5.0

    run(story())


def test_a_promise_with_another_instance_goes_on(tmp_path: Path, stage: Stage) -> None:
    scripted.model(tmp_path, v1=5.0)
    scripted.settings(tmp_path, head="slo_ms = 20000\ninstances = 2")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            stage.hold_loads()
            with pytest.raises(ModelError, match="died"):
                await scripted.ask(engine, "m", x=13.0)
            await until(lambda: stage.waiting)
            assert await scripted.ask(engine, "m") == 5.0
            stage.loading.set()

    run(story())


def test_an_instance_that_is_replaced_opens_no_door_that_unloading_closed(
    tmp_path: Path, stage: Stage
) -> None:
    scripted.model(tmp_path, v1=5.0)
    scripted.settings(tmp_path, head="instances = 2")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            served = engine.find("m")
            rider = asyncio.ensure_future(scripted.ask(engine, "m", x=1.0))
            await until(lambda: not served.runtime.driver.idle)
            with pytest.raises(ModelError, match="died"):
                await scripted.ask(engine, "m", x=13.0)
            unloading = asyncio.ensure_future(served.unload(30.0))
            await until(lambda: all(i.available for i in served.scheduler.instances))
            told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            served.runtime.driver.submit([Work({"x": row(0)}, lambda _, outcome: told.set_result(outcome))])
            error = (await told).error
            assert isinstance(error, Unavailable)
            assert error.reason == "unloading"
            stage.riding.set()
            assert await rider == 5.0
            await unloading

    run(story())


def test_a_promise_refuses_what_cannot_finish(tmp_path: Path) -> None:
    repositories.fake(tmp_path, curve="400+20", head="slo_ms = 1300")  # 560 ms for eight, twice that in time

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            x = np.zeros((8, 4), np.float32)
            calls = [engine.infer("fake", x, deadline_ms=300), *(engine.infer("fake", x) for _ in range(30))]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, Refused)]
            assert isinstance(answers[0], Refused)
            assert answers[0].reason == "cannot-finish"
            assert "later than the deadline of 300 ms" in answers[0].message
            assert answers[0].predicted_ms is not None
            assert any(isinstance(answer, dict) for answer in answers)
            assert len(refusals) > 10

    run(story())


def test_a_promise_that_the_device_cannot_keep_is_refused_at_load(tmp_path: Path) -> None:
    repositories.fake(tmp_path, curve="20+1", head="slo_ms = 15")
    with pytest.raises(ConfigError, match=r"use at least 46\.2 ms"):
        run(Engine(tmp_path).start())


def test_slo_ms_overrides_fixed(tmp_path: Path) -> None:
    repositories.fake(tmp_path, head="")

    async def story() -> None:
        async with Engine(tmp_path, slo_ms=123) as engine:
            assert engine.find("fake").config.mode is Mode.PROMISE

    run(story())


def test_a_caller_that_is_cancelled_leaves_the_queue(tmp_path: Path, stage: Stage) -> None:
    scripted.model(tmp_path, v1=5.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            scheduler = engine.find("m").scheduler
            running = asyncio.create_task(scripted.ask(engine, x=1.0))
            await until(lambda: scheduler.ledger.running == 1)
            waiting = asyncio.create_task(scripted.ask(engine))
            await until(lambda: scheduler.lanes.requests == 1)
            waiting.cancel()
            await until(lambda: scheduler.lanes.requests == 0)
            stage.riding.set()
            assert await running == 5.0

    run(story())


def test_stopping_finishes_what_was_accepted(tmp_path: Path, stage: Stage) -> None:
    scripted.model(tmp_path, v1=5.0)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start()
        served = engine.find("m")
        calls = [asyncio.create_task(scripted.ask(engine, x=1.0))]
        await until(lambda: served.scheduler.ledger.running == 1)
        calls += [asyncio.create_task(scripted.ask(engine)) for _ in range(2)]
        await until(lambda: served.scheduler.lanes.requests == 2)
        stopping = asyncio.create_task(engine.stop())
        await until(lambda: served.state is not VersionState.READY)
        with pytest.raises(CarpoolError):
            await scripted.ask(engine)
        stage.riding.set()
        assert await asyncio.gather(*calls) == [5.0] * 3
        await stopping
        with pytest.raises(NotFound):
            engine.find("m")

    run(story())


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"z": row(1, 2)}, "no input 'z'"),
    ({}, "needs the input 'x'"),
    ({"x": np.zeros((1, 2))}, "must be FP32, not float64"),
    ({"x": np.zeros((1, 3), np.float32)}, "must have the shape"),
    ({"x": np.zeros((9, 2), np.float32)}, "1 to 8 images"),
    ({"x": np.zeros((0, 2), np.float32)}, "1 to 8 images"),
]


def test_bad_input_names_the_field(tmp_path: Path) -> None:
    repositories.python(tmp_path, "def predict(x): return x")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            for inputs, says in BAD_INPUTS:
                with pytest.raises(InvalidInput, match=says):
                    await engine.infer("model", inputs)
            with pytest.raises(InvalidInput, match="no output 'z'"):
                await engine.infer("model", row(1, 2), outputs=["z"])

    run(story())


def test_unknown_models_are_named_with_those_there_are(tmp_path: Path) -> None:
    repositories.fake(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(NotFound, match="there are fake"):
                await engine.infer("nobody", row(1))

    run(story())


def test_counters_and_statistics_follow(tmp_path: Path) -> None:
    repositories.python(tmp_path, "def predict(x): return x")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            for _ in range(3):
                await engine.infer("model", np.zeros((2, 2), np.float32))
            served = engine.find("model")
            sizes = [entry["batch_size"] for entry in served.counters.batches.document()]
            assert sizes == [2]
            text = carpool_metrics(engine)
            assert 'nv_inference_exec_count{model="model",version="1"} 3' in text
            assert 'nv_inference_count{model="model",version="1"} 6' in text

    run(story())


def carpool_metrics(engine: Engine) -> str:
    from carpool.observe.prometheus import Exposition

    return Exposition(engine.table, version="test").page().decode()


def test_a_newer_frame_of_a_source_replaces_the_one_that_waits(tmp_path: Path, stage: Stage) -> None:
    scripted.model(tmp_path, v1=5.0)
    scripted.settings(tmp_path, head="slo_ms = 30000")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            scheduler = engine.find("m").scheduler
            running = asyncio.ensure_future(scripted.ask(engine, x=1.0))
            await until(lambda: scheduler.ledger.running == 1)
            x = np.zeros(1, np.float32)
            calls = [engine.infer("m", x, source="gate", latest=True) for _ in range(3)]
            frames = asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: scheduler.ledger.given_up[Reason.REPLACED] == 2)
            stage.riding.set()
            answers = await frames
            assert [type(answer) for answer in answers] == [Replaced, Replaced, dict]
            assert "a newer frame of source 'gate'" in str(answers[0])
            await running
            with pytest.raises(InvalidInput, match="latest needs a source"):
                await engine.infer("fake", x, latest=True)

    run(story())
