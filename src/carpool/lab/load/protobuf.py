"""The few messages of the v2 gRPC service that a load generator needs, written and read by hand.

Field numbers are those of `inference.GRPCInferenceService`. A request is the same bytes thousands of times,
and of an answer only its parameters matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from carpool.errors import InvalidInput
from carpool.types import Tensor
from carpool.wire.v2 import Buffer

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DOUBLE = struct.Struct("<d")

Field = tuple[int, int | bytes]


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def text(number: int, value: bytes | str) -> bytes:
    """A string, bytes or message field."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def integer(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value)


def infer_request(
    model: str, version: str, tensors: Sequence[Tensor], raw: Sequence[Buffer], *, priority: int = 0
) -> bytes:
    """A ModelInferRequest with its tensors as raw bytes."""
    pieces: list[Buffer] = [text(1, model)]
    if version:
        pieces.append(text(2, version))
    if priority:
        pieces.append(text(4, text(1, "priority") + text(2, integer(2, priority))))
    for tensor in tensors:
        shape = b"".join(varint(length) for length in tensor.shape)
        pieces.append(text(5, text(1, tensor.name) + text(2, tensor.datatype.value) + text(3, shape)))
    for data in raw:
        pieces += (varint(7 << 3 | _BYTES), varint(len(data)), data)
    return b"".join(pieces)


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message in order; raises `InvalidInput` for what is none."""
    position, end = 0, len(message)
    try:
        while position < end:
            key, position = _read_varint(message, position)
            value: int | bytes
            if key & 7 == _VARINT:
                value, position = _read_varint(message, position)
            elif key & 7 == _BYTES:
                length, start = _read_varint(message, position)
                position = start + length
                value = message[start:position]
            elif key & 7 in (_FIXED64, _FIXED32):
                start, position = position, position + (8 if key & 7 == _FIXED64 else 4)
                value = message[start:position]
            else:
                raise IndexError
            if position > end:
                raise IndexError
            yield key >> 3, value
    except IndexError:
        raise InvalidInput("the answer is not a protocol-buffer message", field="body") from None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise IndexError


def signed(number: int | bytes) -> int:
    """An int64 as it was written."""
    assert isinstance(number, int)
    return number - (1 << 64) if number >> 63 else number


def strings(message: bytes, number: int) -> list[str]:
    """All string fields with this number."""
    found = [value for field, value in fields(message) if field == number]
    return [value.decode(errors="replace") for value in found if isinstance(value, bytes)]


def shape_of(message: bytes, number: int) -> tuple[int, ...]:
    """A repeated int64, packed or not."""
    found: list[int] = []
    for field, value in fields(message):
        if field != number:
            continue
        if isinstance(value, int):
            found.append(signed(value))
            continue
        position = 0
        while position < len(value):
            length, position = _read_varint(value, position)
            found.append(signed(length))
    return tuple(found)


def numbers(message: bytes, number: int) -> dict[str, float]:
    """Of a map from strings to InferParameter, those that are int64 or double."""
    found = {}
    for field, entry in fields(message):
        if field != number or not isinstance(entry, bytes):
            continue
        pair = dict(fields(entry))
        name, parameter = pair.get(1), pair.get(2)
        if not isinstance(name, bytes) or not isinstance(parameter, bytes):
            continue
        for kind, value in fields(parameter):
            if kind == 2:
                found[name.decode(errors="replace")] = float(signed(value))
            elif kind == 4 and isinstance(value, bytes) and len(value) == _DOUBLE.size:
                found[name.decode(errors="replace")] = _DOUBLE.unpack(value)[0]
    return found
