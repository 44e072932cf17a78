"""Tiny ONNX models for tests. Each function writes one file and returns its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ELEMENT_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}
OPSET = 18
IR_VERSION = 9

Dims = Sequence[int | str]
Tensor = tuple[str, str, Dims]  # name, datatype, whole shape; a text is a length that varies


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    weights: dict[str, np.ndarray] | None = None,
    *,
    opset: int = OPSET,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [_info(*tensor) for tensor in inputs],
        [_info(*tensor) for tensor in outputs],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION), str(path))
    return path


def _info(name: str, datatype: str, shape: Dims) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], shape)


def identity(path: Path, datatype: str = "FP32", shape: Dims = ("batch", 3)) -> Path:
    """y = x."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return write(path, nodes, [("x", datatype, shape)], [("y", datatype, shape)])


def arithmetic(path: Path, features: int = 3) -> Path:
    """double = x + x, total = the sum of each row."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["double"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=1),
    ]
    return write(
        path,
        nodes,
        [("x", "FP32", ("batch", features))],
        [("double", "FP32", ("batch", features)), ("total", "FP32", ("batch", 1))],
        {"axes": np.array([1], np.int64)},
    )


def fragile(path: Path, known: int = 4) -> Path:
    """y = 10 x for x from 0 below `known`; any other value makes the whole batch fail."""
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    table = np.arange(known, dtype=np.float32) * 10
    return write(path, nodes, [("x", "INT64", ("batch", 1))], [("y", "FP32", ("batch", 1))], {"table": table})


def endless(path: Path) -> Path:
    """y = x, after more rounds of a loop than anyone will wait for."""
    step = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Add", ["value", "one"], ["next"]),
        ],
        "step",
        [_info("round", "INT64", ()), _info("go_on", "BOOL", ()), _info("value", "FP32", ("batch", 3))],
        [_info("still", "BOOL", ()), _info("next", "FP32", ("batch", 3))],
    )
    nodes = [helper.make_node("Loop", ["rounds", "", "x"], ["y"], body=step)]
    weights = {"rounds": np.array(2**62, np.int64), "one": np.array(1, np.float32)}
    return write(path, nodes, [("x", "FP32", ("batch", 3))], [("y", "FP32", ("batch", 3))], weights)


def lengthy(path: Path, steps: int = 400, side: int = 1024) -> Path:
    """y = x, after a long row of operators that take a while each."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=1),
        helper.make_node("Mul", ["sum", "matrix"], ["v0"]),
        *(helper.make_node("MatMul", [f"v{n}", "matrix"], [f"v{n + 1}"]) for n in range(steps)),
        helper.make_node("ReduceSum", [f"v{steps}"], ["nothing"], keepdims=0),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
    ]
    shape = ("batch", 3)
    matrix = np.zeros((side, side), np.float32)
    return write(path, nodes, [("x", "FP32", shape)], [("y", "FP32", shape)], {"matrix": matrix})


def classifier(path: Path, features: int = 150_528, classes: int = 10, datatype: str = "UINT8") -> Path:
    """One matrix product: class k of a row is k times the sum of its values over the features."""
    nodes = [
        helper.make_node("Cast", ["image"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["values", "weights"], ["scores"]),
    ]
    weights = np.tile(np.arange(classes, dtype=np.float32) / features, (features, 1))
    return write(
        path,
        nodes,
        [("image", datatype, ("batch", features))],
        [("scores", "FP32", ("batch", classes))],
        {"weights": weights},
    )


def unknown_operator(path: Path) -> Path:
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"])]
    return write(path, nodes, [("x", "FP32", ("batch", 3))], [("y", "FP32", ("batch", 3))])


def future_opset(path: Path) -> Path:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return write(path, nodes, [("x", "FP32", ("batch", 3))], [("y", "FP32", ("batch", 3))], opset=99)


def external_weights(path: Path, name: str = "weights.bin") -> Path:
    """y = x + w, with w in a second file beside the model."""
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    weights = {"w": np.ones((1, 1024), np.float32)}
    shape = ("batch", 1024)
    write(path, nodes, [("x", "FP32", shape)], [("y", "FP32", shape)], weights)
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location=name, size_threshold=0)
    return path
