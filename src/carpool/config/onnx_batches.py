"""Rewrites an ONNX file whose batch is fixed, usually to 1, for batches of any size.

The first dimension of inputs and outputs gets a name in place of its number, and so do constant targets of
Reshape that begin with it. A leading 1 need not be a batch: what comes out is a guess, which counts only once
a batch has answered what single inputs do (engine/loading/rebatching.py). Fields that are not understood are
copied as they stand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5  # wire types
_FIXED = {_EIGHT: 8, _FOUR: 4}
_GRAPH = 7  # of ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13  # of GraphProto
_INT64 = 7  # of TensorProto's data types
_MOST_DIMS = 16
_BATCH = b"carpool_batch"
_EXTERNAL = 1  # of TensorProto's data locations


Change: TypeAlias = Callable[[memoryview], bytes]


class NoBatch(ValueError):
    """Says in words why a file cannot be rewritten."""


class Rewritten(NamedTuple):
    data: bytes
    reshapes: int  # how many targets were changed


def with_any_batch(data: bytes, batch: int) -> Rewritten:
    """Returns the file for batches of any size. Raises NoBatch, and ValueError for what is no ONNX file."""
    pieces: list[bytes | memoryview] = []
    changed = 0
    view = memoryview(data)
    for one in _fields(view):
        if one.number != _GRAPH or one.kind != _LENGTH:
            pieces.append(view[one.start : one.end])
            continue
        graph, found = _graph(view[one.value : one.end], batch)
        changed += found
        pieces += [_head(_GRAPH, len(graph)), graph]
    return Rewritten(b"".join(pieces), changed)


# ---- the graph


@dataclass(slots=True)
class _Nodes:
    """Notes, in the order of the graph, what follows from its inputs and how constants are used."""

    follows: set[str]
    targets: dict[str, bool] = field(default_factory=dict)  # of Reshape: whether its data follows an input
    others: set[str] = field(default_factory=set)  # that anything else uses

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        follows = any(name in self.follows for name in inputs)
        if follows:
            self.follows.update(outputs)
        for place, name in enumerate(inputs):
            if op == "Reshape" and place == 1:
                self.targets[name] = self.targets.get(name, True) and inputs[0] in self.follows
            else:
                self.others.add(name)

    @property
    def changeable(self) -> set[str]:
        return {name for name, follows in self.targets.items() if follows} - self.others


def _graph(view: memoryview, batch: int) -> tuple[bytes, int]:
    parts = list(_fields(view))
    weights = {_text(view[one.value : one.end], 8) for one in parts if one.number == _INITIALIZER}
    names = {_text(view[one.value : one.end], 1) for one in parts if one.number == _INPUT}
    nodes = _Nodes(names - weights)
    for one in parts:
        if one.number == _NODE:
            nodes.add(*_node(view[one.value : one.end]))
    changeable, changed = nodes.changeable, 0
    pieces: list[bytes | memoryview] = []
    for one in parts:
        if one.number == _VALUE_INFO:
            continue  # shapes between layers, which are others now
        new = _changed(one.number, view[one.value : one.end], changeable, weights, batch)
        if new is None:
            pieces.append(view[one.start : one.end])
        else:
            pieces += [_head(one.number, len(new)), new]
            changed += one.number in (_INITIALIZER, _NODE)
    return b"".join(pieces), changed


def _changed(
    number: int, view: memoryview, changeable: set[str], weights: set[str], batch: int
) -> bytes | None:
    """Returns what stands in place of a field of the graph; None: it stays."""
    if number in (_INPUT, _OUTPUT) and _text(view, 1) not in weights:
        return _relabelled(view, batch, "input" if number == _INPUT else "output")
    if number == _INITIALIZER and _text(view, 8) in changeable:
        return _target(view, batch)
    if number == _INITIALIZER and _number(view, 14) == _EXTERNAL:
        raise NoBatch("its weights are in files of their own")
    return _constant(view, changeable, batch) if number == _NODE else None


def _node(view: memoryview) -> tuple[str, list[str], list[str]]:
    op, inputs, outputs = "", list[str](), list[str]()
    for one in _fields(view):
        if one.number in (1, 2, 4) and one.kind == _LENGTH:
            text = bytes(view[one.value : one.end]).decode("utf-8", "replace")
            if one.number == 4:
                op = text
            else:
                (inputs if one.number == 1 else outputs).append(text)
    return op, inputs, outputs


def _relabelled(view: memoryview, batch: int, kind: str) -> bytes:
    """Returns a ValueInfoProto whose first dimension has a name: type, tensor_type, shape, dim."""
    name = _text(view, 1)

    def tensor(part: memoryview) -> bytes:
        return _replaced(part, 2, shape)

    def shape(part: memoryview) -> bytes:
        dims = [one for one in _fields(part) if one.number == 1]
        first = dims and _number(part[dims[0].value : dims[0].end], 1)
        if not dims or (first != batch and not (first is None and kind == "output")):
            raise NoBatch(f'its {kind} "{name}" does not begin with {batch}')
        named = _delimited(1, _delimited(2, _BATCH))
        return bytes(part[: dims[0].start]) + named + bytes(part[dims[0].end :])

    made = _replaced(view, 2, lambda part: _replaced(part, 1, tensor))
    if made == bytes(view):
        raise NoBatch(f'its {kind} "{name}" has no shape in the file')
    return made


def _target(view: memoryview, batch: int) -> bytes | None:
    """Returns a TensorProto of whole numbers that begins with the batch: 0 takes the length that the data
    has, and -1 what is left, of which there can be one."""
    raw, listed, kind = b"", b"", 0
    rest: list[bytes] = []
    dims = list[int]()
    for one in _fields(view):
        part = view[one.value : one.end]
        if one.number == 9:
            raw = bytes(part)
        elif one.number == 7:
            listed += bytes(part)
        else:
            rest.append(bytes(view[one.start : one.end]))
            if one.number == 2:
                kind = _varint(part, 0)[0]
            elif one.number == 1:
                dims += _varints(part)
    values = list(struct.unpack(f"<{len(raw) // 8}q", raw)) if raw else _signed(listed)
    if kind != _INT64 or len(dims) != 1 or not 1 <= len(values) <= _MOST_DIMS or values[0] != batch:
        return None
    values[0] = 0 if -1 in values[1:] else -1
    return b"".join(rest) + _delimited(9, struct.pack(f"<{len(values)}q", *values))


def _constant(view: memoryview, changeable: set[str], batch: int) -> bytes | None:
    """Returns a node that holds such a target."""
    op, _, outputs = _node(view)
    if op != "Constant" or not outputs or outputs[0] not in changeable:
        return None
    made = _replaced(
        view, 5, lambda part: _replaced(part, 5, lambda held: _target(held, batch) or bytes(held))
    )
    return None if made == bytes(view) else made


# ---- protobuf: fields with their places


class _FieldPlace(NamedTuple):
    number: int
    kind: int
    start: int
    value: int
    end: int


def _fields(view: memoryview) -> Iterator[_FieldPlace]:
    at = 0
    while at < len(view):
        start = at
        tag, at = _varint(view, at)
        number, kind = divmod(tag, 8)
        value = at
        if kind == _VARINT:
            at = _varint(view, at)[1]
        elif kind == _LENGTH:
            length, value = _varint(view, at)
            at = value + length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError("this is not a protobuf message")
        if at > len(view):
            raise ValueError("this is not a protobuf message")
        yield _FieldPlace(number, kind, start, value, at)


def _varint(view: memoryview | bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70 and at < len(view):
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise ValueError("this is not a protobuf message")


def _varints(view: memoryview | bytes) -> list[int]:
    found, at = list[int](), 0
    while at < len(view):
        value, at = _varint(view, at)
        found.append(value)
    return found


def _signed(data: bytes) -> list[int]:
    return [value - (1 << 64) if value >> 63 else value for value in _varints(data)]


def _encoded(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _head(number: int, length: int) -> bytes:
    return _encoded(number * 8 + _LENGTH) + _encoded(length)


def _delimited(number: int, value: bytes) -> bytes:
    return _head(number, len(value)) + value


def _replaced(view: memoryview, number: int, change: Change) -> bytes:
    """Returns a message with the fields of this number changed."""
    pieces: list[bytes] = []
    for one in _fields(view):
        if one.number == number and one.kind == _LENGTH:
            pieces.append(_delimited(number, change(view[one.value : one.end])))
        else:
            pieces.append(bytes(view[one.start : one.end]))
    return b"".join(pieces)


def _text(view: memoryview, number: int) -> str:
    found = next((one for one in _fields(view) if one.number == number and one.kind == _LENGTH), None)
    return "" if found is None else bytes(view[found.value : found.end]).decode("utf-8", "replace")


def _number(view: memoryview, number: int) -> int | None:
    found = next((one for one in _fields(view) if one.number == number and one.kind == _VARINT), None)
    return None if found is None else _varint(view, found.value)[0]
