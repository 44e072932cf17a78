"""A model that was measured on a busy machine, measured again as background work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from carpool import Engine
from carpool.config.fingerprint import PROVISIONAL
from carpool.engine.models.batch_runtime import BatchRuntime, wants_second_look
from carpool.engine.models.second_look import SecondLook
from carpool.engine.models.served import Served
from carpool.engine.profile.hardware import CpuTaken
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import Profile

MODEL = """
slo_ms = 2000
max_batch = 4
instances = 2
[fake]
curve = "1+0.1"
[[input]]
name = "x"
datatype = "FP32"
shape = [1]
[[output]]
name = "y"
datatype = "FP32"
shape = [1]
"""
Test = Callable[..., Coroutine[Any, Any, None]]


def in_a_loop(test: Test) -> Callable[..., None]:
    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


BUSY, CALM = CpuTaken(0.0, 0.6, 0.5), CpuTaken()


class Machine:
    """Whose looks find it as this list says, and calm after that; nobody sleeps longer than a moment."""

    def __init__(self, *looks: CpuTaken) -> None:
        self._looks = list(looks)
        self.waits: list[float] = []

    def read(self) -> CpuTaken:
        return self._looks.pop(0) if self._looks else CALM

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0.001)


def provisional(served: Served) -> Profile:
    """As if each batch had been measured to take ten seconds."""
    points = tuple(Point(size, 10.0 + size, 0.1, 5) for size in (1, 2, 4))
    served.profile = Profile(Layout(2, 1), "tried", Measured(points, "", "others took 60%"), "2026-01-01")
    served.choices = ("Something else.",)
    served.config = replace(served.config, parameters={PROVISIONAL: "others took 60%", "mine": "1"})
    return served.profile


def model(folder: Path) -> Path:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "model.toml").write_text(MODEL)
    return folder


def look(served: Served, machine: Machine) -> SecondLook:
    return SecondLook(cast(BatchRuntime, served.runtime), lambda: machine, machine.sleep)


@in_a_loop
async def test_it_is_measured_when_the_machine_is_calm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(model(tmp_path)) as engine:
        served = engine.find("m")
        before = provisional(served)
        assert wants_second_look(served)
        machine = Machine(BUSY, BUSY)
        with caplog.at_level(logging.INFO, "carpool"):
            await asyncio.wait_for(look(served, machine).run(), 60)
        assert machine.waits[:5] == [5.0, 1.0, 10.0, 1.0, 20.0], "it looks less often while others work"
        after = served.profile
        assert after is not None
        assert not after.provisional
        assert after.measured_at > before.measured_at
        assert [p.size for p in after.points] == [1, 2, 4]
        assert all(p.seconds < 10 for p in after.points)
        scheduler = served.scheduler
        assert scheduler.belief.runs.points == tuple((p.size, p.seconds) for p in after.points)
        assert served.config.parameters == {"mine": "1"}
        assert served.choices[-1] == "Something else."
        assert "Measured and warm: batches of 1, 2, 4." in served.choices
        assert sum("profile-measured-again" in str(record.msg) for record in caplog.records) == 1
        assert not wants_second_look(served)
        answer = await engine.infer("m", np.zeros((1, 1), np.float32))
        assert answer["y"].shape == (1, 1)


@in_a_loop
async def test_on_a_machine_that_is_never_calm_nothing_is_run(tmp_path: Path) -> None:
    async with Engine(model(tmp_path)) as engine:
        served = engine.find("m")
        before = provisional(served)
        machine = Machine(*[BUSY] * 1000)
        await asyncio.wait_for(look(served, machine).run(), 60)
        assert served.profile is before
        assert served.scheduler.background is None
        assert len(machine.waits) == 100, "the looks are numbered"
        assert max(machine.waits) == 300.0


@in_a_loop
async def test_what_others_disturbed_again_is_not_adopted(tmp_path: Path) -> None:
    async with Engine(model(tmp_path)) as engine:
        served = engine.find("m")
        before = provisional(served)
        machine = Machine(*[CALM, BUSY] * 4, *[BUSY] * 1000)
        await asyncio.wait_for(look(served, machine).run(), 60)
        assert served.profile is before
        assert served.scheduler.background is not None
        assert served.scheduler.background.ran == 4 * 3 * 2, "four tries, three runs on two instances"


@in_a_loop
async def test_models_without_a_provisional_profile_are_left_alone(tmp_path: Path) -> None:
    async with Engine(model(tmp_path)) as engine:
        served = engine.find("m")
        assert not wants_second_look(served)
        profile = provisional(served)
        served.profile = replace(profile, measured=replace(profile.measured, provisional=""))
        assert not wants_second_look(served)
