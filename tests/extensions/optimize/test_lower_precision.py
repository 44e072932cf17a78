"""onnxruntime's quantizer on small networks: what is quantized, what is kept, and what it cannot do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from backends import onnx_models
from carpool.errors import InvalidInput
from carpool.extensions.optimize import lower_precision
from carpool.extensions.optimize.lower_precision import (
    Feed,
    NotQuantized,
    OnnxQuantizer,
    checked_feeds,
    no_onnx_quantizer,
    tool_versions,
    write_openvino,
)

LOWEST = float(np.finfo(np.float32).min)


@pytest.fixture(name="feeds")
def noise() -> list[Feed]:
    draw = np.random.default_rng(1)
    return [{"x": draw.random((1, 3, 8, 8), np.float32)} for _ in range(8)]


@pytest.fixture(name="network")
def two_layers_and_a_padding(tmp_path: Path) -> Path:
    """Its pooling is padded with the lowest number, as converters write it: no scale holds that."""
    draw = np.random.default_rng(2)
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], name="first", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Pad", ["a", "by", "lowest"], ["b"], name="pad"),
        helper.make_node("MaxPool", ["b"], ["c"], name="pool", kernel_shape=[2, 2]),
        helper.make_node("Conv", ["c", "second"], ["y"], name="second", kernel_shape=[1, 1]),
    ]
    tensors = {
        "first": draw.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "by": np.array([0, 0, 1, 1, 0, 0, 0, 0], np.int64),
        "lowest": np.array(LOWEST, np.float32),
        "second": draw.standard_normal((2, 4, 1, 1)).astype(np.float32),
    }
    return onnx_models.write(
        tmp_path / "model.onnx",
        nodes,
        [("x", "FP32", ("batch", 3, 8, 8))],
        [("y", "FP32", ("batch", 2, 8, 8))],
        tensors,
    )


def answers(file: Path, feeds: list[Feed]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(file))
    return [session.run(None, dict(feed))[0] for feed in feeds]


def operators(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(file)).graph.node]


def test_a_quantized_network_answers_nearly_the_same(
    network: Path, feeds: list[Feed], tmp_path: Path
) -> None:
    quantizer = OnnxQuantizer.calibrated(network, feeds)
    assert {"first", "second"} <= set(quantizer.layers)
    assert not {"pad", "pool"} & set(quantizer.layers)
    quantizer.write(tmp_path / "int8.onnx")
    assert "QuantizeLinear" in operators(tmp_path / "int8.onnx")
    for right, found in zip(answers(network, feeds), answers(tmp_path / "int8.onnx", feeds), strict=True):
        assert np.linalg.norm(found - right) < 0.05 * np.linalg.norm(right)


def test_layers_that_are_kept_are_as_they_were(network: Path, feeds: list[Feed], tmp_path: Path) -> None:
    quantizer = OnnxQuantizer.calibrated(network, feeds)
    quantizer.write(tmp_path / "none.onnx", kept=["first", "second"])
    assert "QuantizeLinear" not in operators(tmp_path / "none.onnx")
    quantizer.write(tmp_path / "one.onnx", only=["second"])
    quantizer.write(tmp_path / "both.onnx")
    count = {name: operators(tmp_path / f"{name}.onnx").count("DequantizeLinear") for name in ("one", "both")}
    assert 0 < count["one"] < count["both"]


def test_openvinos_form_of_a_quantized_file_answers_the_same(
    network: Path, feeds: list[Feed], tmp_path: Path
) -> None:
    openvino = pytest.importorskip("openvino")
    OnnxQuantizer.calibrated(network, feeds).write(tmp_path / "int8.onnx")
    write_openvino(tmp_path / "int8.onnx", tmp_path / "model.xml")
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(tmp_path / "model.xml"), "CPU", options)
    for right, feed in zip(answers(tmp_path / "int8.onnx", feeds), feeds, strict=True):
        found = compiled(dict(feed))[0]
        assert np.linalg.norm(found - right) < 0.05 * np.linalg.norm(right)


def test_an_input_without_numbers_is_named(tmp_path: Path, feeds: list[Feed]) -> None:
    nodes = [helper.make_node("Add", ["x", "other"], ["y"], name="add")]
    shape = ("batch", 3, 8, 8)
    file = onnx_models.write(
        tmp_path / "model.onnx",
        nodes,
        [("x", "FP32", shape), ("other", "FP32", shape)],
        [("y", "FP32", shape)],
    )
    with pytest.raises(NotQuantized, match="nothing gives its input other"):
        OnnxQuantizer.calibrated(file, feeds)


def test_a_file_that_is_none_is_reported_in_the_tools_words(tmp_path: Path, feeds: list[Feed]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(NotQuantized, match="onnxruntime's quantizer: "):
        OnnxQuantizer.calibrated(tmp_path / "model.onnx", feeds)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_precision, "importable", lambda name: name == "openvino")
    assert no_onnx_quantizer(Path("model.onnx")) == "it needs onnx: pip install 'carpool[optimize]'"
    assert lower_precision.no_nncf() == "it needs nncf: pip install 'carpool[optimize]'"
    assert no_onnx_quantizer(Path("model.xml")) == "model.xml is no ONNX file"
    assert tool_versions().keys() >= {"carpool", "numpy", "onnxruntime"}


def test_numbers_that_are_not_finite_calibrate_nothing() -> None:
    with pytest.raises(InvalidInput, match="nothing to calibrate with"):
        checked_feeds([])
    with pytest.raises(InvalidInput, match="the input x has numbers that are not finite"):
        checked_feeds([{"x": np.array([np.nan], np.float32)}])
