"""EfficientNet-Lite as an ONNX graph, built from its weights.

The network is a stem, seven stages of inverted residual blocks, a head and a linear layer. Lite means ReLU6
everywhere and no squeeze-and-excite. Batch norms are folded into the convolutions before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

Weights = Mapping[str, NDArray[Any]]

OPSET = 17
_IR_VERSION = 8
_EPSILON = 1e-3  # what the batch norms were trained with

# Of each stage: how many blocks at depth 1.0, and the stride of the first of them.
_STAGES = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))


@dataclass(frozen=True, slots=True)
class Variant:
    """One size of the family."""

    side: int  # of the input
    depth: float  # multiplies the blocks of a stage, but not of the first and the last


LITE0 = Variant(side=224, depth=1.0)
LITE1 = Variant(side=240, depth=1.1)


def efficientnet_lite(weights: Weights, variant: Variant) -> ModelProto:
    """`images` [batch, 3, side, side] → `logits` [batch, classes]."""
    return _Graph(weights, variant.side).build(list(_strides(variant.depth)))


def _strides(depth: float) -> Iterator[int]:
    """The stride of every block."""
    for number, (blocks, stride) in enumerate(_STAGES):
        fixed = number in (0, len(_STAGES) - 1)
        yield stride
        yield from [1] * ((blocks if fixed else int(np.ceil(blocks * depth))) - 1)


class _Graph:
    """The nodes so far, the numbers they need, and the shape at this point: pixels a side and channels."""

    def __init__(self, weights: Weights, side: int) -> None:
        self._weights = weights
        self._input_side = self._side = side
        self._width = 3
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []

    def build(self, strides: list[int]) -> ModelProto:
        from onnx import TensorProto, helper

        self._constant("zero", np.float32(0))
        self._constant("six", np.float32(6))
        x = self._convolution("images", "_conv_stem", "_bn0", stride=2)
        for number, stride in enumerate(strides):
            x = self._block(x, f"_blocks.{number}.", stride)
        x = self._convolution(x, "_conv_head", "_bn1")
        x = self._node("GlobalAveragePool", [x], "pooled")
        x = self._node("Flatten", [x], "features")
        classes = self._weights["_fc.weight"].shape[0]
        linear = [self._constant(f"_fc.{part}", self._weights[f"_fc.{part}"]) for part in ("weight", "bias")]
        self._node("Gemm", [x, *linear], "logits", transB=1)

        side = self._input_side
        images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, side, side])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])
        graph = helper.make_graph(self._nodes, "efficientnet-lite", [images], [logits], self._constants)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=_IR_VERSION, producer_name="carpool")

    def _block(self, x: str, at: str, stride: int) -> str:
        """Widen, filter each channel alone, narrow again; where the shapes are equal, add what came in."""
        y, came_in = x, (self._side, self._width)
        if f"{at}_expand_conv.weight" in self._weights:
            y = self._convolution(y, f"{at}_expand_conv", f"{at}_bn0")
        y = self._convolution(y, f"{at}_depthwise_conv", f"{at}_bn1", stride=stride)
        y = self._convolution(y, f"{at}_project_conv", f"{at}_bn2", clip=False)
        return self._node("Add", [y, x], f"{at}sum") if came_in == (self._side, self._width) else y

    def _convolution(self, x: str, name: str, norm: str, *, stride: int = 1, clip: bool = True) -> str:
        weight, bias = _folded(self._weights, name, norm)
        self._width, kernel = weight.shape[0], weight.shape[-1]
        before, after = self._padding(kernel, stride)
        y = self._node(
            "Conv",
            [x, self._constant(f"{name}.weight", weight), self._constant(f"{name}.bias", bias)],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=self._width if name.endswith("_depthwise_conv") else 1,
        )
        return self._node("Clip", [y, "zero", "six"], f"{name}.relu6") if clip else y

    def _padding(self, kernel: int, stride: int) -> tuple[int, int]:
        """What TensorFlow calls SAME: the output has ceil(side ÷ stride) pixels; an odd pixel goes after."""
        side = -(-self._side // stride)
        total = max((side - 1) * stride + kernel - self._side, 0)
        self._side = side
        return total // 2, total - total // 2

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: NDArray[Any] | np.float32) -> str:
        from onnx import numpy_helper

        self._constants.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name


def _folded(weights: Weights, name: str, norm: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A convolution that does what it and the batch norm after it did."""
    gamma, beta, mean, variance = (
        weights[f"{norm}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    gain = gamma / np.sqrt(variance + _EPSILON)
    weight = weights[f"{name}.weight"].astype(np.float64) * gain[:, None, None, None]
    return weight.astype(np.float32), (beta - mean * gain).astype(np.float32)
