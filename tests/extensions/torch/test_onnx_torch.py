"""ONNX files that run as PyTorch networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from backends import onnx_models
from backends.cases import settings
from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.backend_kinds import kind_of
from carpool.config.repository import ModelVersion, find_models
from carpool.errors import Unsupported
from carpool.extension import importable
from carpool.extensions.torch.onnx_operators import OPERATORS
from carpool.extensions.torch.torch_onnx import open_onnx

X, Y = ("x", "FP32", ("batch", 4)), ("y", "FP32", ("batch", 4))


def write(path: Path, operator: str = "Add") -> Path:
    nodes = [
        helper.make_node("Cast", ["half"], ["value"], to=1),  # as weights that are stored in fewer bits
        helper.make_node(operator, ["x", "value"] if operator == "Add" else ["x"], ["y"]),
    ]
    return onnx_models.write(path, nodes, [X], [Y], {"half": np.array([2.5], np.float16)})


def test_it_is_taken_only_where_the_settings_say_so(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "model.onnx")
    (found,), _ = find_models([tmp_path])
    assert found.config.backend == "onnxruntime"
    (tmp_path / "m" / "model.toml").write_text('backend = "onnx_torch"\n')
    (found,), _ = find_models([tmp_path])
    assert found.config.backend == "onnx_torch"


def test_what_is_missing_is_named() -> None:
    missing = kind_of("onnx_torch").missing()
    assert importable("onnx") == (not missing)
    if missing:
        assert "pip install 'carpool[onnx-torch]'" in missing


def test_the_answers_are_those_of_onnxruntime(tmp_path: Path) -> None:
    file = write(tmp_path / "model.onnx")
    version = ModelVersion(1, file)
    config = backends.describe(settings("onnx_torch", file), version)
    assert [tensor.name for tensor in config.inputs] == ["x"]
    assert [tensor.name for tensor in config.outputs] == ["y"]
    backend = backends.load(config, version, Placement(threads=1))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert backend.run({"x": x}, ["y"])["y"].tolist() == (x + 2.5).tolist()
    backend.close()


def test_answers_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "Add", lambda _node, x, y: x + y + 0.5)
    with pytest.raises(Unsupported, match=r"would not be what onnxruntime answers; .*onnxruntime-gpu"):
        open_onnx(settings("onnx_torch", None), write(tmp_path / "model.onnx"))


def node(kind: str, inputs: str, outputs: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


PICTURE = ("x", "FP32", ("batch", 4, 6, 6))
GRAPHS = {
    "sizes that are computed": [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "n"),
        node("Unsqueeze", "n one0", "rows"),
        node("Concat", "rows four rest", "sides", axis=0),
        node("Reshape", "x sides", "y"),
    ],
    "a number that is computed from sizes": [
        node("Shape", "x", "shape"),
        node("Gather", "shape one0", "n"),
        node("Cast", "n", "rows", to=1),
        node("Sqrt", "rows", "root"),
        node("Ceil", "root", "up"),
        node("Div", "x up", "y"),
    ],
    "a reduction with its axes as an input": [node("ReduceMean", "x axes", "y", keepdims=0)],
    "a padded convolution": [node("Conv", "x weights", "y", auto_pad="SAME_UPPER", strides=[2, 2])],
    "parts put together": [
        node("Split", "x", "a b", axis=1, num_outputs=2),
        node("Slice", "a begins ends two steps", "c"),
        node("Slice", "b begins ends two steps", "d"),
        node("Concat", "c d", "y", axis=1),
    ],
    "8 bits": [
        node("QuantizeLinear", "x scale middle", "q"),
        node("DequantizeLinear", "q scale middle", "y"),
    ],
    "half of the sides": [
        node("Resize", "x none none sizes", "y", mode="linear", coordinate_transformation_mode="half_pixel")
    ],
    "a tiny number": [
        node("ReduceL2", "x axes1", "length", keepdims=1),
        node("Clip", "length tiny", "least"),
        node("Div", "x least", "y"),
    ],
}
CONSTANTS = {
    "zero": np.array(0, np.int64),
    "one0": np.array([0], np.int64),
    "four": np.array([4], np.int64),
    "rest": np.array([-1], np.int64),
    "axes": np.array([2, 3], np.int64),
    "axes1": np.array([1], np.int64),
    "weights": np.linspace(-1, 1, 5 * 4 * 9, dtype=np.float32).reshape(5, 4, 3, 3),
    "begins": np.array([-1], np.int64),
    "ends": np.array([-9], np.int64),
    "two": np.array([2], np.int64),
    "steps": np.array([-2], np.int64),
    "scale": np.array(0.01, np.float32),
    "middle": np.array(7, np.uint8),
    "sizes": np.array([1, 4, 3, 3], np.int64),
    "tiny": np.array(1e-12, np.float32),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("batch", [1, 3])
def test_operators_answer_as_onnxruntime_does(name: str, batch: int, tmp_path: Path) -> None:
    import onnxruntime

    nodes = GRAPHS[name]
    for one in nodes:  # an input that is left out
        for at, given in enumerate(one.input):
            if given == "none":
                one.input[at] = ""
    used = {given for one in nodes for given in one.input}
    constants = {key: value for key, value in CONSTANTS.items() if key in used}
    if name == "half of the sides":
        constants["sizes"] = np.array([batch, 4, 3, 3], np.int64)
    file = onnx_models.write(
        tmp_path / "model.onnx", nodes, [PICTURE], [("y", "FP32", None)], constants, opset=18
    )
    x = np.random.default_rng(2).random((batch, 4, 6, 6), np.float32)
    right = onnxruntime.InferenceSession(str(file)).run(None, {"x": x})[0]
    network = open_onnx(replace(settings("onnx_torch", None), image=None), file)
    found = network(torch.from_numpy(x))["y"]
    np.testing.assert_allclose(found.numpy(), right, rtol=1e-5, atol=1e-5)
    half = network.half()(torch.from_numpy(x).half())["y"]
    assert half.dtype is torch.float16
    np.testing.assert_allclose(half.float().numpy(), right, rtol=1e-2, atol=1e-2)
    traced = torch._dynamo.explain(network)(torch.from_numpy(x).half())
    assert traced.graph_break_count == 0


def test_values_are_let_go_when_nobody_needs_them(tmp_path: Path) -> None:
    network = open_onnx(
        settings("onnx_torch", None),
        onnx_models.write(
            tmp_path / "model.onnx",
            [node("Relu", "x", "a"), node("Neg", "a", "b"), node("Add", "a b", "y")],
            [X],
            [Y],
            {},
        ),
    )
    freed = [name for one in network.nodes for name in one.frees]
    assert sorted(freed) == ["a", "b", "x"]


def test_an_operator_without_a_counterpart_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "model.onnx", "Hardmax")
    version = ModelVersion(1, file)
    config = replace(settings("onnx_torch", file), backend="onnx_torch")
    with pytest.raises(Unsupported, match=r"no counterpart of Hardmax; .*pip install onnxruntime-gpu"):
        backends.load(backends.describe(config, version), version, Placement(threads=1))
