"""The models that Triton's client examples ask, made anew: the same names, tensors and answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper

from backends import onnx_models

HTTP_NAMES = 7  # what the two examples of model control count in the repository's index
GRPC_NAMES = 8

_PAIR = """
name: "{name}"
backend: "{backend}"
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: {kind} dims: [ 16 ] }} ]
input [ {{ name: "INPUT1" data_type: {kind} dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {kind} dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT1" data_type: {kind} dims: [ 16 ] }} ]
"""
_DENSENET = """
name: "densenet_onnx"
platform: "onnxruntime_onnx"
input [ {
  name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]
  reshape { shape: [ 1, 3, 224, 224 ] }
} ]
output [ {
  name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }
  label_filename: "labels.txt"
} ]
"""
_SUMS = """
def predict(INPUT0, INPUT1):
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
"""
_SUMS_OF_TEXTS = """
import numpy as np


def predict(INPUT0, INPUT1):
    a, b = INPUT0.astype(int), INPUT1.astype(int)
    return {"OUTPUT0": texts(a + b), "OUTPUT1": texts(a - b)}


def texts(numbers):
    return np.array([str(number).encode() for number in numbers.ravel()], dtype=object).reshape(numbers.shape)
"""
_SAME = """
def predict(INPUT0):
    return INPUT0
"""
_SAME_SETTINGS = """
name: "simple_identity"
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_REPEATS = """
import numpy as np

def predict(IN, DELAY, WAIT):
    for index, value in enumerate(IN):
        yield {"OUT": np.array([value], np.int32), "IDX": np.array([index], np.uint32)}
"""
_DECOUPLED = """
name: "repeat_int32"
backend: "python"
input [
  { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
]
output [
  { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }
]
model_transaction_policy { decoupled: true }
"""
_SEQUENCE = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
sequence_batching {{
  {strategy}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "END" control [ {{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} ] }}{corrid}
  ]
}}
"""
_CORRID = """,
    {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {kind} }} ] }}"""
_MARKS_STARTS = """
def predict(INPUT, START, END, READY):
    return {"OUTPUT": INPUT + START}
"""
_MARKS_BOTH_ENDS = """
def predict(INPUT, START, END, READY, CORRID):
    return {"OUTPUT": (INPUT + START + END * CORRID).astype("int32")}
"""
_SUMS_UP = """
sums = {}


def predict(INPUT, START, END, READY, CORRID):
    answer = INPUT.copy()
    for row, name in enumerate(CORRID[:, 0]):
        answer[row] = sums[name] = INPUT[row] + (0 if START[row, 0] else sums[name])
        if END[row, 0]:
            answer[row] += int(name or 0)
            del sums[name]
    return {"OUTPUT": answer}
"""


def write_models(folder: Path, names: int = GRPC_NAMES) -> Path:
    """The repository; what no example asks in it only has to be there."""
    _sums(folder / "simple")
    _python(folder / "simple_int8", _pair("simple_int8", "python", "TYPE_INT8"), _SUMS)
    _python(folder / "simple_string", _pair("simple_string", "python", "TYPE_STRING"), _SUMS_OF_TEXTS)
    _python(folder / "simple_identity", _SAME_SETTINGS, _SAME)
    _densenet(folder / "densenet_onnx")
    others = ["simple_sequence", "simple_dyna_sequence", "inception_onnx"]
    for name in others[: names - 5]:
        _same(folder / name)
    return folder


def write_stateful(folder: Path) -> Path:
    """One whose answers are many, and those that take sequences, by number and by text."""
    _python(folder / "repeat_int32", _DECOUPLED, _REPEATS)
    for name, kind, code in (
        ("simple_sequence", "", _MARKS_STARTS),
        ("simple_dyna_sequence", "TYPE_UINT64", _MARKS_BOTH_ENDS),
        ("simple_string_dyna_sequence", "TYPE_STRING", _SUMS_UP),
    ):
        strategy = "oldest { max_candidate_sequences: 4 }" if kind else "direct { }"
        corrid = _CORRID.format(kind=kind) if kind else ""
        _python(folder / name, _SEQUENCE.format(name=name, strategy=strategy, corrid=corrid), code)
    return folder


def _sums(folder: Path) -> None:
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    shape = ("batch", 16)
    onnx_models.write(
        folder / "1" / "model.onnx",
        nodes,
        [("INPUT0", "INT32", shape), ("INPUT1", "INT32", shape)],
        [("OUTPUT0", "INT32", shape), ("OUTPUT1", "INT32", shape)],
    )
    (folder / "config.pbtxt").write_text(_pair("simple", "onnxruntime", "TYPE_INT32"))


def _densenet(folder: Path) -> None:
    """Only its tensors are those of the network: class k gets k times the picture's mean."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["data_0"], ["channels"]),
        helper.make_node("ReduceMean", ["channels", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "factors"], ["fc6_1"]),
    ]
    factors = np.arange(1000, dtype=np.float32).reshape(1, 1000, 1, 1)
    onnx_models.write(
        folder / "1" / "model.onnx",
        nodes,
        [("data_0", "FP32", (1, 3, 224, 224))],
        [("fc6_1", "FP32", (1, 1000, 1, 1))],
        {"factors": factors, "axes": np.array([1], np.int64)},
    )
    (folder / "labels.txt").write_text("".join(f"class-{number}\n" for number in range(1000)))
    (folder / "config.pbtxt").write_text(_DENSENET)


def _same(folder: Path) -> None:
    onnx_models.write(
        folder / "1" / "model.onnx",
        [helper.make_node("Identity", ["INPUT"], ["OUTPUT"])],
        [("INPUT", "INT32", ("batch", 1))],
        [("OUTPUT", "INT32", ("batch", 1))],
    )


def _pair(name: str, backend: str, kind: str) -> str:
    return _PAIR.format(name=name, backend=backend, kind=kind)


def _python(folder: Path, settings: str, code: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(settings)
