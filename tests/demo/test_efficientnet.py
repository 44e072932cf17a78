"""The graph that is built computes what the network is, batch norms folded or not."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from carpool.demo.efficientnet import LITE0, LITE1, Variant, efficientnet_lite
from carpool.demo.torch_weights import read_weights
from demo import plain_efficientnet as plain

REPEATS = {1.0: (1, 2, 2, 3, 3, 4, 1), 1.1: (1, 3, 3, 4, 4, 5, 1)}
REAL = {"efficientnet_lite0": LITE0, "efficientnet_lite1": LITE1}


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
    found = run(efficientnet_lite(weights, Variant(side, depth)), images)
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", list(REAL))
def test_the_real_weights_give_what_the_network_gives(
    name: str, source: Any, photo: Any, middle: Any
) -> None:
    variant = REAL[name]
    weights = read_weights(source(name).weights)
    pixels = middle(photo("coffee"), variant.side, Image.Resampling.BICUBIC)
    images = ((pixels - 127) / 128).transpose(2, 0, 1)[None]
    model = efficientnet_lite(weights, variant)
    onnx.checker.check_model(model, full_check=True)
    found = run(model, images)
    assert found == pytest.approx(plain.logits(weights, images, REPEATS[variant.depth]), abs=1e-3)
    assert found.argmax() == 967  # espresso


# Checksums of the graphs, operators and numbers. If a change is meant, raise EDITION in recipes.py:
# then what users have cached is built again.
KNOWN = {"efficientnet_lite0": 2077842614, "efficientnet_lite1": 4284249602}


def described(node: onnx.NodeProto) -> list[Any]:
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    return [node.op_type, list(node.input), list(node.output), sorted(attributes.items())]


@pytest.mark.parametrize("name", list(REAL))
def test_a_change_of_what_is_built_does_not_go_unnoticed(name: str, source: Any) -> None:
    graph = efficientnet_lite(read_weights(source(name).weights), REAL[name]).graph
    seen = zlib.crc32(repr([described(node) for node in graph.node]).encode())
    for constant in graph.initializer:
        seen = zlib.crc32(onnx.numpy_helper.to_array(constant).tobytes(), seen)
    assert seen == KNOWN[name]
