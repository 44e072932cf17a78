"""The layers of an ONNX file that its picture meets first: does the model make values of pixels itself, and
how many channels has the picture?

Only what decides is read: nodes from the input on, and constants of a few numbers. Nothing is run, weights
are stepped over, and every length is bounded, for files come from strangers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

from carpool.config.presets import like_imagenet
from carpool.config.protobuf_fields import fields_in, read_varint, walk

_MOST_NODES = 256  # that are looked at: what normalises a picture comes first
_LARGEST_NODE = 1 << 14
_LARGEST_CONSTANT = 1 << 10  # bytes: a few numbers; and as much is read of a weight, for its shape
_MOST_DIMS = 16
_NODE, _INITIALIZER, _INPUT = 1, 5, 11  # fields of GraphProto
_PASS = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Clip")
_FLOAT, _UINT8, _INT8, _INT32, _INT64, _DOUBLE = 1, 2, 3, 6, 7, 11  # of TensorProto
_TYPES = {_FLOAT: "<f4", _UINT8: "u1", _INT8: "i1", _INT32: "<i4", _INT64: "<i8", _DOUBLE: "<f8"}

Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"

BYTES, FRACTIONS, SYMMETRIC = "from 0 to 255", "from 0 to 1", "from -1 to 1"
"""What the input takes."""


class FirstLayers(NamedTuple):
    """`takes` is one of the above."""

    takes: str
    words: str
    in_order: bool = False  # what is taken away of each channel is ImageNet's mean, red first


class GraphStart(NamedTuple):
    """Describes what a graph says of its picture."""

    layers: FirstLayers | None = None
    channels: int | None = None  # that the first convolution takes
    symbol: str = ""  # what the second dimension of the input is called, where it has no number


@dataclass(slots=True)
class _Node:
    op: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constant: Numbers | None = None
    epsilon: float = 1e-5
    group: int = 1


@dataclass(slots=True)
class _Input:
    name: str = ""
    symbols: list[str] = field(default_factory=list)  # by dimension; empty: a number


def read_graph_start(file: BinaryIO, size: int) -> GraphStart:
    """`file` stands at the beginning of a graph of so many bytes. Raises ValueError where it is none."""
    nodes: list[_Node] = []
    constants: dict[str, Numbers] = {}
    taken_by: dict[str, int] = {}  # channels, by the name of a convolution's weight
    weights: set[str] = set()
    inputs: list[_Input] = []
    for number, length in walk(file, size):
        if number == _NODE and length <= _LARGEST_NODE and len(nodes) < _MOST_NODES:
            nodes.append(_node(file.read(length)))
        elif number == _INITIALIZER:
            head = file.read(min(length, _LARGEST_CONSTANT))
            name, dims = _shape(head)
            weights.add(name)
            if len(dims) == 4:
                taken_by[name] = dims[1]
            values = _tensor(head)[1] if length == len(head) else None
            if values is not None:
                constants[name] = values
        elif number == _INPUT and length <= _LARGEST_NODE:
            inputs.append(_input(file.read(length)))
    constants |= {one.outputs[0]: one.constant for one in nodes if one.constant is not None and one.outputs}
    taken = [one for one in inputs if one.name not in weights]
    if len(taken) != 1:
        return GraphStart()
    symbol = taken[0].symbols[1] if len(taken[0].symbols) == 4 else ""
    channels = _channels(nodes, taken_by, taken[0].name)
    return GraphStart(_judge(nodes, constants, taken[0].name), channels, symbol)


_KEEPS_CHANNELS = (
    *("Identity", "Cast", "Clip", "Pad", "QuantizeLinear", "DequantizeLinear"),
    *("Add", "Sub", "Mul", "Div", "BatchNormalization"),
)


def _channels(nodes: Sequence[_Node], taken_by: Mapping[str, int], name: str) -> int | None:
    """Returns the channels of the first convolution that the picture reaches, layer by layer."""
    reached = {name}
    for one in nodes:
        if not one.inputs or not one.outputs or one.inputs[0] not in reached:
            continue
        if one.op == "Conv" and len(one.inputs) > 1:
            source = next((made.inputs for made in nodes if one.inputs[1] in made.outputs), one.inputs[1:])
            found = taken_by.get(source[0]) if source else None
            return None if found is None else found * one.group
        if one.op in _KEEPS_CHANNELS:
            reached.add(one.outputs[0])
    return None


def _judge(nodes: Sequence[_Node], constants: Mapping[str, Numbers], name: str) -> FirstLayers | None:
    """Follows the picture as long as it is only scaled and shifted: gain × pixel + bias, for each channel."""
    gain, bias = np.ones(1), np.zeros(1)
    done: list[str] = []
    while True:
        users = [one for one in nodes if name in one.inputs]
        if len(users) != 1 or not users[0].outputs:
            break
        one = users[0]
        if one.op == "QuantizeLinear" and not done:
            return _quantised(one, constants)
        step = _step(one, constants, name)
        if step is None:
            break
        if one.op not in _PASS:
            done.append(one.op)
        gain, bias = gain * step[0], bias * step[0] + step[1]
        if gain.size not in (1, 3) or len(done) > 8:
            return None
        name = one.outputs[0]
    takes = _range(gain, bias) if done else None
    if takes is None:
        return None
    words = f"its first layers ({', '.join(done)}) make values of pixels {takes}"
    return FirstLayers(takes, words, like_imagenet((-bias / gain).ravel()))


def _step(node: _Node, constants: Mapping[str, Numbers], name: str) -> tuple[Numbers, Numbers] | None:
    """Returns, of one layer, what it multiplies with, and what it adds."""
    one, nothing = np.ones(1), np.zeros(1)
    if node.op in _PASS:
        return one, nothing
    if node.op == "BatchNormalization" and len(node.inputs) >= 5:
        found = [constants.get(key) for key in node.inputs[1:5]]
        if any(part is None for part in found):
            return None
        scale, shift, mean, variance = (part for part in found if part is not None)
        gain = scale / np.sqrt(np.maximum(variance + node.epsilon, 1e-12))
        return gain, shift - mean * gain
    if node.op not in ("Add", "Sub", "Mul", "Div") or len(node.inputs) != 2:
        return None
    other = constants.get(node.inputs[1] if node.inputs[0] == name else node.inputs[0])
    first = node.inputs[0] == name
    if other is None or other.size not in (1, 3) or (not first and node.op in ("Sub", "Div")):
        return None
    if node.op == "Div" and not other.all():
        return None
    steps = {"Add": (one, other), "Sub": (one, -other), "Mul": (other, nothing)}
    return steps.get(node.op) or (1 / other, nothing)


def _range(gain: Numbers, bias: Numbers) -> str | None:
    """Returns the range of pixels that this maps to the few units around 0 that networks are trained with;
    None for any other, which may be the network's own layer and proves nothing."""
    if not np.isfinite(gain).all() or not np.isfinite(bias).all() or (gain <= 0).any():
        return None
    if (gain == 1).all() and not bias.any():
        return None
    if (255 * gain >= 0.9).all() and (255 * gain <= 8).all() and (np.abs(bias) <= 4).all():
        return BYTES
    if (gain >= 0.9).all() and (gain <= 8).all() and (bias <= 0.1).all() and (bias >= -4).all():
        return FRACTIONS
    shifted = (np.abs(gain - 1) < 0.05).all() and (bias <= -80).all() and (bias >= -150).all()
    return BYTES if shifted else None


