"""Keeps a decoded picture for a while, and cuts pictures out of it."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from carpool.types import Array
from carpool.vision.decode import Decoded, Reduction
from carpool.vision.rectify import rectify

_FACTORS = (8, 4, 2)


def reduction_to(longest: int) -> Reduction:
    """Returns the reduction for decoding no more pixels than are kept: a JPEG may be decoded smaller by a
    whole factor, as long as the longer side does not fall below this."""

    def reduction(width: int, height: int) -> int:
        for factor in _FACTORS:
            if max(width, height) >= factor * longest and width % factor == 0 and height % factor == 0:
                return factor
        return 1

    return reduction


def kept(decoded: Decoded, longest: int) -> Decoded:
    """Returns the picture with its longer side no longer than this."""
    height, width = decoded.pixels.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1.0:
        return decoded
    size = max(1, round(width * scale)), max(1, round(height * scale))
    smaller: Array = cv2.resize(decoded.pixels, size, interpolation=cv2.INTER_AREA)
    return Decoded(smaller, decoded.width, decoded.height)


def crop(picture: Decoded, left: int, top: int, right: int, bottom: int) -> Decoded:
    """Returns a rectangle of the whole picture's pixels, at least one of those that were kept: a view of
    them."""
    rows, columns = picture.pixels.shape[:2]
    across, down = columns / picture.width, rows / picture.height
    x1, y1 = min(int(left * across), columns - 1), min(int(top * down), rows - 1)
    x2, y2 = max(x1 + 1, round(right * across)), max(y1 + 1, round(bottom * down))
    part = picture.pixels[y1:y2, x1:x2]
    return Decoded(part, part.shape[1], part.shape[0])


def rectified(
    picture: Decoded, corners: Sequence[Sequence[float]], height: int, longest: int, stretch: float = 1.0
) -> Decoded:
    """Returns a quadrilateral of the whole picture's pixels as an upright picture of this height."""
    rows, columns = picture.pixels.shape[:2]
    scale = np.array([columns / picture.width, rows / picture.height], np.float32)
    upright = rectify(picture.pixels, np.array(corners, np.float32) * scale, height, longest, stretch)
    return Decoded(upright, upright.shape[1], upright.shape[0])
