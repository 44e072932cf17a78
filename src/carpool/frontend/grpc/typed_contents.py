"""Reads tensors from the typed fields of `contents`, for clients that do not send raw bytes.

Numbers come packed, several million in one field: numpy reads them where they lie, a piece at a time, and no
object is made of any of them. What does not belong there is refused after a count, before it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from carpool.errors import InvalidInput
from carpool.frontend.grpc.message_fields import (
    EIGHT,
    FOUR,
    LENGTH,
    VARINT,
    FieldBudget,
    Malformed,
    fields_of,
)
from carpool.types import Array, Datatype
from carpool.wire.v2 import Buffer, TensorHead

_PIECE: Final = 256 * 1024  # bytes on the wire that numpy reads at a time
_LONGEST_VARINT: Final = 10
_FEW: Final = 4096  # fields beside those of the elements
_ELEMENT_LENGTH = struct.Struct("<I")
_BYTE = np.dtype(np.uint8)


class TypedField(NamedTuple):
    """Describes one field of InferTensorContents: how one element of it lies there, if it is not packed."""

    name: str
    kind: int
    read_as: str  # numpy's name of what the wire holds


_FIELDS: Mapping[int, TypedField] = {
    1: TypedField("bool_contents", VARINT, "?"),
    2: TypedField("int_contents", VARINT, "<i4"),
    3: TypedField("int64_contents", VARINT, "<i8"),
    4: TypedField("uint_contents", VARINT, "<u4"),
    5: TypedField("uint64_contents", VARINT, "<u8"),
    6: TypedField("fp32_contents", FOUR, "<f4"),
    7: TypedField("fp64_contents", EIGHT, "<f8"),
    8: TypedField("bytes_contents", LENGTH, ""),
}
_NUMBERS: Mapping[Datatype, int] = {
    Datatype.BOOL: 1,
    **dict.fromkeys((Datatype.INT8, Datatype.INT16, Datatype.INT32), 2),
    Datatype.INT64: 3,
    **dict.fromkeys((Datatype.UINT8, Datatype.UINT16, Datatype.UINT32), 4),
    Datatype.UINT64: 5,
    Datatype.FP32: 6,
    Datatype.FP64: 7,
    Datatype.BYTES: 8,
}
"""FP16 and BF16 have no typed form."""


def typed_tensor(head: TensorHead, elements: int, contents: Sequence[Buffer]) -> Buffer:
    """Returns a tensor of so many elements as raw contents would carry it, in memory of its own. `contents`
    is an InferTensorContents on the wire, in one piece or several; nothing of it is read that is not
    wanted."""
    owner = f"input '{head.name}'"
    number = _NUMBERS.get(head.datatype)
    if number is None:
        raise InvalidInput(
            f"{owner} is {head.datatype.value}, which only raw_input_contents can contain",
            field=f"{owner}.contents",
        )
    field = _FIELDS[number]
    pieces = _pieces(head, elements, contents, number, owner)
    if head.datatype is Datatype.BYTES:
        _check_count(head, len(pieces), elements, field.name, owner)
        return b"".join(part for piece in pieces for part in (_ELEMENT_LENGTH.pack(len(piece)), piece))
    wire = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    try:
        found = _count(wire, field)
        _check_count(head, found, elements, field.name, owner)
        data = _read(wire, field, elements)
    except Malformed:
        raise malformed() from None
    return _as_datatype(data, head.datatype, owner, field.name)


def malformed() -> InvalidInput:
    return InvalidInput("the message is not a ModelInferRequest", field="body")


def _pieces(
    head: TensorHead, elements: int, contents: Sequence[Buffer], number: int, owner: str
) -> list[memoryview]:
    """Returns the values of the one field that the datatype allows: whole runs of them, or one by one."""
    wanted = _FIELDS[number]
    pieces: list[memoryview] = []
    budget = FieldBudget(max(elements, 1) + _FEW, f"{owner}.contents")
    for piece in contents:
        view = memoryview(piece)
        try:
            fields = fields_of(view, budget)
        except Malformed:
            raise malformed() from None
        for given, kind, _, begin, end in fields:
            field = _FIELDS.get(given)
            if field is None or kind not in (field.kind, LENGTH):
                continue  # which a parser would drop
            if given == number:
                pieces.append(view[begin:end])
            elif begin < end or given == _NUMBERS[Datatype.BYTES]:
                raise InvalidInput(
                    f"{owner} is {head.datatype.value}, whose values go into {wanted.name},"
                    f" not into {field.name}",
                    field=f"{owner}.contents.{field.name}",
                )
    return pieces


def _check_count(head: TensorHead, found: int, elements: int, field: str, owner: str) -> None:
    if found != elements:
        raise InvalidInput(
            f"{owner}.contents.{field} has {found} values, but shape {list(head.shape)} needs {elements}",
            field=f"{owner}.contents.{field}",
        )


def _count(wire: Buffer, field: TypedField) -> int:
    """Returns how many numbers there are, and makes none of them."""
    if field.kind != VARINT:
        count, rest = divmod(len(wire), 4 if field.kind == FOUR else 8)
        if rest:
            raise Malformed
        return count
    if len(wire) and wire[-1] > 0x7F:
        raise Malformed
    data = np.frombuffer(wire, _BYTE)
    return sum(
        int(np.count_nonzero(data[start : start + _PIECE] < 0x80)) for start in range(0, len(data), _PIECE)
    )


def _read(wire: Buffer, field: TypedField, elements: int) -> Array:
    if field.kind != VARINT:
        return np.frombuffer(wire, field.read_as, elements).copy()
    data: Array = np.empty(elements, field.read_as)
    filled = 0
    for values in _varints(wire):
        # A number that is too long for its field loses its upper bits, and any but 0 is true.
        data[filled : filled + len(values)] = values != 0 if field.read_as == "?" else _low(values, data)
        filled += len(values)
    return data


def _low(values: Array, data: Array) -> Array:
    low: Array = values.astype(np.uint32) if data.itemsize == 4 else values
    return low.view(data.dtype)


def _varints(wire: Buffer) -> Iterator[Array]:
    """Yields the numbers of a packed field, some at a time."""
    data: Array = np.frombuffer(wire, _BYTE)
    start = 0
    while start < len(data):
        piece = data[start : start + _PIECE]
        ends = np.flatnonzero(piece < 0x80)
        if not len(ends):
            raise Malformed
        piece = piece[: int(ends[-1]) + 1]
        start += len(piece)
        if len(ends) == len(piece):
            yield piece.astype(np.uint64)
            continue
        begins = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - begins + 1
        if int(lengths.max()) > _LONGEST_VARINT:
            raise Malformed
        shifts = (np.arange(len(piece)) - np.repeat(begins, lengths)) * 7
        bits = (piece & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
        yield np.add.reduceat(bits, begins)


def _as_datatype(data: Array, datatype: Datatype, owner: str, field: str) -> Buffer:
    dtype = datatype.dtype
    if dtype.kind in "iu" and dtype.itemsize < 4 and data.size:  # wider ones fill their field
        limits = np.iinfo(dtype)
        if int(data.min()) < limits.min or int(data.max()) > limits.max:
            raise InvalidInput(
                f"{owner} holds a value out of range for {datatype.value}", field=f"{owner}.contents.{field}"
            )
    if not data.size:
        return b""
    found: Array = data.astype(dtype, copy=False)
    return found.data.cast("B")