def _quantised(node: _Node, constants: Mapping[str, Numbers]) -> FirstLayers | None:
    """Returns what the whole numbers of an input that is quantised stand for: what it was calibrated with."""
    scale = constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    zero = constants.get(node.inputs[2]) if len(node.inputs) > 2 else np.zeros(1)
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    return calibrated(float(scale[0]), float(zero[0]))


def calibrated(scale: float, zero: float) -> FirstLayers | None:
    """Computes the layers from the scale and the zero point of an input in 8 bits, whose lowest value is 0 or
    -128."""
    for lowest in (0, -128):
        low, high = scale * (lowest - zero), scale * (lowest + 255 - zero)
        for takes, (begin, end) in {BYTES: (0, 255), FRACTIONS: (0, 1), SYMMETRIC: (-1, 1)}.items():
            near = 0.03 * (end - begin)
            if abs(low - begin) <= near and abs(high - end) <= near:
                return FirstLayers(takes, f"its input is quantised for values {takes}")
    return None


# ---- protobuf, as ONNX has it


def _node(data: bytes) -> _Node:
    node = _Node()
    for number, value in fields_in(data):
        if number == 1:
            node.inputs.append(value.decode("utf-8", "replace"))
        elif number == 2:
            node.outputs.append(value.decode("utf-8", "replace"))
        elif number == 4:
            node.op = value.decode("utf-8", "replace")
        elif number == 5:
            _attribute(node, dict(fields_in(value)))
    if node.op != "Constant":
        node.constant = None
    return node


