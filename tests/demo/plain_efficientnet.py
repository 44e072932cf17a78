"""EfficientNet-Lite in plain numpy, layer by layer and with its batch norms, to compare the graph with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# kernel, stride and how many blocks of each stage, as the paper's table has them
STAGES = ((3, 1, 1), (3, 2, 2), (5, 2, 2), (3, 2, 3), (5, 1, 3), (5, 2, 4), (3, 1, 1))


def blocks(repeats: Sequence[int]) -> list[tuple[int, int]]:
    """Kernel and stride of every block."""
    found = []
    for (kernel, stride, _), count in zip(STAGES, repeats, strict=True):
        found += [(kernel, stride if number == 0 else 1) for number in range(count)]
    return found


def logits(weights: dict[str, Array], images: Array, repeats: Sequence[int]) -> Array:
    x = relu6(norm(weights, "_bn0", convolve(images, weights["_conv_stem.weight"], 2)))
    for number, (_, stride) in enumerate(blocks(repeats)):
        x = block(weights, f"_blocks.{number}.", x, stride)
    x = relu6(norm(weights, "_bn1", convolve(x, weights["_conv_head.weight"], 1)))
    return x.mean(axis=(2, 3)) @ weights["_fc.weight"].T + weights["_fc.bias"]


def block(weights: dict[str, Array], at: str, x: Array, stride: int) -> Array:
    y = x
    if f"{at}_expand_conv.weight" in weights:
        y = relu6(norm(weights, f"{at}_bn0", convolve(y, weights[f"{at}_expand_conv.weight"], 1)))
    y = relu6(
        norm(weights, f"{at}_bn1", convolve(y, weights[f"{at}_depthwise_conv.weight"], stride, alone=True))
    )
    y = norm(weights, f"{at}_bn2", convolve(y, weights[f"{at}_project_conv.weight"], 1))
    return x + y if x.shape == y.shape else y


def relu6(x: Array) -> Array:
    return np.minimum(np.maximum(x, 0), 6)


def norm(weights: dict[str, Array], name: str, x: Array) -> Array:
    mean, variance, gain, bias = (
        weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(variance + 1e-3) * gain + bias


def convolve(x: Array, weight: Array, stride: int, *, alone: bool = False) -> Array:
    """Zeros around, as TensorFlow's SAME puts them; `alone`: one filter for each channel."""
    kernel, side = weight.shape[-1], x.shape[-1]
    out = -(-side // stride)
    total = max((out - 1) * stride + kernel - side, 0)
    around = (total // 2, total - total // 2)
    padded = np.pad(x, ((0, 0), (0, 0), around, around))
    result: Array = np.zeros((x.shape[0], weight.shape[0], out, out), x.dtype)
    for i in range(kernel):
        for j in range(kernel):
            seen = padded[
                :, :, i : i + (out - 1) * stride + 1 : stride, j : j + (out - 1) * stride + 1 : stride
            ]
            if alone:
                result += seen * weight[:, 0, i, j][:, None, None]
            else:
                result += np.einsum("bchw,oc->bohw", seen, weight[:, :, i, j], optimize=True)
    return result


def random_weights(seed: int, repeats: Sequence[int], classes: int = 5) -> dict[str, Array]:
    """A network of the same build with few channels."""
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}

    def conv(name: str, shape: tuple[int, ...]) -> None:
        made[f"{name}.weight"] = rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)

    def batch_norm(name: str, width: int) -> None:
        for part, low, high in (
            ("weight", 0.5, 2),
            ("bias", -1, 2),
            ("running_mean", -1, 1),
            ("running_var", 0, 2),
        ):
            made[f"{name}.{part}"] = rng.uniform(low, high, width).astype(np.float32)

    def linear(name: str, shape: tuple[int, int]) -> None:
        conv(name, shape)
        made[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32)

    width = 4
    conv("_conv_stem", (width, 3, 3, 3))
    batch_norm("_bn0", width)
    for number, (kernel, stride) in enumerate(blocks(repeats)):
        at, inner = f"_blocks.{number}.", width if number == 0 else 3 * width
        narrow = width if stride == 1 and number else width + 1
        if number:
            conv(f"{at}_expand_conv", (inner, width, 1, 1))
            batch_norm(f"{at}_bn0", inner)
        conv(f"{at}_depthwise_conv", (inner, 1, kernel, kernel))
        batch_norm(f"{at}_bn1", inner)
        conv(f"{at}_project_conv", (narrow, inner, 1, 1))
        batch_norm(f"{at}_bn2", narrow)
        width = narrow
    conv("_conv_head", (2 * width, width, 1, 1))
    batch_norm("_bn1", 2 * width)
    linear("_fc", (classes, 2 * width))
    return made
