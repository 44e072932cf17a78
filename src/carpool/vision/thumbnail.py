"""Makes a small grey picture of a picture, and measures how much of it changed: enough to see whether a scene
is the same.

A hash of the whole picture was tried: it does not see a person of a third of the frame's height, and on a
plain wall it is noise. Here the largest change of any place counts, however small that place is.
"""

from __future__ import annotations

from math import inf

import cv2
import numpy as np
import simplejpeg

from carpool.errors import InvalidInput, TooLarge
from carpool.types import Array
from carpool.vision.decode import decode, upright
from carpool.vision.heads import PictureHead, read_head

SCALE = 8  # the most that a JPEG's decoder can leave out by itself, which saves more than half of its time


def thumbnail(picture: bytes | memoryview) -> Array | None:
    """Returns it upright, grey, an eighth of each side, uint8 [h, w]; None for what would not be decoded
    either."""
    try:
        head = read_head(picture)
        if head.format == "JPEG" and head.components in (1, 3):
            return _of_jpeg(picture, head)
        return thumbnail_of(decode(picture).pixels)
    except (InvalidInput, TooLarge):
        return None


def _of_jpeg(picture: bytes | memoryview, head: PictureHead) -> Array | None:
    """Returns a JPEG decoded at that scale. Strict, as pictures for models are: half a picture has changed,
    but not so."""
    height, width = _eighth(head.height), _eighth(head.width)
    try:
        grey = simplejpeg.decode_jpeg(picture, "GRAY", min_height=height, min_width=width, strict=True)
    except ValueError:
        return None
    if grey.shape[:2] != (height, width):
        return None
    return upright(grey.reshape(height, width), head.orientation)


def thumbnail_of(pixels: Array) -> Array:
    """Returns the same of decoded pixels, RGB [h, w, 3]."""
    height, width = pixels.shape[:2]
    below, beside = -height % SCALE, -width % SCALE
    if below or beside:  # as a JPEG's last blocks are filled
        pixels = cv2.copyMakeBorder(pixels, 0, below, 0, beside, cv2.BORDER_REPLICATE)
    small = cv2.resize(pixels, (_eighth(width), _eighth(height)), interpolation=cv2.INTER_AREA)
    grey: Array = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    return grey


def _eighth(side: int) -> int:
    return -(-side // SCALE)


def block_change(a: Array, b: Array) -> float:
    """Returns the largest change of any 3×3 block, in grey levels of 255; infinite where the sizes differ.

    What all have in common is taken off first: that is the light, not the scene; the median of every second
    row and column, which a few pixels more or less do not move. The same both ways.
    """
    if a.shape != b.shape:
        return inf
    change = cv2.subtract(a, b, dtype=cv2.CV_16S)
    some = change[::2, ::2].ravel()
    odd = some[: (some.size - 1) | 1]  # so that one is in the middle, whichever way round
    change -= np.partition(odd, len(odd) // 2)[len(odd) // 2]
    sums = cv2.boxFilter(
        np.abs(change, out=change), -1, (3, 3), normalize=False, borderType=cv2.BORDER_REPLICATE
    )
    return float(cv2.norm(sums, cv2.NORM_INF)) / 9
