"""ONNX files with a detector's output and nothing else: a mean colour, times weights, through a sigmoid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, ANCHORS = 64, 84  # 8×8 + 4×4 + 2×2 cells


def detector(file: Path, classes: int, *, dynamic: bool = False, **metadata: str) -> Path:
    """[4 + classes, anchors] for pictures of 64 × 64; with dynamic axes its file says neither."""
    fields = 4 + classes
    weights = np.random.default_rng(1).normal(0, 2, (3, fields * ANCHORS)).astype(np.float32)
    shape = np.array([-1, fields, ANCHORS], np.int64)
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["flat"]),
        helper.make_node("Sigmoid", ["flat"], ["fractions"]),
        helper.make_node("Reshape", ["fractions", "shape"], ["rows"]),
        helper.make_node("Mul", ["rows", "units"], ["output0"]),
    ]
    units = np.array([[SIDE]] * 4 + [[1]] * classes, np.float32)  # boxes are in pixels
    sides = ["height", "width"] if dynamic else [SIDE, SIDE]
    rest = ["fields", "anchors"] if dynamic else [fields, ANCHORS]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, *sides])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["batch", *rest])],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(shape, "shape"),
            numpy_helper.from_array(units, "units"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file


ULTRALYTICS = {"task": "detect", "names": "{0: 'nut', 1: 'bolt'}", "imgsz": "[64, 64]", "stride": "32"}
