"""How a picture was laid into the model's input, and the way back to its own pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from carpool.config.model import ImageSettings
from carpool.types import Array


@dataclass(frozen=True, slots=True)
class Geometry:
    """A point (x, y) of the upright picture lies at (x × scale_x + left, y × scale_y + top) in the input.

    `left` and `top` are negative where the picture was cropped. Coordinates are of edges, not of centres: the
    picture reaches from 0 to its width.
    """

    width: int  # of the picture, upright, before any reduced decoding
    height: int
    input_width: int
    input_height: int
    scale_x: float
    scale_y: float
    left: float = 0.0
    top: float = 0.0

    def to_picture(self, boxes: Array) -> Array:
        """Boxes [n, 4] as x1, y1, x2, y2 in input pixels → in the picture's pixels, cut at its edges."""
        offset = np.array([self.left, self.top] * 2, np.float32)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        limits = np.array([self.width, self.height] * 2, np.float32)
        moved: Array = np.clip((boxes - offset) / scale, 0.0, limits)
        return moved

    @property
    def area(self) -> tuple[float, float, float, float]:
        """Where the whole picture lies in the input: x1, y1, x2, y2, beyond its edges where cropped."""
        right = self.left + self.width * self.scale_x
        bottom = self.top + self.height * self.scale_y
        return self.left, self.top, right, bottom


# ---- which part of a picture goes where in the model's input: arithmetic only, no pixels


# A JPEG decoded k times smaller must keep this many times the pixels of the input, per side. Measured: below
# it, the mean difference to a full decode passes 2.5 of 255 on sharp photos (docs/images.md).
_ENOUGH = ((8, 2.75), (4, 2.0), (2, 1.6))
_BILINEAR_SEES = 2  # times smaller: up to here every pixel counts in one of two neighbours


@dataclass(frozen=True, slots=True)
class Placement:
    """The rectangle `left`, `top`, `width`, `height` of the picture fills one of the input.

    `grid` divides the rectangle of the picture and the picture itself: a picture that was decoded so many
    times smaller holds it in whole pixels.
    """

    left: int
    top: int
    width: int
    height: int
    into_left: int
    into_top: int
    into_width: int
    into_height: int
    grid: int

    def kernel(self, asked: str) -> str:
        """How pixels are mixed: `auto` and `area` depend on how much smaller or larger they become."""
        if asked not in ("auto", "area"):
            return asked
        shrinks = (self.width / self.into_width, self.height / self.into_height)
        if min(shrinks) < 1 or (asked == "auto" and max(shrinks) <= _BILINEAR_SEES):
            return "bilinear"
        return "area"

    def geometry(self, width: int, height: int, size: tuple[int, int]) -> Geometry:
        scale_x, scale_y = self.into_width / self.width, self.into_height / self.height
        return Geometry(
            width,
            height,
            size[1],
            size[0],
            scale_x,
            scale_y,
            self.into_left - self.left * scale_x,
            self.into_top - self.top * scale_y,
        )


def place(width: int, height: int, size: tuple[int, int], settings: ImageSettings) -> Placement:
    """`size` is the input's height and width."""
    rows, columns = size
    if settings.resize == "crop":
        return _crop(width, height, size, settings)
    into = (columns, rows)
    if settings.resize == "letterbox":
        scale = min(columns / width, rows / height)
        into = (_side(width * scale, columns), _side(height * scale, rows))
    corner = (0, 0)
    if settings.anchor == "center":
        corner = ((columns - into[0]) // 2, (rows - into[1]) // 2)
    grid = _grid((width, height), (width, height), into, settings.kernel)
    return Placement(0, 0, width, height, *corner, *into, grid)


def _crop(width: int, height: int, size: tuple[int, int], settings: ImageSettings) -> Placement:
    """The middle of the picture in the input's proportions, in whole pixels (of the grid)."""
    rows, columns = size
    scale = max(columns / width, rows / height) / settings.crop
    part = (min(columns / scale, width), min(rows / scale, height))
    grid = _grid((width, height), part, (columns, rows), settings.kernel)
    left, wide = _middle(width // grid, part[0] / grid)
    top, high = _middle(height // grid, part[1] / grid)
    return Placement(left * grid, top * grid, wide * grid, high * grid, 0, 0, columns, rows, grid)


def _middle(side: int, part: float) -> tuple[int, int]:
    length = _side(part, side)
    return (side - length) // 2, length


def _side(length: float, most: int) -> int:
    """To the nearest pixel, at least one: the thinnest picture still shows."""
    return min(max(int(length + 0.5), 1), most)


def _grid(picture: tuple[int, int], part: tuple[float, float], into: tuple[int, int], kernel: str) -> int:
    """How many times smaller a JPEG may be decoded: only averaging over areas does not notice.

    The other kernels look at single pixels far apart, and would see other ones.
    """
    if kernel not in ("auto", "area"):
        return 1
    for factor, enough in _ENOUGH:
        whole = all(side % factor == 0 for side in picture)
        if whole and all(p >= factor * enough * i for p, i in zip(part, into, strict=True)):
            return factor
    return 1
