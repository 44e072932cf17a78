"""ONNX files whose batch is fixed, as exporters write them by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from carpool.types import Array

SIDE, CLASSES = 32, 5


def attention(file: Path, batch: int = 1, *, constants: bool = False) -> Path:
    """Patches, their shares of each other, and classes: two Reshapes with a -1, and one without."""
    tokens = (SIDE // 8) ** 2
    nodes = [
        helper.make_node("Conv", ["images", "patch"], ["patches"], strides=[8, 8]),
        helper.make_node("Reshape", ["patches", "heads"], ["split"]),
        helper.make_node("Softmax", ["split"], ["shares"], axis=-1),
        helper.make_node("Reshape", ["shares", "whole"], ["joined"]),
        helper.make_node("Reshape", ["joined", "flat"], ["row"]),
        helper.make_node("MatMul", ["row", "weights"], ["logits"]),
    ]
    targets = {
        "heads": np.array([batch, 2, 4, -1]),
        "whole": np.array([batch, 8, tokens]),
        "flat": np.array([batch, 8 * tokens]),
    }
    return _saved(file, nodes, targets, batch, constants=constants)


def with_token(file: Path, batch: int = 1) -> Path:
    """As RF-DETR: a token of its own, expanded to the batch when it was exported, stands before the rest."""
    tokens = (SIDE // 8) ** 2
    nodes = [
        helper.make_node("Conv", ["images", "patch"], ["patches"], strides=[8, 8]),
        helper.make_node("Reshape", ["patches", "whole"], ["joined"]),
        helper.make_node("Concat", ["token", "joined"], ["all"], axis=2),
        helper.make_node("ReduceMean", ["all"], ["mean"], axes=[2], keepdims=0),
        helper.make_node("MatMul", ["mean", "few"], ["logits"]),
    ]
    return _saved(file, nodes, {"whole": np.array([batch, 8, tokens])}, batch, token=True)


def over_the_batch(file: Path) -> Path:
    """A leading 1 that is no batch: what is subtracted is the mean over everything."""
    nodes = [
        helper.make_node("Conv", ["images", "patch"], ["patches"], strides=[8, 8]),
        helper.make_node("ReduceMean", ["patches"], ["level"], keepdims=1, axes=[0, 1, 2, 3]),
        helper.make_node("Sub", ["patches", "level"], ["even"]),
        helper.make_node("Relu", ["even"], ["positive"]),
        helper.make_node("ReduceMean", ["positive"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["mean", "few"], ["logits"]),
    ]
    return _saved(file, nodes, {}, 1)


def blind(file: Path) -> Path:
    """It answers the same to every image."""
    nodes = [
        helper.make_node("Conv", ["images", "patch"], ["patches"], strides=[8, 8]),
        helper.make_node("ReduceMean", ["patches"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Sub", ["mean", "mean"], ["none"]),
        helper.make_node("MatMul", ["none", "few"], ["logits"]),
    ]
    return _saved(file, nodes, {}, 1)


def _saved(
    file: Path,
    nodes: Sequence[NodeProto],
    targets: dict[str, Array],
    batch: int,
    *,
    constants: bool = False,
    token: bool = False,
) -> Path:
    random = np.random.default_rng(4)
    weights = {
        "patch": random.normal(0, 0.5, (8, 3, 8, 8)),
        "weights": random.normal(0, 1, (8 * (SIDE // 8) ** 2, CLASSES)),
        "few": random.normal(0, 1, (8, CLASSES)),
    }
    used = {name for node in nodes for name in node.input}
    made = [
        numpy_helper.from_array(values.astype(np.float32), name)
        for name, values in weights.items()
        if name in used
    ]
    if token:
        made.append(
            numpy_helper.from_array(
                np.repeat(random.normal(0, 1, (1, 8, 1)), batch, 0).astype(np.float32), "token"
            )
        )
    held = [numpy_helper.from_array(values.astype(np.int64), name) for name, values in targets.items()]
    if constants:
        nodes = [*(helper.make_node("Constant", [], [one.name], value=one) for one in held), *nodes]
    else:
        made += held
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, CLASSES])],
        made,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = onnx.shape_inference.infer_shapes(model)  # as exporters leave them there
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file
