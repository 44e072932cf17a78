"""Decodes the bytes of a picture to upright RGB pixels, or raises an error: never half a picture."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import cv2
import numpy as np
import simplejpeg

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.heads import (
    DEFAULT_LIMITS,
    FIELD,
    UPRIGHT,
    Buffer,
    PictureHead,
    PictureLimits,
    exif_orientation,
    read_head,
)

if TYPE_CHECKING:
    from PIL import Image

Reduction = Callable[[int, int], int]
"""Takes the upright width and height; says how many times smaller to decode: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """`pixels` are uint8 [h, w, 3], RGB, contiguous; width and height are the whole, upright picture's."""

    pixels: Array
    width: int
    height: int


def decode(
    data: Buffer,
    limits: PictureLimits = DEFAULT_LIMITS,
    reduction: Reduction | None = None,
    head: PictureHead | None = None,
) -> Decoded:
    """The first frame of a JPEG, PNG, WebP, BMP, TIFF or GIF, whose `head` may have been read and checked.

    With `reduction` a JPEG may come back smaller by a whole factor, which is several times faster. Where that
    leaves the model's input as it is, Transform.reduction says so.
    """
    if head is None or not head.scans:
        head = read_head(data, limits)
    width, height = head.upright
    if head.format == "JPEG" and head.components in (1, 3):
        factor = reduction(width, height) if reduction else 1
        pixels = _jpeg(data, head, factor)
    else:
        factor, pixels = 1, _other(data, head)
    if pixels.shape != (height // factor, width // factor, 3):
        raise InvalidInput(f"the {head.format} image has another size than its head says", field=FIELD)
    return Decoded(pixels, width, height)


def _jpeg(data: Buffer, head: PictureHead, factor: int) -> Array:
    height, width = head.height // factor, head.width // factor
    if (height * factor, width * factor) != (head.height, head.width):
        raise ValueError(f"{head.width}×{head.height} pixels cannot be divided by {factor}")
    into = np.empty((height, width, 3), np.uint8)
    try:
        # The smallest scale that keeps so many pixels is the factor itself. Strict: what libjpeg only warns
        # about, such as an early end, is an error.
        simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=into, strict=True)
    except ValueError as error:
        raise InvalidInput(f"the JPEG image cannot be decoded: {error}", field=FIELD) from None
    return into if head.orientation == UPRIGHT else upright(into, head.orientation)


def _other(data: Buffer, head: PictureHead) -> Array:
    """Everything but ordinary JPEGs is left to Pillow, which is slower but knows every kind of pixel."""
    pixels = _through_pillow(data, head)
    return pixels if head.format == "TIFF" else upright(pixels, head.orientation)  # Pillow has turned TIFFs


_TURNS: dict[int, Callable[[Array], Array]] = {  # by EXIF's orientation
    2: lambda pixels: cv2.flip(pixels, 1),
    3: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_180),
    4: lambda pixels: cv2.flip(pixels, 0),
    5: cv2.transpose,
    6: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE),
    7: lambda pixels: cv2.transpose(cv2.rotate(pixels, cv2.ROTATE_180)),
    8: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE),
}


