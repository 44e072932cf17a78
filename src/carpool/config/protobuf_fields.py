"""The fields of a protobuf message without its schema, one by one; what is not wanted is stepped over."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import BinaryIO

_MOST_FIELDS = 100_000  # of one message
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5  # wire types
_FIXED = {_EIGHT: 8, _FOUR: 4}


def walk(data: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Yields the number of each field and its length, of a message of so many bytes. `data` stands at its
    value, of which the caller may read as much as it likes. Numbers are left out. ValueError: this is no
    message."""
    end = data.tell() + size
    for _ in range(_MOST_FIELDS):
        if data.tell() >= end:
            return
        number, kind = divmod(read_varint(data), 8)
        if kind == _VARINT:
            read_varint(data)
            continue
        length = read_varint(data) if kind == _LENGTH else _FIXED.get(kind)
        if length is None or length > end - data.tell():
            raise ValueError("this is not a protobuf message")
        after = data.tell() + length
        if kind == _LENGTH:
            yield number, length
        data.seek(after, os.SEEK_SET)


def fields_in(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each field of a small message; those of a varint as they stand
    there."""
    view = io.BytesIO(data)
    while view.tell() < len(data):
        number, kind = divmod(read_varint(view), 8)
        if kind == _VARINT:
            begin = view.tell()
            read_varint(view)
            yield number, data[begin : view.tell()]
            continue
        length = read_varint(view) if kind == _LENGTH else _FIXED.get(kind)
        if length is None or length > len(data) - view.tell():
            raise ValueError("this is not a protobuf message")
        yield number, view.read(length)


def read_varint(data: BinaryIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = data.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("this is not a protobuf message")
