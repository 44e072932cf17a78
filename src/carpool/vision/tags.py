"""The tags of TIFF files and EXIF blocks: the first directory, read with every length distrusted."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

WIDTH, HEIGHT, BITS, ORIENTATION = 256, 257, 258, 274
TILE_WIDTH, TILE_HEIGHT = 322, 323

_MAX_TAGS = 1024  # cameras write a few dozen
_MAX_VALUES = 1 << 18  # in one tag: a strip per row of a tall picture fits
_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # else 1
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_BYTES = (1, 2, 7)  # types whose values are text or blobs


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where classic TIFF and BigTIFF differ."""

    count: str  # format of the number of tags
    entry: str  # format of tag, type and number of values
    offset: str

    @property
    def entry_size(self) -> int:
        return struct.calcsize(self.entry) + struct.calcsize(self.offset)


_CLASSIC = _Layout("=H", "=HHI", "=I")
_BIG = _Layout("=Q", "=HHQ", "=Q")


def read_tags(data: memoryview) -> Mapping[int, int]:
    """The first value of each whole-number tag; ValueError says what cannot be right."""
    try:
        return _read(data)
    except struct.error:
        raise ValueError("the directory lies outside the data") from None


def _read(data: memoryview) -> dict[int, int]:
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        raise ValueError("no byte order")
    version = struct.unpack_from(f"{order}H", data, 2)[0]
    if version not in (42, 43):
        raise ValueError(f"version {version} is unknown")
    layout = _CLASSIC if version == 42 else _BIG
    (start,) = struct.unpack_from(order + layout.offset[1:], data, 4 if version == 42 else 8)
    (count,) = struct.unpack_from(order + layout.count[1:], data, start)
    if count > _MAX_TAGS:
        raise ValueError(f"{count} tags are more than the {_MAX_TAGS} allowed")
    return _values(data, order, layout, start + struct.calcsize(layout.count), count)


def _values(data: memoryview, order: str, layout: _Layout, start: int, count: int) -> dict[int, int]:
    values: dict[int, int] = {}
    outside = 0
    head, room = struct.calcsize(layout.entry), struct.calcsize(layout.offset)
    for at in range(start, start + count * layout.entry_size, layout.entry_size):
        tag, kind, length = struct.unpack_from(order + layout.entry[1:], data, at)
        if length > _MAX_VALUES and kind not in _BYTES:
            raise ValueError(f"tag {tag} has {length} values")
        size = length * _SIZES.get(kind, 1)
        place = at + head
        if size > room:
            (place,) = struct.unpack_from(order + layout.offset[1:], data, place)
            outside += size
        if outside > len(data):  # in an honest file every byte belongs to one tag at most
            raise ValueError("the tags claim more bytes than there are")
        if kind in _NUMBERS and length:
            (values[tag],) = struct.unpack_from(order + _NUMBERS[kind], data, place)
    return values
