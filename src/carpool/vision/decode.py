"""Bytes of a picture → upright RGB pixels, or an error: never half a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import cv2
import numpy as np
import simplejpeg

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.formats import DEFAULT_LIMITS, FIELD, Buffer, Limits, read_head
from carpool.vision.heads import UPRIGHT, Head

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


def decode(data: Buffer, limits: Limits = DEFAULT_LIMITS, reduction: Reduction | None = None) -> Decoded:
    """The first frame of a JPEG, PNG, WebP, BMP, TIFF or GIF.

    With `reduction` a JPEG may come back smaller by a whole factor, which is several times faster. Where that
    leaves the model's input as it is, Transform.reduction says so.
    """
    head = read_head(data, limits)
    width, height = head.upright
    if head.format == "JPEG" and head.components in (1, 3):
        factor = reduction(width, height) if reduction else 1
        pixels = _jpeg(data, head, factor)
    else:
        factor, pixels = 1, _other(data, head)
    if pixels.shape != (height // factor, width // factor, 3):
        raise InvalidInput(f"the {head.format} picture has another size than its head says", field=FIELD)
    return Decoded(pixels, width, height)


def _jpeg(data: Buffer, head: Head, factor: int) -> Array:
    height, width = head.height // factor, head.width // factor
    if (height * factor, width * factor) != (head.height, head.width):
        raise ValueError(f"{head.width}×{head.height} pixels cannot be divided by {factor}")
    into = np.empty((height, width, 3), np.uint8)
    try:
        # The smallest scale that keeps so many pixels is the factor itself. Strict: what libjpeg only warns
        # about, such as an early end, is an error.
        simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=into, strict=True)
    except ValueError as error:
        raise InvalidInput(f"the JPEG picture cannot be decoded: {error}", field=FIELD) from None
    return upright(into, head.orientation)


def _other(data: Buffer, head: Head) -> Array:
    """Everything but ordinary JPEGs is left to Pillow, which is slower but knows every kind of pixel."""
    pixels = _through_pillow(data, head)
    turned_by_pillow = head.format == "TIFF"
    return upright(pixels, UPRIGHT if turned_by_pillow else head.orientation)


def upright(pixels: Array, orientation: int) -> Array:
    """The pixels as the photographer saw them."""
    turned: Array
    match orientation:
        case 2:
            turned = cv2.flip(pixels, 1)
        case 3:
            turned = cv2.rotate(pixels, cv2.ROTATE_180)
        case 4:
            turned = cv2.flip(pixels, 0)
        case 5:
            turned = cv2.transpose(pixels)
        case 6:
            turned = cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE)
        case 7:
            turned = cv2.transpose(cv2.rotate(pixels, cv2.ROTATE_180))
        case 8:
            turned = cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE)
        case _:
            return pixels
    return np.ascontiguousarray(turned)


# ---- pictures through Pillow: every format and colour type but ordinary JPEGs, as RGB


_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_ROWS = 256  # blended at a time, so that the wider numbers stay in the cache


def _through_pillow(data: Buffer, head: Head) -> Array:
    """The first frame as uint8 [h, w, 3]; only TIFFs come back turned upright."""
    from PIL import Image  # costs 40 ms to import, and most servers never need it

    try:
        with Image.open(BytesIO(data), formats=[head.format.upper()]) as image:
            if sorted(image.size) != sorted((head.width, head.height)):  # before memory is taken for it
                raise ValueError(f"it is {image.width}×{image.height} pixels, and its head says otherwise")
            image.load()
            return _rgb(image, head)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything on bad bytes
        why = str(error).rstrip(".") or type(error).__name__
        raise InvalidInput(f"the {head.format} picture cannot be decoded: {why}", field=FIELD) from None


def _rgb(image: Image.Image, head: Head) -> Array:
    if image.mode in _ALPHA or "transparency" in image.info:
        return _on_white(np.asarray(image if image.mode == "RGBA" else image.convert("RGBA")))
    if image.mode.startswith("I;16") or (image.mode == "I" and head.bits == 16):
        return _from_grey((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32 bits per channel are too many; 8 and 16 are read")
    if image.mode == "L":
        return _from_grey(np.asarray(image))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _from_grey(grey: Array) -> Array:
    pixels: Array = cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB)
    return pixels


def _on_white(rgba: Array) -> Array:
    """What shines through is white, as on a page: colours under full transparency are often leftovers."""
    pixels = np.empty((*rgba.shape[:2], 3), np.uint8)
    for top in range(0, len(rgba), _ROWS):
        rows = rgba[top : top + _ROWS]
        lacking = (255 - rows[:, :, :3]).astype(np.uint16) * rows[:, :, 3:]
        pixels[top : top + _ROWS] = 255 - (lacking + 127) // 255
    return pixels
