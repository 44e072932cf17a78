"""`reshape` in the settings: the model gets the shape it wants, and clients the one they know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends import onnx_models
from carpool import backends
from carpool.backends.backend import reshaped
from carpool.config.model import ModelConfig, ModelSignature, TensorConfig
from carpool.config.repository import read_place
from carpool.types import Array


class Echo:
    """Answers what it got, and remembers its shapes."""

    signature = ModelSignature()
    alive = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        self.seen = [array.shape for array in inputs.values()]
        return {"y": inputs["x"]}

    def abort(self) -> None: ...

    def close(self) -> None: ...


def config(dims: tuple[int, ...], model: tuple[int, ...], max_batch: int) -> ModelConfig:
    tensor = TensorConfig("x", "FP32", dims, reshape=model)
    return ModelConfig(
        name="m",
        path=Path(),
        inputs=(tensor,),
        outputs=(replace(tensor, name="y"),),
        max_batch=max_batch,
        backend="onnxruntime",
    )


@pytest.mark.parametrize(
    ("dims", "model", "given", "seen"),
    [
        ((6,), (2, 3), (4, 6), (4, 2, 3)),
        ((1,), (), (4, 1), (4,)),
        ((2, -1, 3), (-1, 6), (1, 2, 5, 3), (1, 5, 6)),
        ((-1, 2, -1), (-1, -1, 2), (3, 7, 2, 5), (3, 7, 5, 2)),
        ((-1, 4), (-1, 2, 2), (2, 0, 4), (2, 0, 2, 2)),
    ],
)
def test_both_sides_see_their_own_shape(
    dims: tuple[int, ...], model: tuple[int, ...], given: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    echo = Echo()
    array = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    answer = reshaped(echo, config(dims, model, 8)).run({"x": array}, ["y"])["y"]
    assert echo.seen == [seen]
    assert np.array_equal(answer, array)


def test_without_a_batch_the_shape_is_whole() -> None:
    echo = Echo()
    array = np.zeros((3, 2, 2), np.float32)
    answer = reshaped(echo, config((3, 2, 2), (1, 3, 2, 2), 0)).run({"x": array}, ["y"])["y"]
    assert (echo.seen, answer.shape) == ([(1, 3, 2, 2)], (3, 2, 2))


def test_a_wrong_shape_is_left_for_the_engine_to_name() -> None:
    echo = Echo()
    reshaped(echo, config((6,), (2, 3), 8)).run({"x": np.zeros((4, 7), np.float32)}, ["y"])
    assert echo.seen == [(4, 7)]


def test_a_model_without_any_is_the_very_backend() -> None:
    echo = Echo()
    plain = replace(config((6,), (2, 3), 8), inputs=(), outputs=())
    assert reshaped(echo, plain) is echo


def test_an_onnx_file_as_triton_repositories_have_it(tmp_path: Path) -> None:
    """A network with a batch of one in its shape, offered without any batch."""
    folder = tmp_path / "net"
    onnx_models.identity(folder / "1" / "model.onnx", "FP32", (1, 3, 2, 2))
    (folder / "config.pbtxt").write_text(
        'platform: "onnxruntime_onnx"\n'
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 2, 2 ] reshape { shape: [ 1, 3, 2, 2 ] } } ]\n'
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ 12 ] reshape { shape: [ 1, 3, 2, 2 ] } } ]\n'
    )
    source, _ = read_place(folder)
    version = source.versions[0]
    whole = backends.describe(source.config, version)
    loaded = backends.load(whole, version)
    array = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    assert np.array_equal(loaded.run({"x": array}, ["y"])["y"], array.ravel())
    loaded.close()
