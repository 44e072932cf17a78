"""A quadrilateral of a picture → an upright picture of a line, as high as a reader wants it."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from carpool.types import Array

_UPRIGHT = 1.5  # times higher than wide: a line that runs down the page
_MOST_SIDE = 8192  # pixels of what is cut out


def rectify(
    pixels: Array,
    polygon: Sequence[Sequence[float]] | Array,
    height: int,
    longest: int,
    stretch: float = 1.0,
) -> Array:
    """RGB [height, width, 3], `stretch` times as wide as the quadrilateral's proportions say, but 1 to
    `longest`: what is longer is squeezed. Corners go round from where reading begins; a quadrilateral much
    higher than wide is read downwards, and so turned. What lies beyond the picture's edges repeats them; a
    quadrilateral without any area is one pixel of it."""
    corners = np.nan_to_num(np.array(polygon, np.float32).reshape(4, 2), nan=0.0, posinf=0.0, neginf=0.0)
    limit = np.array([pixels.shape[1], pixels.shape[0]], np.float32)
    corners = np.clip(corners, -limit, 2 * limit)
    wide, high = _sides(corners)
    if high >= _UPRIGHT * wide and high > 2:
        corners, (wide, high) = np.roll(corners, -1, axis=0), (high, wide)
    wide, high = min(max(wide * stretch, 1.0), _MOST_SIDE), min(max(high, 1.0), _MOST_SIDE)
    width = min(max(round(wide * height / high), 1), longest)
    first = (round(wide), round(high)) if high > height else (width, height)
    cut = _warped(pixels, corners, first)
    if first == (width, height):
        return cut
    resized: Array = cv2.resize(cut, (width, height), interpolation=cv2.INTER_AREA)
    return resized


def _sides(corners: Array) -> tuple[float, float]:
    along = np.linalg.norm(corners - np.roll(corners, -1, axis=0), axis=1)
    return float(max(along[0], along[2])), float(max(along[1], along[3]))


def _warped(pixels: Array, corners: Array, size: tuple[int, int]) -> Array:
    """Corners are of edges: the middle of the first pixel lies half a pixel inside."""
    width, height = size
    onto = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    matrix = cv2.getPerspectiveTransform(onto, corners)
    if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-12:
        x, y = np.clip(corners[0], 0, (pixels.shape[1] - 1, pixels.shape[0] - 1)).astype(int).tolist()
        return np.broadcast_to(pixels[y, x], (height, width, 3)).copy()
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]], np.float64)
    matrix = np.linalg.inv(half) @ matrix @ half
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cut: Array = cv2.warpPerspective(pixels, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return cut
