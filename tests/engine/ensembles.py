"""Ensembles of small ONNX models, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import helper

from backends import onnx_models

Pairs = Sequence[tuple[str, str]]


def adds(folder: Path, name: str, amount: float, *, batched: bool = True, version: int = 1) -> Path:
    """y = x + amount, of three numbers; `batched` or of just three."""
    shape: tuple[int | str, ...] = ("batch", 3) if batched else (3,)
    nodes = [helper.make_node("Add", ["x", "amount"], ["y"])]
    weights = {"amount": np.array([amount], np.float32)}
    tensor = [("x", "FP32", shape)], [("y", "FP32", shape)]
    onnx_models.write(folder / name / str(version) / "model.onnx", nodes, *tensor, weights)
    return _config(folder / name, "x", "y", [3], 8 if batched else 0)


def joins(folder: Path, name: str) -> Path:
    """total = a + b and product = a * b."""
    shape = ("batch", 3)
    nodes = [
        helper.make_node("Add", ["a", "b"], ["total"]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
    ]
    inputs = [("a", "FP32", shape), ("b", "FP32", shape)]
    outputs = [("total", "FP32", shape), ("product", "FP32", shape)]
    onnx_models.write(folder / name / "1" / "model.onnx", nodes, inputs, outputs)
    return folder / name


def _config(folder: Path, x: str, y: str, dims: Sequence[int], max_batch: int) -> Path:
    tensor = f"data_type: TYPE_FP32 dims: [ {', '.join(map(str, dims))} ]"
    (folder / "config.pbtxt").write_text(
        f'max_batch_size: {max_batch}\ninput [ {{ name: "{x}" {tensor} }} ]\n'
        f'output [ {{ name: "{y}" {tensor} }} ]\nversion_policy {{ all {{}} }}\n'
    )
    return folder


def step(model: str, inputs: Pairs, outputs: Pairs, version: int = -1) -> str:
    maps = [("input_map", pair) for pair in inputs] + [("output_map", pair) for pair in outputs]
    listed = " ".join(f'{side} {{ key: "{key}" value: "{value}" }}' for side, (key, value) in maps)
    return f'step {{ model_name: "{model}" model_version: {version} {listed} }}'


def text(
    *steps: str,
    inputs: Sequence[str] = ("in",),
    outputs: Sequence[str] = ("out",),
    max_batch: int = 8,
    more: str = "",
) -> str:
    """The settings of an ensemble whose tensors are three numbers each."""

    def tensors(kind: str, names: Sequence[str]) -> str:
        return "\n".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 3 ] }}' for name in names)

    return (
        f'platform: "ensemble"\nmax_batch_size: {max_batch}\n{tensors("input", inputs)}\n'
        f"{tensors('output', outputs)}\n{more}\nensemble_scheduling {{\n" + "\n".join(steps) + "\n}\n"
    )


def promise(slo_ms: float) -> str:
    return f'parameters {{ key: "slo_ms" value {{ string_value: "{slo_ms:g}" }} }}'


def write(folder: Path, name: str, settings: str) -> Path:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(settings)
    return folder / name


def chain(folder: Path, name: str = "chain", **more: str) -> Path:
    """out = in + 1 + 10."""
    adds(folder, "one", 1)
    adds(folder, "ten", 10)
    steps = step("one", [("x", "in")], [("y", "mid")]), step("ten", [("x", "mid")], [("y", "out")])
    return write(folder, name, text(*steps, **more))  # type: ignore[arg-type]
