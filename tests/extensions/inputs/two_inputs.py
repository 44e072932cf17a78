"""ONNX files with a picture and one more input, as their families' exporters write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from carpool.types import Array

SIDE = 64
WORDS = ("a", "photo", "of", "cat", "dog", "red", "car")


def deployed(file: Path, boxes: Array, scores: Array, labels: Array, rows: int | str = "N") -> Path:
    """As D-FINE's and RT-DETR's deploy form: centres in fractions of the size that is given, as corners."""
    half = boxes[:, 2:] / 2
    corners = np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Mul", ["mean", "nothing"], ["none4"]),
        helper.make_node("Squeeze", ["none4", "last"], ["none"]),
        helper.make_node("Cast", ["orig_target_sizes"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["wide", "wide"], ["sides"], axis=1),
        helper.make_node("Unsqueeze", ["sides", "middle"], ["scale"]),
        helper.make_node("Mul", ["corners", "scale"], ["boxes"]),
        helper.make_node("Squeeze", ["none", "middle2"], ["flat"]),
        helper.make_node("Add", ["found", "flat"], ["scores"]),
        helper.make_node("Cast", ["flat"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Add", ["kinds", "whole"], ["labels"]),
    ]
    count = len(boxes)
    constants = {
        "nothing": np.zeros((), np.float32),
        "last": np.array([3]),
        "middle": np.array([1]),
        "middle2": np.array([2]),
        "corners": corners[None],
        "found": scores[None].astype(np.float32),
        "kinds": labels[None].astype(np.int64),
    }
    inputs = [
        helper.make_tensor_value_info("images", TensorProto.FLOAT, [rows, 3, SIDE, SIDE]),
        helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, [rows, 2]),
    ]
    outputs = [
        helper.make_tensor_value_info("labels", TensorProto.INT64, [rows, count]),
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [rows, count, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [rows, count]),
    ]
    return _saved(file, nodes, inputs, outputs, constants)


def towers(file: Path) -> Path:
    """As CLIP by optimum: a row for each picture, a column for each text."""
    random = np.random.default_rng(5)
    nodes = [
        helper.make_node("ReduceMean", ["pixel_values"], ["image_embeds"], axes=[2, 3], keepdims=0),
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["kept", "end"], ["wide"]),
        helper.make_node("Mul", ["words", "wide"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "one"], ["text_embeds"], keepdims=0),
        helper.make_node("Transpose", ["text_embeds"], ["turned"]),
        helper.make_node("MatMul", ["image_embeds", "turned"], ["logits_per_image"]),
    ]
    constants = {
        "table": random.normal(0, 1, (16, 3)).astype(np.float32),
        "end": np.array([-1]),
        "one": np.array([1]),
    }
    texts = ["text_batch_size", "sequence_length"]
    pixels = ["image_batch_size", 3, SIDE, SIDE]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, texts),
        helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, pixels),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, texts),
    ]
    scores = ["image_batch_size", "text_batch_size"]
    outputs = [
        helper.make_tensor_value_info("logits_per_image", TensorProto.FLOAT, scores),
        helper.make_tensor_value_info("text_embeds", TensorProto.FLOAT, ["text_batch_size", 3]),
        helper.make_tensor_value_info("image_embeds", TensorProto.FLOAT, ["image_batch_size", 3]),
    ]
    return _saved(file, nodes, inputs, outputs, constants)


def conditioned(file: Path) -> Path:
    """A network whose second input nobody knows: it scales what the first gives."""
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "gain"], ["logits"]),
    ]
    inputs = [
        helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, SIDE, SIDE]),
        helper.make_tensor_value_info("gain", TensorProto.FLOAT, ["n", 3]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])]
    return _saved(file, nodes, inputs, outputs, {})


def tokenizer(folder: Path) -> None:
    """Splits at spaces; a word's token is its place among WORDS, after padding and what is unknown."""
    vocabulary = {"<pad>": 0, "<unk>": 1, **{word: 2 + at for at, word in enumerate(WORDS)}}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "model_max_length": 6}))


def _saved(
    file: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, Array],
) -> Path:
    made = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "two", inputs, outputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(file))
    return file
