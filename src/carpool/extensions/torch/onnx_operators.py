"""Computes each ONNX operator in PyTorch: the table that `torch_onnx` runs a graph with.

Sizes are no tensors here. What a graph computes from shapes (`Shape`, `Gather`, `Concat` …) are numbers and
tuples of numbers, which a compiler takes for constants and for which a captured graph need not ask a device.
An operator gets its node and its inputs; an input that was left out is None.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from carpool.extensions.torch.fused_convolution import convolution_relu

Value: TypeAlias = Any
"""A tensor; of sizes a number, or a tuple of numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """`frees` are the values that no later node needs."""

    kind: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    frees: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


class NoCounterpart(Exception):
    """Means that the operator, or this form of it, has no counterpart in PyTorch."""


Operator: TypeAlias = Callable[..., Value]
OPERATORS: dict[str, Operator] = {}
SIZES_AT: dict[str, tuple[int, ...]] = {}
"""By operator: which of its inputs are sizes, axes or counts, never tensors."""


def _of(*kinds: str, sizes: tuple[int, ...] = ()) -> Callable[[Operator], Operator]:
    def register(run: Operator) -> Operator:
        for kind in kinds:
            OPERATORS[kind] = run
            SIZES_AT[kind] = sizes
        return run

    return register


def whole(value: Value) -> tuple[int, ...]:
    """Sizes, whether they are one number, several, or a tensor that only the run knows."""
    if isinstance(value, Tensor):
        return tuple(int(one) for one in value.reshape(-1).tolist())
    return tuple(map(int, value)) if isinstance(value, tuple) else (int(value),)


def as_tensor(value: Value, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    made = torch.tensor(value, device=like.device)
    return made.to(like.dtype) if made.is_floating_point() and like.is_floating_point() else made


def _number(value: Value) -> Any:
    """Returns one number, for what takes no tensor in its place."""
    if isinstance(value, Tensor):
        return value.item()
    return value[0] if isinstance(value, tuple) else value


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    like = next(value for value in values if isinstance(value, Tensor))
    return [as_tensor(value, like) for value in values]


# ---- element by element

_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name.lower())
        for name in [
            "Abs",
            "Acos",
            "Asin",
            "Atan",
            "Ceil",
            "Cos",
            "Cosh",
            "Erf",
            "Exp",
            "Floor",
            "Log",
            "Neg",
            "Reciprocal",
            "Relu",
            "Round",
            "Sigmoid",
            "Sign",
            "Sin",
            "Sinh",
            "Sqrt",
            "Tan",
            "Tanh",
            "IsNaN",
        ]
    },
    "Not": torch.logical_not,
    "IsInf": torch.isinf,
    "HardSwish": functional.hardswish,
    "Mish": functional.mish,
    "Selu": functional.selu,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True),
}
_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "Abs": abs,
    "Ceil": math.ceil,
    "Exp": math.exp,
    "Floor": math.floor,
    "Log": math.log,
    "Not": operator.not_,
    "Reciprocal": lambda x: 1 / x,
    "Round": round,
    "Sqrt": math.sqrt,
}


def _each(node: Node, x: Value, *_: Value) -> Value:
    if isinstance(x, Tensor):
        return _EACH[node.kind](x)
    if node.kind not in _OF_NUMBERS:
        raise NoCounterpart(f"{node.kind} of sizes")
    function = _OF_NUMBERS[node.kind]
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


for _name in _EACH:
    OPERATORS[_name] = _each
OPERATORS["Identity"] = OPERATORS["Dropout"] = lambda _node, x, *_: x
OPERATORS["Neg"] = lambda _node, x: _elementwise(lambda one, _: -one, x, 0)
OPERATORS["Elu"] = lambda node, x: functional.elu(x, node.get("alpha", 1.0))
OPERATORS["Celu"] = lambda node, x: functional.celu(x, node.get("alpha", 1.0))
OPERATORS["LeakyRelu"] = lambda node, x: functional.leaky_relu(x, node.get("alpha", 0.01))
OPERATORS["HardSigmoid"] = lambda node, x: (x * node.get("alpha", 0.2) + node.get("beta", 0.5)).clamp(0, 1)
OPERATORS["Gelu"] = lambda node, x: functional.gelu(x, approximate=_text(node.get("approximate", "none")))
OPERATORS["PRelu"] = lambda _node, x, slope: torch.where(x < 0, x * slope, x)


