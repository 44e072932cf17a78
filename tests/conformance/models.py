"""The models that the conformance runs ask: small, made on the spot, one for each thing to try."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from backends import onnx_models

SIDE = 224
CLASSES = 10
LABELS = tuple(f"class-{number}" for number in range(CLASSES))

_VISION = """
platform: "onnxruntime_onnx"
max_batch_size: 16
input [ { name: "image" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] format: FORMAT_NHWC } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 500
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 20000000 }
}
"""
_PRETEND = """
backend = "fake"
{promise}
max_batch = 8
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "FP32"
shape = [{size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [2]
"""
_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "pretend" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
  { model_name: "after" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
] }
"""
_PYTHON = """
INPUTS = {"image": ("UINT8", [64, 64, 3])}
OUTPUTS = {"mean": ("FP32", [3])}


def predict(image):
    return image.mean(axis=(1, 2)).astype("float32")
"""
_SUMS = """
INPUTS = {"x": ("FP32", [1]), "start": ("INT32", [1]), "id": ("BYTES", [1])}
OUTPUTS = {"y": ("FP32", [1])}
sums = {}


def predict(x, start, id):
    answer = x.copy()
    for row, name in enumerate(id[:, 0]):
        answer[row] = sums[name] = x[row] + (0 if start[row, 0] else sums[name])
    return answer
"""
_SUMS_SETTINGS = """
[sequences]
idle_ms = 60000
[[sequences.control]]
name = "start"
kind = "start"
[[sequences.control]]
name = "id"
kind = "corrid"
datatype = "BYTES"
"""
_COUNTS = """
INPUTS = {"x": ("FP32", [3])}
OUTPUTS = {"total": ("FP32", [1])}


def predict(x):
    for number in range(int(x[0, 0])):
        yield x[:, :1] * 0 + number
"""


def write_models(folder: Path) -> Path:
    """The repository."""
    _vision(folder / "vision")
    for version in (1, 2):
        onnx_models.arithmetic(folder / "numbers" / str(version) / "model.onnx")
    (folder / "numbers" / "config.pbtxt").write_text(
        'platform: "onnxruntime_onnx"\nmax_batch_size: 8\nversion_policy { all { } }\n'
    )
    for datatype in ("BYTES", "FP16", "BF16"):
        onnx_models.identity(folder / f"same-{datatype}" / "1" / "model.onnx", datatype, ("batch", 3))
    onnx_models.identity(folder / "changing" / "1" / "model.onnx")
    (folder / "changing" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n')
    _pretend(folder / "pretend", "2+0.2", "slo_ms = 5000")
    _pretend(folder / "slow", "400+1", "")
    _pretend(folder / "after", "1+0.1", "slo_ms = 5000", size=2)
    (folder / "pair" / "1").mkdir(parents=True)
    (folder / "pair" / "config.pbtxt").write_text(_ENSEMBLE)
    _python(folder / "mean", _PYTHON)
    _python(folder / "sums", _SUMS, _SUMS_SETTINGS)
    _python(folder / "counts", _COUNTS, "decoupled = true\n")
    return folder


def _python(folder: Path, code: str, settings: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    if settings:
        (folder / "model.toml").write_text(settings)


def _vision(folder: Path) -> None:
    """Score k of a picture is k times its mean value: a picture of ones has the scores 0 to 9."""
    nodes = [
        helper.make_node("Cast", ["image"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["values", "inner"], ["rows"], keepdims=0),
        helper.make_node("ReduceMean", ["rows", "outer"], ["mean"], keepdims=1),
        helper.make_node("MatMul", ["mean", "factors"], ["scores"]),
    ]
    factors = np.arange(CLASSES, dtype=np.float32).reshape(1, CLASSES)
    onnx_models.write(
        folder / "1" / "model.onnx",
        nodes,
        [("image", "UINT8", ("batch", SIDE, SIDE, 3))],
        [("scores", "FP32", ("batch", CLASSES))],
        {"factors": factors, "inner": np.array([2, 3], np.int64), "outer": np.array([1], np.int64)},
    )
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    (folder / "config.pbtxt").write_text(_VISION)


def _pretend(folder: Path, curve: str, promise: str, size: int = 3) -> None:
    """Takes as long as the curve says and answers zeros."""
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text(_PRETEND.format(curve=curve, promise=promise, size=size))