def _attribute(node: _Node, said: Mapping[int, bytes]) -> None:
    name = said.get(1, b"")
    if name == b"value" and 5 in said and len(said[5]) <= _LARGEST_CONSTANT:
        node.constant = _tensor(said[5])[1]
    elif name == b"value_float" and len(said.get(2, b"")) == 4:
        node.constant = np.array(struct.unpack("<f", said[2]), np.float64)
    elif name == b"epsilon" and len(said.get(2, b"")) == 4:
        node.epsilon = struct.unpack("<f", said[2])[0]
    elif name == b"group" and 3 in said:
        node.group = _varint(said[3])


def _tensor(data: bytes) -> tuple[str, Numbers | None]:
    """Returns the name, and the numbers if they stand here in a datatype that is known."""
    name, kind, raw, listed = "", 0, b"", b""
    for number, value in fields_in(data):
        if number == 8:
            name = value.decode("utf-8", "replace")
        elif number == 2:
            kind = _varint(value)
        elif number == 9:
            raw = value
        elif number == 4:
            listed += value
    form = "<f4" if listed else _TYPES.get(kind)
    held = listed or raw
    if form is None or not held or len(held) % np.dtype(form).itemsize:
        return name, None
    return name, np.frombuffer(held, form).astype(np.float64)


def _shape(data: bytes) -> tuple[str, list[int]]:
    """Returns a tensor's name and its dimensions, from its first bytes: its numbers stand behind them."""
    name, dims = "", list[int]()
    with suppress(ValueError):
        for number, value in fields_in(data):
            if number == 1:
                dims += _varints(value)
            elif number == 8:
                name = value.decode("utf-8", "replace")
    return name, dims


def _varints(data: bytes) -> list[int]:
    """Returns the numbers of a field that may be packed, of which a shape has a few."""
    view, found = BytesIO(data), list[int]()
    while view.tell() < len(data) and len(found) < _MOST_DIMS:
        found.append(read_varint(view))
    return found


def _input(data: bytes) -> _Input:
    """Reads ValueInfoProto: its name, and in its type's shape what each dimension is called."""
    found = _Input()
    for number, value in fields_in(data):
        if number == 1:
            found.name = value.decode("utf-8", "replace")
        elif number == 2:
            shape = _within(_within(value, 1), 2)
            dims = [part for key, part in fields_in(shape) if key == 1]
            found.symbols = [_within(part, 2).decode("utf-8", "replace")[:80] for part in dims[:_MOST_DIMS]]
    return found


def _within(data: bytes, number: int) -> bytes:
    """Returns the bytes of one field of a small message; none, where it is not there."""
    return next((value for key, value in fields_in(data) if key == number), b"")


def _varint(data: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[:9]))