def _elementwise(function: Callable[[Any, Any], Any], x: Value, y: Value) -> Value:
    """Applies a function to tensors and numbers, or to sizes alone."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        like = x if isinstance(x, Tensor) else y
        return function(*(as_tensor(one, like) if isinstance(one, tuple) else one for one in (x, y)))
    if not isinstance(x, tuple) and not isinstance(y, tuple):
        return function(x, y)
    left, right = (one if isinstance(one, tuple) else (one,) for one in (x, y))
    length = max(len(left), len(right))
    pairs = zip(left * (length // len(left)), right * (length // len(right)), strict=True)
    return tuple(function(one, other) for one, other in pairs)


def _divided(x: Any, y: Any) -> Any:
    """Divides whole numbers towards zero."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        floats = any(
            one.is_floating_point() if isinstance(one, Tensor) else isinstance(one, float) for one in (x, y)
        )
        return x / y if floats else torch.div(x, y, rounding_mode="trunc")
    return math.trunc(x / y) if isinstance(x, int) and isinstance(y, int) else x / y


def _remainder(node: Node, x: Value, y: Value) -> Value:
    with_sign_of_x = bool(node.get("fmod", 0))

    def each(one: Any, other: Any) -> Any:
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            return torch.fmod(one, other) if with_sign_of_x else torch.remainder(one, other)
        return math.fmod(one, other) if with_sign_of_x else one % other

    return _elementwise(each, x, y)


