"""Which JPEGs every decoder reads alike, a device's too: told from their heads, in a few microseconds."""

from __future__ import annotations

import struct

from carpool.vision.formats import DEFAULT_LIMITS, Buffer
from carpool.vision.heads import UPRIGHT, exif_orientation

MOST_PIXELS = 9_000_000
"""On a device, where a whole batch lies decoded at the same time: 4096×2160 fits."""

_MOST_SEGMENTS = 64  # before the pixels; an ordinary file has a dozen
_START, _END = b"\xff\xd8\xff", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1)  # baseline, and extended with Huffman codes
_SCAN, _EXIF, _ADOBE = 0xDA, 0xE1, 0xEE
_TABLES = (0xC4, 0xDB, 0xDD, 0xFE)  # with restarts and comments
_PASSED = frozenset((*_TABLES, *range(0xE0, 0xF0))) - {_EXIF, _ADOBE}  # whatever they hold
_FRAME_LENGTH = 17  # with three components
_YCBCR = 1
_SAMPLINGS = (b"\x11", b"\x21", b"\x22")  # of the brightness: 4:4:4, 4:2:2, 4:2:0
_segment = struct.Struct(">BBH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from


def plain_size(data: Buffer) -> tuple[int, int] | None:
    """Width and height of an ordinary JPEG: 8 bits, YCbCr, one scan, upright, whole as far as its last bytes
    tell, of a size that a device can hold. None for anything else, good or bad: the CPU's decoder knows."""
    if data[:3] != _START or data[-2:] != _END or len(data) > DEFAULT_LIMITS.bytes:
        return None
    try:
        return _read(data)
    except (struct.error, IndexError):
        return None


def _read(data: Buffer) -> tuple[int, int] | None:
    at, size = 2, None
    for _ in range(_MOST_SEGMENTS):
        lead, marker, length = _segment(data, at)
        if lead != 0xFF or length < 2:
            return None
        if marker in _FRAMES:
            size = None if size is not None or length != _FRAME_LENGTH else _size(data, at + 4)
            if size is None:
                return None
        elif marker == _SCAN:
            return size if data[at + 4] == 3 else None
        elif marker not in _PASSED and not _passes(data, marker, at + 4, length - 2):
            return None
        at += 2 + length
    return None


def _passes(data: Buffer, marker: int, at: int, length: int) -> bool:
    if marker == _EXIF:
        return _is_upright(data, at, length)
    return marker == _ADOBE and _is_ycbcr(data, at, length)


def _size(data: Buffer, at: int) -> tuple[int, int] | None:
    bits, height, width, components = _frame(data, at)
    described = bytes(data[at + 6 : at + 15])  # number, sampling and table of each component
    plain = (
        bits == 8
        and components == 3
        and described[0::3] == b"\x01\x02\x03"
        and described[1:2] in _SAMPLINGS
        and described[4:5] == described[7:8] == b"\x11"
    )
    fits = 0 < width * height <= MOST_PIXELS
    return (width, height) if plain and fits else None


def _is_upright(data: Buffer, at: int, length: int) -> bool:
    block = memoryview(data)[at : at + length]
    return bytes(block[:4]) != b"Exif" or exif_orientation(block) == UPRIGHT


def _is_ycbcr(data: Buffer, at: int, length: int) -> bool:
    """Adobe's note says whether colours were transformed; without it they were."""
    block = bytes(data[at : at + length])
    return block[:5] != b"Adobe" or block[11:12] == bytes([_YCBCR])
