"""A picture's file in a slot: its length, then itself. So every file is one kind of request, however long."""

from __future__ import annotations

from mmap import mmap
from struct import Struct

import numpy as np

from carpool.types import Array

_length = Struct("<Q")
FILE_AT = _length.size
"""Where the file begins, in bytes from the start of the slot."""
ENCODED = "encoded"
"""The shape of requests that are pictures' files: they never ride with tensors."""


def write_length(view: memoryview, length: int) -> None:
    _length.pack_into(view, 0, length)


def write_file(view: memoryview, data: bytes | bytearray | memoryview) -> None:
    _length.pack_into(view, 0, len(data))
    view[FILE_AT : FILE_AT + len(data)] = data


def find_file(memory: mmap | memoryview, offset: int) -> tuple[int, int]:
    """Where it begins and ends. The length is not believed: ValueError where it reaches beyond the memory."""
    (length,) = _length.unpack_from(memory, offset)
    start = offset + FILE_AT
    if length > len(memory) - start:
        raise ValueError(f"a file of {length} bytes reaches beyond its memory")
    return start, start + length


def bind_file(memory: mmap | memoryview, offset: int) -> Array:
    """The file where it lies. Raises as `find_file`."""
    start, end = find_file(memory, offset)
    return np.ndarray((end - start,), np.uint8, memory, start)