def _larger(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.maximum(x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x.clamp(min=y) if isinstance(x, Tensor) else y.clamp(min=x)
    return max(x, y)


def _smaller(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.minimum(x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x.clamp(max=y) if isinstance(x, Tensor) else y.clamp(max=x)
    return min(x, y)


_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _divided,
    "Pow": operator.pow,
    "And": operator.and_,
    "Or": operator.or_,
    "Xor": operator.xor,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}
for _name, _pair in _PAIRS.items():
    OPERATORS[_name] = lambda _node, x, y, _pair=_pair: _elementwise(_pair, x, y)
OPERATORS["Mod"] = _remainder
NUMBERS = frozenset(
    (*_PAIRS, "Mod", "Max", "Min", "Sum", "Mean", "Clip", "Pad", "QuantizeLinear", "DequantizeLinear")
)
"""Operators that take a float which stands alone as a number, in full precision."""


def _many(function: Callable[[Any, Any], Any], _node: Node, first: Value, *others: Value) -> Value:
    for other in others:
        first = _elementwise(function, first, other)
    return first


OPERATORS["Max"] = partial(_many, _larger)
OPERATORS["Min"] = partial(_many, _smaller)
OPERATORS["Sum"] = partial(_many, operator.add)
OPERATORS["Mean"] = lambda node, *given: _many(operator.add, node, *given) / len(given)


@_of("Clip", sizes=())
def _clip(node: Node, x: Value, low: Value = None, high: Value = None) -> Value:
    low = node.get("min") if low is None else low
    high = node.get("max") if high is None else high
    x = x if low is None else _elementwise(_larger, x, low)
    return x if high is None else _elementwise(_smaller, x, high)


@_of("Where")
def _where(_node: Node, which: Value, x: Value, y: Value) -> Value:
    if not any(isinstance(one, Tensor) for one in (which, x, y)):
        rows = [one if isinstance(one, tuple) else (one,) for one in (which, x, y)]
        length = max(map(len, rows))
        told = zip(*(row * (length // len(row)) for row in rows), strict=True)
        return tuple(one if chosen else other for chosen, one, other in told)
    like = next(one for one in (which, x, y) if isinstance(one, Tensor))
    chosen = as_tensor(which, like)
    parts = [as_tensor(one, like) if isinstance(one, tuple) else one for one in (x, y)]
    return torch.where(chosen, *parts)


# ---- datatypes

_TYPES = {
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
}
_FLOATS = (1, 10, 11, 16)  # of any length: the network computes in one of its own


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Describes where a network runs, and in which floats."""

    kind: torch.dtype
    device: torch.device


def _cast(node: Node, x: Value, *, place: RunPlace) -> Value:
    """Converts to floats of the precision in which the network runs, whatever the file says."""
    to = int(node.get("to", 1))
    if to not in _FLOATS and to not in _TYPES:
        raise NoCounterpart(f"Cast to ONNX's datatype {to}")
    if isinstance(x, Tensor):
        return x.to(place.kind if to in _FLOATS else _TYPES[to])
    turned: Callable[[Any], Any] = float if to in _FLOATS else bool if _TYPES[to] is torch.bool else int
    return tuple(map(turned, x)) if isinstance(x, tuple) else turned(x)


def _filled(node: Node, size: Value, *, place: RunPlace) -> Value:
    value = node.get("value")
    number = 0.0 if value is None else value.reshape(-1)[0].item()
    sides = whole(size)
    if isinstance(number, float):
        return torch.full(sides, number, dtype=place.kind, device=place.device)
    return (number,) * sides[0] if len(sides) == 1 else torch.full(sides, number, device=place.device)


def _counted(_node: Node, start: Value, end: Value, step: Value, *, place: RunPlace) -> Tensor:
    first, last, by = (_number(one) for one in (start, end, step))
    return torch.arange(first, last, by, device=place.device)


# ---- shapes


@_of("Shape")
def _shape(node: Node, x: Tensor) -> Value:
    return tuple(x.shape)[node.get("start", 0) : node.get("end")]


OPERATORS["Size"] = lambda _node, x: x.numel()


@_of("Reshape", sizes=(1,))
def _reshape(node: Node, x: Value, size: Value) -> Value:
    sides = whole(size)
    if not isinstance(x, Tensor):  # sizes are numbers in a row, or one number; a matrix of them is a tensor
        if len(sides) > 1:
            return torch.tensor(whole(x)).reshape(sides)
        return whole(x) if sides else _number(x)
    if not node.get("allowzero", 0):
        sides = tuple(x.shape[at] if side == 0 else side for at, side in enumerate(sides))
    return x.reshape(sides)


@_of("Flatten")
def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = int(node.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1) if axis else x.reshape(1, -1)


@_of("Transpose")
def _transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(*node.get("perm", reversed(range(x.dim()))))


@_of("Squeeze", sizes=(1,))
def _squeeze(node: Node, x: Value, axes: Value = None) -> Value:
    if not isinstance(x, Tensor):
        return x[0] if isinstance(x, tuple) and len(x) == 1 else x
    axes = node.get("axes") if axes is None else axes
    if axes is None:
        return x.squeeze()
    return x.squeeze(whole(tuple(axes) if isinstance(axes, list) else axes))


@_of("Unsqueeze", sizes=(1,))
def _unsqueeze(node: Node, x: Value, axes: Value = None) -> Value:
    given = whole(tuple(node.get("axes", ())) if axes is None else axes)
    if not isinstance(x, Tensor):
        if isinstance(x, tuple) or len(given) > 1:
            raise NoCounterpart("Unsqueeze of sizes into a matrix")
        return (x,)
    sides = x.dim() + len(given)
    for axis in sorted(axis % sides for axis in given):
        x = x.unsqueeze(axis)
    return x


@_of("Concat")
def _concat(node: Node, *given: Value) -> Value:
    if not any(isinstance(one, Tensor) for one in given):
        return tuple(number for one in given for number in (one if isinstance(one, tuple) else (one,)))
    return torch.cat(_tensors(given), int(node.get("axis", 0)))


@_of("Split", sizes=(1,))
def _split(node: Node, x: Value, sizes: Value = None) -> Value:
    axis, given = int(node.get("axis", 0)), node.get("split") if sizes is None else whole(sizes)
    if given is not None:
        if not isinstance(x, Tensor):
            ends = list(accumulate(given))
            return [x[end - size : end] for end, size in zip(ends, given, strict=True)]
        return torch.split(x, list(given), axis)
    return torch.split(x, -(-x.shape[axis] // len(node.outputs)), axis)


@_of("Slice", sizes=(1, 2, 3, 4))
def _slice(
    node: Node, x: Value, starts: Value = None, ends: Value = None, axes: Value = None, steps: Value = None
) -> Value:
    first = whole(tuple(node.get("starts", ())) if starts is None else starts)
    last = whole(tuple(node.get("ends", ())) if ends is None else ends)
    told = tuple(node.get("axes", range(len(first)))) if axes is None else whole(axes)
    by = (1,) * len(first) if steps is None else whole(steps)
    if not isinstance(x, Tensor):
        return x[first[0] : last[0] : by[0]]
    for start, end, axis, step in zip(first, last, told, by, strict=True):
        x = _sliced(x, start, end, axis, step)
    return x


def _sliced(x: Tensor, start: int, end: int, axis: int, step: int) -> Tensor:
    length = x.shape[axis]
    if step < 0:  # what is kept, the other way round
        kept = range(length)[start:end:step]
        if not kept:
            return x.narrow(axis, 0, 0)
        turned = x.narrow(axis, kept[-1], kept[0] - kept[-1] + 1).flip(axis)
        return _sliced(turned, 0, turned.shape[axis], axis, -step)
    kept = range(length)[start:end]
    part = x.narrow(axis, kept.start if kept else 0, len(kept))
    return part if step == 1 else part[(slice(None),) * (axis % x.dim()) + (slice(None, None, step),)]


@_of("Gather")
def _gather(node: Node, x: Value, places: Value) -> Value:
    axis = int(node.get("axis", 0))
    if not isinstance(x, Tensor):
        if isinstance(places, Tensor):
            return torch.tensor(x, device=places.device)[places]
        return tuple(x[at] for at in places) if isinstance(places, tuple) else x[places]
    if not isinstance(places, Tensor):
        if not isinstance(places, tuple):
            return x.select(axis, places)
        places = as_tensor(places, x)
    places = torch.where(places < 0, places + x.shape[axis], places)
    found = x.index_select(axis, places.reshape(-1))
    axis = axis % x.dim()
    return found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


OPERATORS["GatherElements"] = lambda node, x, places: x.gather(
    int(node.get("axis", 0)),
    torch.where(places < 0, places + x.shape[int(node.get("axis", 0))], places),
)


@_of("GatherND")
def _gather_nd(node: Node, x: Tensor, places: Tensor) -> Tensor:
    if node.get("batch_dims", 0):
        raise NoCounterpart("GatherND with batch_dims")
    return x[tuple(places.unbind(-1))]


@_of("Expand", sizes=(1,))
def _expand(_node: Node, x: Value, size: Value) -> Value:
    sides = whole(size)
    if not isinstance(x, Tensor):
        return x if isinstance(x, tuple) and len(x) == sides[0] else whole(x) * sides[0]
    return x.expand(torch.broadcast_shapes(x.shape, sides))  # type: ignore[no-untyped-call]


OPERATORS["Tile"] = lambda _node, x, times: x.tile(whole(times))
SIZES_AT["Tile"] = (1,)


@_of("Pad", sizes=(1, 3))
def _pad(node: Node, x: Tensor, pads: Value = None, value: Value = None, axes: Value = None) -> Tensor:
    given = whole(tuple(node.get("pads", node.get("paddings", ()))) if pads is None else pads)
    told = tuple(range(x.dim())) if axes is None else whole(axes)
    before, after = given[: len(told)], given[len(told) :]
    sides = [(0, 0)] * x.dim()
    for axis, pair in zip(told, zip(before, after, strict=True), strict=True):
        sides[axis] = pair
    while len(sides) > 1 and sides[0] == (0, 0):  # only these may be reflected
        sides.pop(0)
    around = [amount for pair in reversed(sides) for amount in pair]
    mode = _text(node.get("mode", "constant"))
    if mode == "constant":
        return functional.pad(
            x, around, value=float(_number(node.get("value", 0.0) if value is None else value))
        )
    if mode not in ("reflect", "edge"):
        raise NoCounterpart(f"Pad in the mode {mode}")
    return functional.pad(x, around, mode={"edge": "replicate"}.get(mode, mode))


@_of("DepthToSpace")
def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    block = int(node.get("blocksize"))
    if _text(node.get("mode", "DCR")) == "CRD":
        return functional.pixel_shuffle(x, block)
    n, channels, height, width = x.shape
    parts = x.reshape(n, block, block, channels // block**2, height, width)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(n, -1, height * block, width * block)


@_of("SpaceToDepth")
def _space_to_depth(node: Node, x: Tensor) -> Tensor:
    block = int(node.get("blocksize"))
    n, channels, height, width = x.shape
    parts = x.reshape(n, channels, height // block, block, width // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(n, -1, height // block, width // block)


# ---- reducing and choosing


def _axes(node: Node, x: Tensor, axes: Value) -> tuple[int, ...] | None:
    """None: nothing is to be reduced."""
    given = node.get("axes") if axes is None else whole(axes)
    if given is None or not tuple(given):
        return None if node.get("noop_with_empty_axes", 0) else tuple(range(x.dim()))
    return tuple(given)


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "Sum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "Mean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "Max": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "Min": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "Prod": _product,
    "L1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "L2": lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep),
    "SumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
    "LogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "LogSumExp": lambda x, axes, keep: x.logsumexp(axes, keepdim=keep),
}


def _reduced(kind: str, node: Node, x: Value, axes: Value = None) -> Value:
    if not isinstance(x, Tensor):
        of_sizes: dict[str, Callable[..., Any]] = {"Sum": sum, "Prod": math.prod, "Max": max, "Min": min}
        made = of_sizes[kind](whole(x))
        return (made,) if node.get("keepdims", 1) else made
    told = _axes(node, x, axes)
    return x if told is None else _REDUCTIONS[kind](x, told, bool(node.get("keepdims", 1)))


for _name in _REDUCTIONS:
    OPERATORS[f"Reduce{_name}"] = partial(_reduced, _name)
    SIZES_AT[f"Reduce{_name}"] = (1,)


@_of("ArgMax", "ArgMin")
def _best(node: Node, x: Tensor) -> Tensor:
    axis, keep = int(node.get("axis", 0)), bool(node.get("keepdims", 1))
    if node.get("select_last_index", 0):
        raise NoCounterpart(f"{node.kind} with select_last_index")
    return x.argmax(axis, keep) if node.kind == "ArgMax" else x.argmin(axis, keep)


@_of("TopK", sizes=(1,))
def _top(node: Node, x: Tensor, count: Value = None) -> Sequence[Tensor]:
    most = int(node.get("k", 0)) if count is None else whole(count)[0]
    return x.topk(most, int(node.get("axis", -1)), bool(node.get("largest", 1)), True)


@_of("Softmax", "LogSoftmax")
def _softmax(node: Node, x: Tensor) -> Tensor:
    function = functional.softmax if node.kind == "Softmax" else functional.log_softmax
    if node.version >= 13:
        return function(x, dim=int(node.get("axis", -1)))
    axis = int(node.get("axis", 1)) % x.dim()  # before, over all that comes behind it
    return function(x.reshape(math.prod(x.shape[:axis]), -1), dim=1).reshape(x.shape)


OPERATORS["CumSum"] = lambda _node, x, axis: x.cumsum(whole(axis)[0])
SIZES_AT["CumSum"] = (1,)
OPERATORS["NonZero"] = lambda _node, x: x.nonzero().transpose(0, 1)
OPERATORS["Einsum"] = lambda node, *given: torch.einsum(_text(node.get("equation")), *given)
OPERATORS["MatMul"] = lambda _node, x, y: torch.matmul(x, y)


@_of("Trilu", sizes=(1,))
def _triangle(node: Node, x: Tensor, shift: Value = None) -> Tensor:
    by = 0 if shift is None else whole(shift)[0]
    return x.triu(by) if node.get("upper", 1) else x.tril(by)


@_of("Gemm")
def _gemm(node: Node, x: Tensor, y: Tensor, more: Value = None) -> Tensor:
    x = x.transpose(0, 1) if node.get("transA", 0) else x
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if node.get("transB", 0) and alpha == beta == 1.0 and isinstance(more, Tensor) and more.dim() == 1:
        return functional.linear(x, y, more)
    made: Tensor = alpha * (x @ (y.transpose(0, 1) if node.get("transB", 0) else y))
    return made if more is None else made + beta * more


# ---- layers


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _around(node: Node, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns what is added before and behind each side of the picture."""
    sides, told = len(kernel), _text(node.get("auto_pad", "NOTSET"))
    if told in ("NOTSET", "VALID"):
        pads = list(node.get("pads", [0] * (2 * sides))) if told == "NOTSET" else [0] * (2 * sides)
        return pads[:sides], pads[sides:]
    strides, dilations = node.get("strides", [1] * sides), node.get("dilations", [1] * sides)
    before, after = [], []
    for length, size, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        missing = max(0, (-(-length // stride) - 1) * stride + (size - 1) * dilation + 1 - length)
        less, more = missing // 2, missing - missing // 2
        before.append(less if told == "SAME_UPPER" else more)
        after.append(more if told == "SAME_UPPER" else less)
    return before, after


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    return functional.pad(
        x, [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair], value=value
    )


_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@_of("Conv")
def _convolve(node: Node, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    sides = weights.dim() - 2
    before, after = _around(node, x, weights.shape[2:])
    if before != after:
        x, before = _padded(x, before, after), [0] * sides
    strides, dilations = node.get("strides", [1] * sides), node.get("dilations", [1] * sides)
    return _CONVOLUTIONS[sides](x, weights, bias, strides, before, dilations, node.get("group", 1))


CONVOLUTION_RELU = "ConvRelu"
"""A convolution with the addition and ReLU behind it: no operator of ONNX, but made of three of them."""


@_of(CONVOLUTION_RELU)
def _convolve_relu(
    node: Node, x: Tensor, weights: Tensor, bias: Tensor | None, other: Tensor | None = None
) -> Tensor:
    pads, _ = _around(node, x, weights.shape[2:])
    strides, dilations = node.get("strides", [1, 1]), node.get("dilations", [1, 1])
    return convolution_relu(x, weights, bias, other, strides, pads, dilations)


@_of("ConvTranspose")
def _spread(node: Node, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    sides = weights.dim() - 2
    if _text(node.get("auto_pad", "NOTSET")) != "NOTSET" or "output_shape" in node.attributes:
        raise NoCounterpart("ConvTranspose whose output's shape is given")
    before, after = _around(node, x, weights.shape[2:])
    more = [
        extra + first - last
        for extra, first, last in zip(node.get("output_padding", [0] * sides), before, after, strict=True)
    ]
    strides, dilations = node.get("strides", [1] * sides), node.get("dilations", [1] * sides)
    if min(more) < 0:
        raise NoCounterpart("ConvTranspose with uneven pads")
    group = node.get("group", 1)
    return _TRANSPOSED[sides](x, weights, bias, strides, before, more, group, dilations)


_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_MEAN_POOLS: dict[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}


@_of("MaxPool")
def _pool_most(node: Node, x: Tensor) -> Tensor:
    kernel = list(node.get("kernel_shape"))
    if len(node.outputs) > 1:
        raise NoCounterpart("MaxPool that says where the largest were")
    before, after = _around(node, x, kernel)
    if before != after or any(2 * pad > size for pad, size in zip(before, kernel, strict=True)):
        x, before = _padded(x, before, after, -math.inf), [0] * len(kernel)
    strides, dilations = node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))
    return _MAX_POOLS[len(kernel)](x, kernel, strides, before, dilations, bool(node.get("ceil_mode", 0)))


@_of("AveragePool")
def _pool_mean(node: Node, x: Tensor) -> Tensor:
    kernel = list(node.get("kernel_shape"))
    before, after = _around(node, x, kernel)
    counts_pads = bool(node.get("count_include_pad", 0))
    if before != after:
        if not counts_pads:
            raise NoCounterpart("AveragePool with uneven pads and count_include_pad = 0")
        x, before = _padded(x, before, after), [0] * len(kernel)
    strides, up = node.get("strides", [1] * len(kernel)), bool(node.get("ceil_mode", 0))
    return _MEAN_POOLS[len(kernel)](x, kernel, strides, before, up, counts_pads)


@_of("BatchNormalization")
def _batch_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return functional.batch_norm(x, mean, spread, scale, bias, eps=node.get("epsilon", 1e-5))


@_of("InstanceNormalization")
def _instance_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=node.get("epsilon", 1e-5))


@_of("GroupNormalization")
def _group_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = int(node.get("num_groups"))
    if len(scale) == groups != x.shape[1]:  # before 21 one for each group
        scale, bias = (one.repeat_interleave(x.shape[1] // groups) for one in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@_of("LayerNormalization")
def _layer_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = int(node.get("axis", -1)) % x.dim()
    return functional.layer_norm(x, x.shape[axis:], scale, bias, node.get("epsilon", 1e-5))


@_of("LRN")
def _local_norm(node: Node, x: Tensor) -> Tensor:
    size, alpha, beta = int(node.get("size")), node.get("alpha", 1e-4), node.get("beta", 0.75)
    return functional.local_response_norm(x, size, alpha, beta, node.get("bias", 1.0))


_RESIZED = {
    ("linear", "half_pixel"): ("linear", False),
    ("linear", "pytorch_half_pixel"): ("linear", False),
    ("linear", "align_corners"): ("linear", True),
    ("cubic", "half_pixel"): ("cubic", False),
    ("cubic", "pytorch_half_pixel"): ("cubic", False),
    ("cubic", "align_corners"): ("cubic", True),
    ("nearest", "asymmetric"): ("nearest", None),
    ("nearest", "half_pixel"): ("nearest-exact", None),
}
_BY_SIDES = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


@_of("Resize", "Upsample", sizes=(1, 2, 3))
def _resize(node: Node, x: Tensor, *given: Value) -> Tensor:
    roi_and = given[1:] if len(given) > 1 else given  # before opset 11 there was none
    scales, sizes = (*roi_and, None, None)[:2]
    mode = _text(node.get("mode", "nearest"))
    told = _text(node.get("coordinate_transformation_mode", "asymmetric" if len(given) < 2 else "half_pixel"))
    if (mode, told) not in _RESIZED:
        raise NoCounterpart(f"Resize in the mode {mode} with {told}")
    way, corners = _RESIZED[mode, told]
    if sizes is not None and sizes != ():
        to = whole(sizes)[2:]
    else:
        factors = node.get("scales") if scales is None else scales
        numbers = factors.tolist() if isinstance(factors, Tensor) else list(factors)
        to = tuple(math.floor(side * factor) for side, factor in zip(x.shape[2:], numbers[2:], strict=True))
    way = _BY_SIDES.get((way, x.dim() - 2), way)
    return functional.interpolate(
        x, to, mode=way, align_corners=corners, antialias=bool(node.get("antialias", 0))
    )


@_of("GridSample")
def _sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        _text(node.get("mode", "bilinear")), _text(node.get("mode", "bilinear"))
    )
    return functional.grid_sample(
        x, grid, mode, _text(node.get("padding_mode", "zeros")), bool(node.get("align_corners", 0))
    )


# ---- numbers of 8 bits: what they stand for, computed in floats


def _along(node: Node, x: Tensor, one: Value) -> Value:
    """Returns a number for the whole tensor, or one for each row along an axis; in floats."""
    if not isinstance(one, Tensor):
        return float(_number(one))
    if one.numel() == 1:
        return one.reshape(()).float()
    axis = int(node.get("axis", 1)) % x.dim()
    return one.reshape([-1 if at == axis else 1 for at in range(x.dim())]).float()


@_of("QuantizeLinear")
def _quantise(node: Node, x: Tensor, scale: Value, zero: Tensor | None = None) -> Tensor:
    datatype = torch.uint8 if zero is None else zero.dtype
    moved = (x.float() / _along(node, x, scale)).round() + (0.0 if zero is None else _along(node, x, zero))
    bounds = torch.iinfo(datatype)
    made: Tensor = moved.clamp(bounds.min, bounds.max).to(datatype)
    return made


def _dequantise(
    node: Node, x: Tensor, scale: Value, zero: Tensor | None = None, *, place: RunPlace
) -> Tensor:
    less = 0.0 if zero is None else _along(node, x, zero)
    made: Tensor = ((x.float() - less) * _along(node, x, scale)).to(place.kind)
    return made


MADE_AT_PLACE: dict[str, Operator] = {
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "Range": _counted,
    "DequantizeLinear": _dequantise,
}
"""These make floats of the network's own precision, or tensors on its device: they get both as `place`."""
