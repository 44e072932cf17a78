"""ONNX classifiers with the first layers and the ends that exports have: a mean colour, times weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, CLASSES = 64, 10
Layer = tuple[str, Sequence[float]]


def classifier(
    file: Path,
    *layers: Layer,
    batch: int | str = "batch",
    softmax: bool = False,
    datatype: int = TensorProto.FLOAT,
    output: str = "logits",
) -> Path:
    """`layers` are what the picture meets first: an operator, and its constant."""
    weights = np.random.default_rng(3).normal(0, 2, (3, CLASSES)).astype(np.float32)
    nodes, made, last = [], [numpy_helper.from_array(weights, "weights")], "images"
    if datatype != TensorProto.FLOAT:
        nodes.append(helper.make_node("Cast", [last], ["floats"], to=TensorProto.FLOAT))
        last = "floats"
    for number, (operator, values) in enumerate(layers):
        constant = np.array(values, np.float32).reshape(1, -1, 1, 1)
        made.append(numpy_helper.from_array(constant, f"constant{number}"))
        nodes.append(helper.make_node(operator, [last, f"constant{number}"], [f"made{number}"]))
        last = f"made{number}"
    nodes.append(helper.make_node("ReduceMean", [last], ["mean"], axes=[2, 3], keepdims=0))
    nodes.append(helper.make_node("MatMul", ["mean", "weights"], ["values" if softmax else output]))
    if softmax:
        nodes.append(helper.make_node("Softmax", ["values"], [output], axis=1))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", datatype, [batch, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [batch, CLASSES])],
        made,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file
