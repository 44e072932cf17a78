"""ONNX graphs whose first axis is that of a batch, or only looks like it. Weights are random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, helper

from backends.onnx_models import Dims, write

FEATURES = 6
_RANDOM = np.random.default_rng(7)


def _weights(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def two_towers(path: Path, *, named: bool = True) -> Path:
    """CLIP as optimum exports it: texts and images have batches of their own, and each meets each."""
    texts, images = ("text_batch_size", "image_batch_size") if named else ("", "")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("ReduceMean", ["words", "axis"], ["text_embeds"], keepdims=0),
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["image_embeds"]),
        helper.make_node("Transpose", ["text_embeds"], ["texts"], perm=[1, 0]),
        helper.make_node("MatMul", ["image_embeds", "texts"], ["logits_per_image"]),
        helper.make_node("Transpose", ["logits_per_image"], ["logits_per_text"], perm=[1, 0]),
    ]
    pixels: Dims = (images, 3, 8, 8)
    return write(
        path,
        nodes,
        [("input_ids", "INT64", (texts, "sequence_length")), ("pixel_values", "FP32", pixels)],
        [
            ("logits_per_image", "FP32", (images, texts)),
            ("logits_per_text", "FP32", (texts, images)),
            ("text_embeds", "FP32", (texts, FEATURES)),
            ("image_embeds", "FP32", (images, FEATURES)),
        ],
        {
            "table": _weights(50, FEATURES),
            "axis": np.array([1], np.int64),
            "weights": _weights(3 * 8 * 8, FEATURES),
        },
    )


def points(path: Path, *, named: bool = True, index: str = "image_index") -> Path:
    """Clicks on images: each names the image that it means by its number in the batch."""
    rows = "clicks" if named else "batch"
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["seen"]),
        helper.make_node("Gather", ["seen", index], ["meant"]),
        helper.make_node("MatMul", ["points", "spread"], ["places"]),
        helper.make_node("Add", ["meant", "places"], ["masks"]),
    ]
    return write(
        path,
        nodes,
        [
            ("images", "FP32", ("batch", 3, 4, 4)),
            (index, "INT64", (rows,)),
            ("points", "FP32", (rows, 2)),
        ],
        [("masks", "FP32", (rows, FEATURES))],
        {"weights": _weights(48, FEATURES), "spread": _weights(2, FEATURES)},
    )


def rows(path: Path, nodes: list[NodeProto], output: Dims = ("batch", FEATURES), kind: str = "FP32") -> Path:
    """One input `x` [batch, 6], and the output `y` of these nodes, which may use some constants."""
    constants = {
        "weights": _weights(FEATURES, FEATURES),
        "zero": np.array([0], np.int64),
        "first": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "row": np.array([1, FEATURES], np.float32),
        "scale": np.ones(FEATURES, np.float32),
        "k": np.array([3], np.int64),
    }
    used = {name for node in nodes for name in node.input}
    weights = {name: value for name, value in constants.items() if name in used}
    return write(path, nodes, [("x", "FP32", ("batch", FEATURES))], [("y", kind, output)], weights)


def _node(kind: str, inputs: str, outputs: str, **attributes: object) -> NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


MIXED = {
    "the mean of the batch": [
        _node("ReduceMean", "x zero", "mean", keepdims=1),
        _node("Sub", "x mean", "y"),
    ],
    "a running sum": [_node("CumSum", "x first", "y")],
    "normalised over the batch": [
        _node("ReduceMean", "x zero", "mean", keepdims=1),
        _node("Sub", "x mean", "centred"),
        _node("ReduceL2", "centred zero", "spread", keepdims=1),
        _node("Add", "spread scale", "safe"),
        _node("Div", "centred safe", "y"),
    ],
    "attention between rows": [
        _node("Transpose", "x", "t", perm=[1, 0]),
        _node("MatMul", "x t", "likeness"),
        _node("Softmax", "likeness", "shares", axis=1),
        _node("MatMul", "shares x", "y"),
    ],
    "divided by the size of the batch": [
        _node("Shape", "x", "size", end=1),
        _node("Cast", "size", "count", to=1),
        _node("Div", "x count", "y"),
    ],
    "the number of the row": [
        _node("Shape", "x", "size", end=1),
        _node("Squeeze", "size", "count"),
        _node("Range", "first count one", "numbers"),
        _node("Cast", "numbers", "places", to=1),
        _node("Unsqueeze", "places one_axis", "column"),
        _node("Add", "x column", "y"),
    ],
    "a batch of 1 in a node": [_node("Cast", "row", "shape", to=7), _node("Reshape", "x shape", "y")],
}


def mixed(path: Path, which: str) -> Path:
    nodes = list(MIXED[which])
    if which == "the number of the row":
        nodes.insert(0, helper.make_node("Constant", [], ["one_axis"], value_ints=[1]))
    return rows(path, nodes)


def quantised(path: Path) -> Path:
    """A product of whole numbers: what stands for 1 follows from all rows together."""
    nodes = [
        _node("DynamicQuantizeLinear", "x", "q scale zero_point"),
        _node("DequantizeLinear", "q scale zero_point", "z"),
        _node("MatMul", "z weights", "y"),
    ]
    made = {"weights": _weights(FEATURES, FEATURES)}
    shape: Dims = ("batch", FEATURES)
    return write(path, nodes, [("x", "FP32", shape)], [("y", "FP32", shape)], made)


RIGHT: dict[str, tuple[list[NodeProto], Dims, str]] = {
    "a product": ([_node("MatMul", "x weights", "y")], ("batch", FEATURES), "FP32"),
    "a soft maximum": (
        [_node("MatMul", "x weights", "z"), _node("Softmax", "z", "y", axis=1)],
        ("batch", FEATURES),
        "FP32",
    ),
    "the best class": (
        [_node("MatMul", "x weights", "z"), _node("ArgMax", "z", "y", axis=1, keepdims=1)],
        ("batch", 1),
        "INT64",
    ),
    "sorted": ([_node("TopK", "x k", "y places", axis=1)], ("batch", 3), "FP32"),
    "random": ([_node("RandomNormalLike", "x", "y")], ("batch", FEATURES), "FP32"),
    "always the same": (
        [_node("Sub", "x x", "y")],
        ("batch", FEATURES),
        "FP32",
    ),
}


def right(path: Path, which: str) -> Path:
    nodes, output, kind = RIGHT[which]
    return rows(path, nodes, output, kind)
