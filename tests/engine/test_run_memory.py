"""A model gives back what its batches took while nobody asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from carpool.engine.engine import Engine
from carpool.engine.loading.loading import Loading
from carpool.engine.models.batch_runtime import BatchRuntime
from carpool.engine.profile.run_memory import MUCH_MEMORY, RunMemory
from engine.scripted import ScriptedBackend, Stage, ask, model, run, scripted_stage
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]


@pytest.fixture(name="given_back")
def given_back_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[ScriptedBackend]:
    found: list[ScriptedBackend] = []

    class Keeping(ScriptedBackend):
        def give_back(self) -> None:
            found.append(self)

    stage.kind = Keeping
    monkeypatch.setattr("carpool.engine.models.batch_runtime.REST_S", 0.01)
    monkeypatch.setattr(Loading, "_memory", lambda *_: RunMemory(MUCH_MEMORY, MUCH_MEMORY))
    return found


def test_once_after_every_time_it_was_used(
    tmp_path: Path, stage: Stage, given_back: list[ScriptedBackend]
) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            for _ in range(2):
                given_back.clear()
                await ask(engine)
                await until(lambda: len(given_back) == len(stage.backends), "it kept its memory")
                assert set(given_back) == set(stage.backends)

    run(story())


def test_not_while_a_batch_runs(tmp_path: Path, stage: Stage, given_back: list[ScriptedBackend]) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await until(lambda: given_back, "it kept its memory")
            (served,) = engine.served.values()
            runtime = cast(BatchRuntime, served.runtime)
            given_back.clear()
            rides = asyncio.ensure_future(ask(engine, x=1.0))
            await until(lambda: not runtime.idle)
            runtime._gave_back = 0.0  # as if it had been used since
            runtime._look_at_memory(asyncio.get_running_loop())
            assert runtime._gave_back == 0.0
            stage.riding.set()
            await rides

    run(story())
