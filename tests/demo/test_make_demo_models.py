"""The script that makes the demo models: the graph computes what the network is, in fewer bytes."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo import plain_efficientnet as plain

_FILE = Path(__file__).parents[2] / "tools" / "make_demo_models.py"
_spec = spec_from_file_location("make_demo_models", _FILE)
assert _spec is not None
assert _spec.loader is not None
tool = sys.modules["make_demo_models"] = module_from_spec(_spec)
_spec.loader.exec_module(tool)

REPEATS = {1.0: (1, 2, 2, 3, 3, 4, 1), 1.1: (1, 3, 3, 4, 4, 5, 1)}


def run(model: onnx.ModelProto, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [found] = session.run(["logits"], {"images": images})
    return np.asarray(found)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    side=st.integers(1, 40),
    depth=st.sampled_from(list(REPEATS)),
    batch=st.integers(1, 3),
)
def test_it_computes_what_the_network_is(seed: int, side: int, depth: float, batch: int) -> None:
    """Odd sides too: there the padding is what is easily wrong."""
    weights = plain.random_weights(seed, REPEATS[depth])
    images = np.random.default_rng(seed).normal(size=(batch, 3, side, side)).astype(np.float32)
    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    expected = plain.logits(exact, images.astype(np.float64), REPEATS[depth])
    found = run(tool.efficientnet_lite(weights, tool.Variant(side, depth)), images)
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("bits", "wide", "most"), [(8, 128, 0.03), (6, 512, 0.08)])
def test_smaller_weights_are_close(bits: int, wide: int, most: float) -> None:
    """Whole numbers of 8 bits or packed ones, FP16 and what is left alone."""
    random = np.random.default_rng(3)
    sizes = {"large": (wide, wide), "small": (wide, 32), "tiny": (32,)}
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "large"], ["y"]),
            onnx.helper.make_node("MatMul", ["y", "small"], ["z"]),
            onnx.helper.make_node("Add", ["z", "tiny"], ["logits"]),
        ],
        "layers",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", wide])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 32])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", tool.OPSET)], ir_version=8
    )
    x = random.normal(size=(4, wide)).astype(np.float32)
    expected = x @ weights["large"] @ weights["small"] + weights["tiny"]
    written = tool.smaller(model, bits=bits)
    onnx.checker.check_model(written, full_check=True)
    assert written.ByteSize() < wide * wide * {8: 1.3, 6: 0.75}[bits] + 2 * wide * 32 + 2000
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"x": x})
    assert np.abs(found - expected).max() < most * np.abs(expected).max()
