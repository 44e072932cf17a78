"""Bytes of a picture → upright RGB pixels, or an error: never half a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simplejpeg

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.formats import DEFAULT_LIMITS, FIELD, Buffer, Limits, read_head
from carpool.vision.heads import Head
from carpool.vision.orientation import UPRIGHT, upright

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
    from carpool.vision import pillow  # costs 40 ms to import, and most servers never need it

    pixels = pillow.decode(data, head)
    turned_by_pillow = head.format == "TIFF"
    return upright(pixels, UPRIGHT if turned_by_pillow else head.orientation)
