"""Models that share a device take turns on it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from carpool import Engine
from carpool.backends.fake import FakeBackend
from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.profile.instance_layout import Devices

MODEL = """
slo_ms = 5000
max_batch = 4
device_weight = {weight}
[fake]
curve = "1+0.1"
device = "{device}"
[[input]]
name = "x"
datatype = "FP32"
shape = [1]
[[output]]
name = "y"
datatype = "FP32"
shape = [1]
"""


class Placed:
    """Just enough of a backend to be somewhere."""

    def __init__(self, device: str) -> None:
        self.device = device


def scheduler(instances: int = 1) -> Scheduler:
    return Scheduler(BatchCurve.parse("4+1", 16), Promise(0.1, 16), instances)


def test_each_device_has_an_arbiter_for_as_long_as_somebody_is_there() -> None:
    devices = Devices()
    one, two, alone = scheduler(2), scheduler(), scheduler()
    devices.join(one, [Placed("gpu0"), Placed("gpu1")], 1.0, lambda: None)  # type: ignore[list-item]
    devices.join(two, [Placed("gpu0")], 2.0, lambda: None)  # type: ignore[list-item]
    devices.join(alone, [Placed("")], 1.0, lambda: None)  # type: ignore[list-item]
    assert [instance.turn is None for instance in (*one.instances, *two.instances)] == [False] * 3
    assert one.instances[0].turn is not one.instances[1].turn
    assert alone.instances[0].turn is None
    devices.leave(one)
    devices.leave(one)
    assert set(devices._arbiters) == {"gpu0"}
    devices.leave(two)
    assert not devices._arbiters


def test_batches_of_two_models_never_run_on_one_device_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, weight in (("a", 1), ("b", 2.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.toml").write_text(MODEL.format(weight=weight, device="gpu0"))
    busy, overlapped, ran = threading.Lock(), [], []
    answer = FakeBackend._answer

    def watched(self: FakeBackend, *given: object) -> object:
        if not busy.acquire(blocking=False):
            overlapped.append(self)
            return answer(self, *given)  # type: ignore[arg-type]
        try:
            ran.append(self._model)
            return answer(self, *given)  # type: ignore[arg-type]
        finally:
            busy.release()

    monkeypatch.setattr(FakeBackend, "_answer", watched)

    async def ask() -> None:
        async with Engine(tmp_path) as engine:
            image = {"x": np.zeros((1, 1), np.float32)}
            await asyncio.gather(*(engine.infer(name, image) for name in ("a", "b") * 20))

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert not overlapped
    assert {"a", "b"} <= set(ran)
