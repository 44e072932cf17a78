"""Instances that are lost: replaced, however often that fails, and told of truthfully meanwhile."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carpool import Engine
from carpool.backends.python import python_backend
from carpool.backends.python.worker_process import WorkerProcess
from carpool.config.model import ModelConfig
from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.engine.fleet.fleet import Publisher
from carpool.engine.models import batch_runtime
from carpool.engine.models import runtime as runtime_module
from carpool.engine.models.batch_runtime import execution_timeout
from carpool.errors import DeadlineExceeded, ModelError
from engine import repositories
from engine.scripted import run
from engine.test_engine import row
from waiting import until_in_loop as until

MORTAL = "import os\ndef predict(x):\n    if x[0, 0] == 13: os._exit(3)\n    return x"


@pytest.mark.parametrize(
    "failure", [OSError(errno.EAGAIN, "no process"), MemoryError(), RuntimeError("can't start new thread")]
)
def test_a_replacement_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(runtime_module, "_FIRST_RETRY_S", 0.01)
    repositories.python(tmp_path, MORTAL)
    failed: list[int] = []

    def refuses_twice(*arguments: Any, **named: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise failure
        return WorkerProcess(*arguments, **named)

    async def story() -> None:
        changes: list[bool] = []

        class Notes(Publisher):
            def publish(self) -> None:
                changes.extend(served.able for served in engine.served.values())

        engine = Engine(tmp_path, publisher=Notes())
        async with engine:
            assert changes[-1]
            changes.clear()
            monkeypatch.setattr(python_backend, "WorkerProcess", refuses_twice)
            with pytest.raises(ModelError, match="died"):
                await engine.infer("model", row(13, 0))
            await until(lambda: changes == [False, True])
            assert len(failed) == 2
            assert (await engine.infer("model", row(1, 2)))["y"].tolist() == [[1, 2]]

    run(story())


def test_a_model_with_a_promise_that_hangs_is_replaced_without_being_told_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runtime, "_SHORTEST_TIMEOUT_S", 3.0)
    code = "import time\ndef predict(x):\n    if x[0, 0] == 13: time.sleep(600)\n    return x"
    repositories.python(tmp_path, code, head="slo_ms = 60000", max_batch=1)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            (served,) = engine.fleet.offered.values()
            assert any("is given up" in choice for choice in served.choices)
            with pytest.raises(DeadlineExceeded) as caught:
                await engine.infer("model", row(13, 0))
            assert caught.value.reason == "execution-timeout"
            await until(lambda: served.able)
            assert (await engine.infer("model", row(1, 2)))["y"].tolist() == [[1, 2]]

    run(story())


def test_a_promise_gives_up_a_batch_that_takes_far_longer_than_any() -> None:
    def chosen(told: float | None, policy: object, fixed: float = 0.001) -> tuple[float | None, str]:
        config = cast(ModelConfig, SimpleNamespace(decoupled=False, execution_timeout=told, policy=policy))
        return execution_timeout(config, BatchCurve.linear(fixed, 0.001, 8))

    promise = Promise(0.05, 8)
    seconds, why = chosen(None, promise)
    assert seconds == 10.0
    assert "longer than 10 s" in why
    assert chosen(None, promise, fixed=0.992)[0] == pytest.approx(100.0)
    assert chosen(2.5, promise) == (2.5, "")
    assert chosen(0.0, promise) == (None, "")
    assert chosen(None, None) == (None, "")
