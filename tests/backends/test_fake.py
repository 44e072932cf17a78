"""The model that only takes time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.cases import load, load_fake, settings
from carpool import backends
from carpool.backends.fake import FakeBackend
from carpool.config.model import FakeSettings, TensorConfig
from carpool.config.repository import ModelVersion, find_models
from carpool.errors import ConfigError, ModelError

X = (("x", "FP32", (3,)),)


class Wait:
    """In place of the event that a fake model waits on: takes no time, and keeps the times asked for."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late
        self.asked: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.asked.append(seconds)
        self.now += seconds + self.late
        return False

    def is_set(self) -> bool:
        return False


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    clock = Wait()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def run(backend: backends.Backend, wait: Wait, rows: int) -> None:
    assert isinstance(backend, FakeBackend)
    backend._stop = wait  # type: ignore[assignment]
    backend.run({"x": np.zeros((rows, 3), np.float32)}, [])


@pytest.mark.parametrize(
    ("curve", "rows", "ms"), [("16+4", 1, 20), ("16+4", 32, 144), ("1:6,9:14", 5, 10), ("1:6,9:14", 32, 37)]
)
def test_it_takes_as_long_as_the_curve_says(wait: Wait, curve: str, rows: int, ms: float) -> None:
    run(load_fake(X, (("y", "FP32", (1,)),), curve), wait, rows)
    assert wait.asked == [pytest.approx(ms / 1e3)]


def test_it_learns_how_late_the_timer_rings(wait: Wait) -> None:
    wait.late = 80e-6
    backend = load_fake(X, (("y", "FP32", (1,)),), "16+4")
    for _ in range(200):
        run(backend, wait, 1)
    assert wait.asked[-1] == pytest.approx(0.020 - 80e-6, abs=10e-6)


def test_lengths_that_vary_are_one(wait: Wait) -> None:
    outputs = (("boxes", "FP32", (-1, 4)), ("names", "BYTES", (2,)), ("half", "FP16", ()))
    answer = load_fake(X, outputs).run({"x": np.zeros((5, 3), np.float32)}, [])
    assert {name: (array.shape, array.dtype) for name, array in answer.items()} == {
        "boxes": ((5, 1, 4), np.float32),
        "names": ((5, 2), np.dtype(object)),
        "half": ((5,), np.float16),
    }
    assert answer["names"].tolist() == [[b"", b""]] * 5


def test_the_clients_shape_is_answered_whatever_a_model_would_want() -> None:
    config = settings("fake", None, X)
    config = replace(config, outputs=(TensorConfig("y", "FP32", (4,), reshape=(2, 2)),))
    answer = load(config, None).run({"x": np.zeros((3, 3), np.float32)}, ["y"])
    assert answer["y"].shape == (3, 4)


def test_without_a_batch_dimension_shapes_are_whole(wait: Wait) -> None:
    config = replace(settings("fake", None, X, (("y", "FP32", (2, 2)),)), max_batch=0)
    backend = load(replace(config, fake=FakeSettings("16+4")), None)
    assert backend.run({"x": np.zeros(3, np.float32)}, ["y"])["y"].shape == (2, 2)


def test_a_batch_beyond_the_curve_is_an_error() -> None:
    backend = load_fake(X, (("y", "FP32", (1,)),))
    with pytest.raises(ModelError, match="ends at batches of 32, but this batch has 33"):
        backend.run({"x": np.zeros((33, 3), np.float32)}, ["y"])


def test_a_curve_that_falls_is_refused() -> None:
    config = replace(settings("fake", None, X, X), fake=FakeSettings("1:9,4:3"))
    with pytest.raises(ConfigError, match=r"^model: fake.curve: a larger batch cannot be faster"):
        backends.load(config, ModelVersion(1, None))


def test_a_folder_with_settings_alone_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "model.toml").write_text(
        """
        backend = "fake"
        slo_ms = 200
        max_batch = 64
        [fake]
        curve = "1+0"
        [[input]]
        name = "image"
        datatype = "UINT8"
        shape = [4]
        [[output]]
        name = "scores"
        datatype = "FP32"
        shape = [10]
        """
    )
    ((source,), _) = find_models([folder])
    config = backends.describe(source.config, source.versions[0])
    backend = backends.load(config, source.versions[0])
    assert backend.run({"image": np.zeros((64, 4), np.uint8)}, ["scores"])["scores"].shape == (64, 10)
