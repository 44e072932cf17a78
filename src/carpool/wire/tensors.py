"""Tensor data between its two wire forms, binary and JSON, and numpy arrays."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from carpool.errors import CarpoolError, InvalidInput, ModelError, Unsupported
from carpool.types import Array, Datatype, Tensor
from carpool.wire.head import Buffer, TensorHead

_LENGTH = struct.Struct("<I")
_BYTE = np.dtype(np.uint8)
_DEEPEST = 100  # levels of JSON, as in Triton
_JSON_TYPES: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true or false"),
    "u": (frozenset({int}), "integers"),
    "i": (frozenset({int}), "integers"),
    "f": (frozenset({int, float}), "numbers"),
    "O": (frozenset({str}), "strings"),
}


def bind(heads: Iterable[TensorHead], tail: Buffer, kind: str = "input") -> list[Tensor]:
    """Tensors over the bytes of the tail: fixed-size datatypes are views into it, not copies."""
    tensors = []
    for head in heads:
        if head.data is not None:
            data = from_json(head.data, head, f"{kind} '{head.name}'")
        elif head.shared_memory is not None:
            raise Unsupported(f"{kind} '{head.name}' is in shared memory, which is not enabled")
        else:
            data = _from_binary(head, tail, kind)
        tensors.append(Tensor(head.name, head.datatype, head.shape, data))
    return tensors


def _from_binary(head: TensorHead, tail: Buffer, kind: str) -> Array:
    if head.offset + head.size > len(tail):
        raise InvalidInput(f"{kind} '{head.name}' ends behind the end of the body", field="body")
    if head.datatype is Datatype.BYTES:
        view = memoryview(tail)[head.offset : head.offset + head.size]
        return _split_elements(head, view, f"{kind} '{head.name}'")
    data: Array = np.ndarray(head.shape, head.datatype.dtype, tail, head.offset)
    if head.datatype is Datatype.BOOL and data.size and data.view(_BYTE).max() > 1:
        owner = f"{kind} '{head.name}'"
        raise InvalidInput(f"{owner} is BOOL, whose bytes must be 0 or 1", field=f"{owner}.data")
    return data


def _split_elements(head: TensorHead, view: memoryview, owner: str) -> Array:
    """BYTES elements: each is its length in 4 bytes, then itself."""
    if not head.framed:
        return _object_array([bytes(view)], head.shape)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position + 4 <= end:
        start = position + 4
        position = start + _LENGTH.unpack_from(view, position)[0]
        if position > end:
            break
        elements.append(bytes(view[start:position]))
    if position != end or len(elements) != math.prod(head.shape):
        raise InvalidInput(
            f"{owner} must be {math.prod(head.shape)} elements in {end} bytes,"
            " each with its length in 4 bytes before it",
            field=f"{owner}.data",
        )
    return _object_array(elements, head.shape)


def _object_array(elements: list[bytes], shape: tuple[int, ...]) -> Array:
    data = np.empty(len(elements), dtype=object)
    data[:] = elements
    return data.reshape(shape)


def from_json(values: list[Any], head: TensorHead, owner: str) -> Array:
    """A JSON `data` list, flat or nested as the shape says; every element must be right for the datatype."""
    field = f"{owner}.data"
    flat = _flatten(values, head.shape, field)
    count = math.prod(head.shape)
    if len(flat) != count:
        raise InvalidInput(
            f"{field} has {len(flat)} elements, but shape {list(head.shape)} needs {count}", field=field
        )
    dtype = head.datatype.dtype
    allowed, words = _JSON_TYPES[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        raise InvalidInput(f"{field} may hold only {words} for {head.datatype.value}", field=field)
    if dtype.kind == "O":
        return _object_array([text.encode() for text in flat], head.shape)
    if dtype.kind == "f":
        return _floats(flat, head, field)
    if dtype.kind != "b" and flat:
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            raise _out_of_range(head.datatype, field)
    return np.array(flat, dtype).reshape(head.shape)


def _floats(flat: list[float], head: TensorHead, field: str) -> Array:
    with np.errstate(over="ignore"):
        data = np.array(flat, np.float64).astype(head.datatype.dtype)
    if not np.isfinite(data).all():
        raise _out_of_range(head.datatype, field)
    return data.reshape(head.shape)


def _out_of_range(datatype: Datatype, field: str) -> InvalidInput:
    return InvalidInput(f"{field} holds a value out of range for {datatype.value}", field=field)


def _flatten(values: list[Any], shape: tuple[int, ...], field: str) -> list[Any]:
    """One level per dimension; lists that are not as long as the shape says are refused.

    What is nested deeper than its shape is flattened, as Triton does: then only the elements are counted.
    """
    if not values or type(values[0]) is not list:
        return values
    levels = _levels(values, field)
    if levels > len(shape):
        return _flattened(values, levels, field)
    level = [values]
    for depth, dim in enumerate(shape):
        if any(type(row) is not list or len(row) != dim for row in level):
            raise InvalidInput(f"{field} is not nested as shape {list(shape)} at depth {depth}", field=field)
        level = list(chain.from_iterable(level))
    return level


def _levels(values: list[Any], field: str) -> int:
    """How deep the first element lies."""
    levels, first = 0, values
    while type(first) is list:
        levels += 1
        if levels > _DEEPEST:
            raise InvalidInput(
                f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST}) in {field}", field=field
            )
        if not first:
            break
        first = first[0]
    return levels


def _flattened(values: list[Any], levels: int, field: str) -> list[Any]:
    """Each pass looks at the lists of one level: together they cost no more than reading the JSON did."""
    for depth in range(1, levels):
        if any(type(item) is not list for item in values):
            raise InvalidInput(f"{field} is nested unevenly at depth {depth}", field=field)
        values = list(chain.from_iterable(values))
    return values


def to_binary(tensor: Tensor) -> Buffer:
    """The tensor's bytes; a view where the array already is one block."""
    if tensor.datatype is Datatype.BYTES:
        pieces: list[bytes] = []
        for element in tensor.data.ravel().tolist():
            pieces += (_LENGTH.pack(len(element)), element)
        return b"".join(pieces)
    if not tensor.data.size:
        return b""  # memoryview cannot cast an empty array
    return np.ascontiguousarray(tensor.data).data.cast("B")


def blame(kind: str) -> type[CarpoolError]:
    """Whose fault a tensor that cannot be written is: outputs come from the model, inputs from the caller."""
    return ModelError if kind == "output" else InvalidInput


def to_json(tensor: Tensor, kind: str) -> Any:
    """What orjson writes as a flat list; NaN and infinity are refused, since it would write null."""
    data, owner = tensor.data, f"{kind} '{tensor.name}'"
    if tensor.datatype is Datatype.BYTES:
        try:
            return [element.decode() for element in data.ravel().tolist()]
        except UnicodeDecodeError:
            raise blame(kind)(f"{owner} is not UTF-8 text: it can only be binary", field=owner) from None
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        raise blame(kind)(f"{owner} holds NaN or infinity, which can only be binary", field=owner)
    return np.ascontiguousarray(data).reshape(-1)
