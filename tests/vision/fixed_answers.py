"""ONNX files that give the same outputs for every picture: heads of any family, without its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from carpool.types import Array

Dims = Sequence[int | str]


def answering(
    file: Path, outputs: Mapping[str, Array], inputs: Mapping[str, Dims], metadata: Mapping[str, str]
) -> Path:
    """`outputs` are those for one picture, without the batch of 1; every input counts, times nothing."""
    nodes, made, ends = [], [], []
    for number, name in enumerate(inputs):
        nodes.append(helper.make_node("ReduceMean", [name], [f"mean{number}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"mean{number}" for number in range(len(inputs))], ["mean"]))
    nodes.append(helper.make_node("Mul", ["mean", "nothing"], ["none"]))
    made.append(numpy_helper.from_array(np.zeros((), np.float32), "nothing"))
    for name, values in outputs.items():
        one = values[None] if values.dtype.kind in "iu" else values[None].astype(np.float32)
        kind = helper.np_dtype_to_tensor_dtype(one.dtype)
        made.append(numpy_helper.from_array(one, f"{name}_values"))
        nodes.append(helper.make_node("Cast", ["none"], [f"{name}_none"], to=kind))
        nodes.append(helper.make_node("Add", [f"{name}_values", f"{name}_none"], [name]))
        ends.append(helper.make_tensor_value_info(name, kind, one.shape))
    begins = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    graph = helper.make_graph(nodes, "fixed", begins, ends, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, dict(metadata))
    onnx.save(model, str(file))
    return file


def by_optimum(file: Path, classes: int, side: int = 32, *, symbol: str = "num_channels") -> Path:
    """A network of patches as optimum exports it: no dimension of its picture has a number."""
    random = np.random.default_rng(7)
    kernel = random.normal(0, 0.05, (4, 3, 8, 8)).astype(np.float32)
    weights = random.normal(0, 1, (4, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["pixel_values", "patch.weight"], ["patches"], strides=[8, 8]),
        helper.make_node("ReduceMean", ["patches"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["mean", "head.weight"], ["logits"]),
    ]
    dims = ["batch_size", symbol, "height", "width"]
    graph = helper.make_graph(
        nodes,
        "optimum",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", classes])],
        [
            numpy_helper.from_array(kernel, "patch.weight"),
            numpy_helper.from_array(weights, "head.weight"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file
