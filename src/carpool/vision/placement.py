"""Which part of a picture goes where in the model's input: arithmetic only, no pixels."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.model import ImageSettings
from carpool.vision.geometry import Geometry

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
