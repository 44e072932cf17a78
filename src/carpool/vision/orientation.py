"""EXIF orientation: which way up a picture was taken, and the pixels turned upright."""

from __future__ import annotations

import cv2
import numpy as np

from carpool.types import Array
from carpool.vision.tags import ORIENTATION, read_tags

UPRIGHT = 1
_EXIF = b"Exif\0\0"


def exif_orientation(block: memoryview) -> int:
    """1 to 8 from an EXIF block, with or without its `Exif` prefix; 1 where it is absent or broken."""
    if bytes(block[: len(_EXIF)]) == _EXIF:
        block = block[len(_EXIF) :]
    try:
        return checked(read_tags(block).get(ORIENTATION, UPRIGHT))
    except ValueError:
        return UPRIGHT  # a camera's note that cannot be read is no reason to refuse its picture


def checked(orientation: int) -> int:
    return orientation if 1 <= orientation <= 8 else UPRIGHT


def swaps_sides(orientation: int) -> bool:
    return orientation >= 5


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
