"""Pictures through Pillow: every format and colour type but ordinary JPEGs, as RGB."""

from __future__ import annotations

from io import BytesIO

import cv2
import numpy as np
from PIL import Image

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.formats import FIELD, Buffer
from carpool.vision.heads import Head

_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_ROWS = 256  # blended at a time, so that the wider numbers stay in the cache


def decode(data: Buffer, head: Head) -> Array:
    """The first frame as uint8 [h, w, 3]; only TIFFs come back turned upright."""
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