def upright(pixels: Array, orientation: int) -> Array:
    """The pixels as the photographer saw them."""
    turn = _TURNS.get(orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


# ---- pictures through Pillow: every format and colour type but ordinary JPEGs, as RGB

_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_STRIP = (
    1 << 20
)  # pixels that are made RGB at a time: what that takes besides is little, and stays in the cache


def _through_pillow(data: Buffer, head: PictureHead) -> Array:
    """The first frame as uint8 [h, w, 3]; only TIFFs come back turned upright."""
    from PIL import Image  # costs 40 ms to import, and most servers never need it

    Image.core.set_use_block_allocator(1)  # type: ignore[attr-defined]  # a picture in one piece, whose pages are given back at its end
    try:
        with Image.open(BytesIO(data), formats=[head.format.upper()]) as image:
            if sorted(image.size) != sorted((head.width, head.height)):  # before memory is taken for it
                raise ValueError(f"it is {image.width}×{image.height} pixels, but its head has another size")
            image.load()
            return _rgb(image, head)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything on bad bytes
        why = str(error).rstrip(".") or type(error).__name__
        raise InvalidInput(f"the {head.format} image cannot be decoded: {why}", field=FIELD) from None


def _rgb(image: Image.Image, head: PictureHead) -> Array:
    """Converts a picture strip by strip. A large picture of four bytes a pixel, as Pillow keeps colours, is
    moved together where it lies: each strip ends before the next begins. A copy of fifty million pixels would
    be 150 MB more."""
    width, height = image.size
    rows = max(1, _STRIP // width)
    memory = None if rows >= height else _memory_of(image)
    size = 3 * width * height
    pixels = (np.empty(size, np.uint8) if memory is None else memory[:size]).reshape(height, width, 3)
    for top in range(0, height, rows):
        end = min(height, top + rows)
        strip = image if rows >= height else image.crop((0, top, width, end))
        pixels[top:end] = _strip_as_rgb(strip, head)
    return pixels


def _strip_as_rgb(image: Image.Image, head: PictureHead) -> Array:
    """Returns the same as uint8 [h, w, 3]; or [h, w, 1], of a grey one."""
    if image.mode in _ALPHA or "transparency" in image.info:
        return _on_white(np.asarray(image if image.mode == "RGBA" else image.convert("RGBA")))
    if image.mode.startswith("I;16") or (image.mode == "I" and head.bits == 16):
        return (np.asarray(image) >> 8).astype(np.uint8)[:, :, None]
    if image.mode in ("I", "F"):
        raise ValueError("32 bits per channel are not supported; 8 and 16 are")
    if image.mode == "L":
        return np.asarray(image)[:, :, None]
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _on_white(rgba: Array) -> Array:
    """What shines through is white, as on a page: colours under full transparency are often leftovers."""
    lacking = (255 - rgba[:, :, :3]).astype(np.uint16) * rgba[:, :, 3:]
    pixels: Array = 255 - (lacking + 127) // 255
    return pixels


class _ArrowArray(ctypes.Structure):
    """Describes an array of Arrow's C data interface, by which Pillow shares where the pixels of a picture
    are."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "nulls", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private")),
]


def _memory_of(image: Image.Image) -> Array | None:
    """Returns Pillow's own memory, flat and to be written to, of a picture with four bytes a pixel in one
    piece. It stays as long as the array does. None of any other."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        _, told = image.__arrow_c_array__()
    except (AttributeError, ValueError):
        return None
    array = _ArrowArray.from_address(pointer(told, b"arrow_array"))
    size = 4 * image.width * image.height
    if array.n_children != 1 or array.children[0].contents.length != size:
        return None
    memory = (ctypes.c_uint8 * size).from_address(array.children[0].contents.buffers[1])
    memory.owner = image.im  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


# ---- which JPEGs every decoder reads alike, a device's too: judged by their heads, in a few microseconds

MOST_PIXELS = 9_000_000
"""On a device, where a whole batch lies decoded at the same time: 4096×2160 fits."""

_MOST_SEGMENTS = 64  # before the pixels; an ordinary file has a dozen
_START, _END = b"\xff\xd8\xff", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1)  # baseline, and extended with Huffman codes
_SCAN, _EXIF, _ADOBE = 0xDA, 0xE1, 0xEE
_TABLES = (0xC4, 0xDB, 0xDD, 0xFE)  # with restarts and comments
_PASSED = frozenset((*_TABLES, *range(0xE0, 0xF0))) - {_EXIF, _ADOBE}  # whatever they hold
_FRAME_LENGTH = 17  # with three components
_YCBCR = b"\x01"
_SAMPLINGS = (b"\x11", b"\x21", b"\x22")  # of the brightness: 4:4:4, 4:2:2, 4:2:0
_segment = struct.Struct(">BBH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from


def plain_size(data: Buffer) -> tuple[int, int] | None:
    """Returns width and height of an ordinary JPEG: 8 bits, YCbCr, one scan, upright, whole as far as its
    last bytes show, small enough for a device. None for anything else, which the CPU's decoder judges."""
    if data[:3] != _START or data[-2:] != _END or len(data) > DEFAULT_LIMITS.bytes:
        return None
    try:
        return _plain_frame(data)
    except (struct.error, IndexError):
        return None


def _plain_frame(data: Buffer) -> tuple[int, int] | None:
    at, size = 2, None
    for _ in range(_MOST_SEGMENTS):
        lead, marker, length = _segment(data, at)
        if lead != 0xFF or length < 2:
            return None
        if marker in _FRAMES:
            size = None if size is not None or length != _FRAME_LENGTH else _plain_frame_size(data, at + 4)
            if size is None:
                return None
        elif marker == _SCAN:
            return size if data[at + 4] == 3 else None
        elif marker not in _PASSED and not _passes(data, marker, at + 4, length - 2):
            return None
        at += 2 + length
    return None


def _passes(data: Buffer, marker: int, at: int, length: int) -> bool:
    """An upright EXIF block, or Adobe's note that colours were transformed: without it they were."""
    block = memoryview(data)[at : at + length]
    if marker == _EXIF:
        return bytes(block[:4]) != b"Exif" or exif_orientation(block) == UPRIGHT
    return marker == _ADOBE and (bytes(block[:5]) != b"Adobe" or bytes(block[11:12]) == _YCBCR)


def _plain_frame_size(data: Buffer, at: int) -> tuple[int, int] | None:
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
