"""The transform as its documentation says it, slow and plain: the fast one is held against this."""

from __future__ import annotations

import math

import numpy as np

from carpool.config.model import ImageSettings
from carpool.types import Array

GREY = (0.299, 0.587, 0.114)


def transformed(pixels: Array, settings: ImageSettings, size: tuple[int, int], channels: int) -> Array:
    """[channels, h, w] as float64, with `settings.scale` given; pixels are the whole upright picture."""
    rows, columns = size
    height, width = pixels.shape[:2]
    canvas = np.full((rows, columns, 3), float(settings.pad))
    if settings.resize == "letterbox":
        scale = min(columns / width, rows / height, settings.enlarge or math.inf)
        wide, high = nearest(width * scale, columns), nearest(height * scale, rows)
        left, top = ((columns - wide) // 2, (rows - high) // 2) if settings.anchor == "center" else (0, 0)
        canvas[top : top + high, left : left + wide] = resized(pixels, high, wide, settings.kernel)
    elif settings.resize == "stretch":
        canvas[:] = resized(pixels, rows, columns, settings.kernel)
    else:
        canvas[:] = resized(middle(pixels, settings, size), rows, columns, settings.kernel)
    if channels == 1:
        canvas = np.rint(canvas @ np.array(GREY))[:, :, None]
    elif settings.channels == "bgr":
        canvas = canvas[:, :, ::-1]
    assert settings.scale is not None
    values = (canvas * settings.scale - np.array(settings.mean)) / np.array(settings.std)
    return values.transpose(2, 0, 1)


def nearest(length: float, most: int) -> int:
    return min(max(math.floor(length + 0.5), 1), most)


def middle(pixels: Array, settings: ImageSettings, size: tuple[int, int]) -> Array:
    """The part that is kept by crop: on whole pixels, or on the grid that a reduced decode would have."""
    rows, columns = size
    height, width = pixels.shape[:2]
    scale = max(columns / width, rows / height) / settings.crop
    wide, high = min(columns / scale, width), min(rows / scale, height)
    grid = 1
    for factor, enough in ((2, 1.6), (4, 2.0), (8, 2.75)):
        divides = width % factor == 0 and height % factor == 0
        if divides and settings.kernel in ("auto", "area"):
            kept = min(wide / factor / columns, high / factor / rows)
            grid = factor if kept >= enough else grid
    across, down = nearest(wide / grid, width // grid), nearest(high / grid, height // grid)
    left, top = (width // grid - across) // 2 * grid, (height // grid - down) // 2 * grid
    return pixels[top : top + down * grid, left : left + across * grid]


def resized(pixels: Array, rows: int, columns: int, kernel: str) -> Array:
    """Along the columns, then along the rows; rounded to bytes at the end."""
    height, width = pixels.shape[:2]
    if kernel == "auto":
        kernel = "area" if height > 2 * rows or width > 2 * columns else "bilinear"
    if kernel == "area" and (rows > height or columns > width):
        kernel = "bilinear"
    down, across = weights(height, rows, kernel), weights(width, columns, kernel)
    mixed = np.einsum("ih,hwc,jw->ijc", down, pixels.astype(np.float64), across, optimize=True)
    return np.clip(np.rint(mixed), 0, 255)


def weights(source: int, target: int, kernel: str) -> Array:
    """[target, source]: how much of each source pixel is in each target pixel."""
    step = source / target
    matrix = np.zeros((target, source))
    for i in range(target):
        if kernel == "area":
            for j in range(int(i * step), min(math.ceil((i + 1) * step), source)):
                matrix[i, j] = (min(j + 1, (i + 1) * step) - max(j, i * step)) / step
            continue
        at = (i + 0.5) * step - 0.5
        first = math.floor(at)
        taps = (0, 1) if kernel == "bilinear" else (-1, 0, 1, 2)
        for tap in taps:
            weight = linear(at - first - tap) if kernel == "bilinear" else cubic(at - first - tap)
            matrix[i, min(max(first + tap, 0), source - 1)] += weight
    return matrix


def linear(distance: float) -> float:
    return 1 - abs(distance)


def cubic(distance: float, a: float = -0.75) -> float:
    d = abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
