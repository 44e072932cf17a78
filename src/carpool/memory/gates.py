"""The gate's snapshot: a few numbers per model that the engine writes and every front end reads.

One row per model key. A row carries a checksum and is copied as a whole, so a reader that meets a row in
mid-write knows it, on any processor and even if the writer died there; it looks again, then goes without.
Keys share rows in turn: of two live models so far apart that they share one, the last to write has advice.
"""

from __future__ import annotations

import struct
import zlib
from mmap import mmap
from typing import TypeAlias

Buffer: TypeAlias = bytearray | mmap | memoryview

MAX_VALUES = 58
_ROWS = 1024
_HEAD = struct.Struct("<IIQ")  # checksum of the rest, number of values, key
_ROW = _HEAD.size + 8 * MAX_VALUES
_VALUES = tuple(struct.Struct(f"<{count}d") for count in range(MAX_VALUES + 1))
_LOOKS = 3

GATE_BYTES = _ROWS * _ROW


class GateTable:
    """Over a buffer of `GATE_BYTES` zeros that all processes share. Only the engine may write."""

    def __init__(self, buffer: Buffer) -> None:
        self._view = memoryview(buffer).cast("B")

    def write(self, key: int, *values: float) -> None:
        start = key % _ROWS * _ROW
        row = _HEAD.pack(0, len(values), key) + _VALUES[len(values)].pack(*values)
        checksum = zlib.crc32(row[4:])
        self._view[start : start + len(row)] = checksum.to_bytes(4, "little") + row[4:]

    def read(self, key: int) -> tuple[float, ...] | None:
        """What was written last for this key, or None if that cannot be told."""
        start = key % _ROWS * _ROW
        for _ in range(_LOOKS):
            row = bytes(self._view[start : start + _ROW])
            checksum, count, owner = _HEAD.unpack_from(row)
            if count <= MAX_VALUES:
                end = _HEAD.size + 8 * count
                if zlib.crc32(row[4:end]) == checksum:
                    return _VALUES[count].unpack_from(row, _HEAD.size) if owner == key else None
        return None

    def clear(self) -> None:
        """A new engine numbers its models anew, so nothing that an older one wrote may be believed."""
        self._view[:] = bytes(len(self._view))
