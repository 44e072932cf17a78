"""Describes how a picture was laid into the model's input, and the way back to its own pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from carpool.config.model import DYNAMIC, PILLOW, ImageSettings
from carpool.errors import ConfigError
from carpool.types import Array, Datatype, TensorSpec


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
        """Maps boxes [n, 4] as x1, y1, x2, y2 in input pixels to the picture's pixels, cut at its edges."""
        offset = np.array([self.left, self.top] * 2, np.float32)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        limits = np.array([self.width, self.height] * 2, np.float32)
        moved: Array = np.clip((boxes - offset) / scale, 0.0, limits)
        return moved

    def points_to_picture(self, points: Array) -> Array:
        """Maps […, 2] as x, y in input pixels to the picture's pixels, also beyond its edges."""
        moved: Array = (points - np.array([self.left, self.top], np.float32)) / np.array(
            [self.scale_x, self.scale_y], np.float32
        )
        return moved

    @property
    def area(self) -> tuple[float, float, float, float]:
        """Returns where the whole picture lies in the input: x1, y1, x2, y2, beyond its edges where
        cropped."""
        right = self.left + self.width * self.scale_x
        bottom = self.top + self.height * self.scale_y
        return self.left, self.top, right, bottom


# ---- which part of a picture goes where in the model's input: arithmetic only, no pixels

# A JPEG decoded k times smaller must keep this many times the pixels of the input, per side. Measured: below
# it, the mean difference to a full decode passes 2.5 of 255 on sharp photos (docs/pictures.md).
_ENOUGH = ((8, 2.75), (4, 2.0), (2, 1.6))
_ENOUGH_FOR_PILLOW = ((8, 3.0), (4, 3.0), (2, 3.0))  # as Pillow's reducing_gap: nearly what the whole gives
_SEE_ALL = tuple(kernel for kernel in PILLOW if kernel != "pil-nearest")
_BILINEAR_SEES = 2  # times smaller: up to here every pixel counts in one of two neighbours


@dataclass(frozen=True, slots=True)
class PicturePlacement:
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
    box: tuple[float, float, float, float] | None = None
    """The rectangle's edges to a fraction of a pixel, left, top, right and bottom, for Pillow's kernels."""

    def kernel(self, asked: str) -> str:
        """Returns how pixels are mixed: `auto` and `area` depend on how much smaller or larger they
        become."""
        if asked not in ("auto", "area"):
            return asked
        shrinks = (self.width / self.into_width, self.height / self.into_height)
        if min(shrinks) < 1 or (asked == "auto" and max(shrinks) <= _BILINEAR_SEES):
            return "bilinear"
        return "area"

    def geometry(self, width: int, height: int, size: tuple[int, int]) -> Geometry:
        x1, y1, x2, y2 = self.box or (self.left, self.top, self.left + self.width, self.top + self.height)
        scale_x, scale_y = self.into_width / (x2 - x1), self.into_height / (y2 - y1)
        left, top = self.into_left - x1 * scale_x, self.into_top - y1 * scale_y
        return Geometry(width, height, size[1], size[0], scale_x, scale_y, left, top)


def place(width: int, height: int, size: tuple[int, int], settings: ImageSettings) -> PicturePlacement:
    """`size` is the input's height and width."""
    rows, columns = size
    if settings.resize == "crop":
        return _crop(width, height, size, settings)
    into = (columns, rows)
    if settings.resize == "letterbox":
        scale = min(columns / width, rows / height, settings.enlarge or np.inf)
        into = (_side(width * scale, columns), _side(height * scale, rows))
    elif settings.resize == "line":  # as high as the input, from its left; what is too long is squeezed
        into = (_side(width * rows / height, columns), rows)
    corner = (0, 0)
    if settings.resize == "letterbox" and settings.anchor == "center":
        corner = ((columns - into[0]) // 2, (rows - into[1]) // 2)
    grid = _grid((width, height), (width, height), into, settings.kernel)
    return PicturePlacement(0, 0, width, height, *corner, *into, grid)


def _crop(width: int, height: int, size: tuple[int, int], settings: ImageSettings) -> PicturePlacement:
    """Returns the middle of the picture in the input's proportions, in whole pixels (of the grid)."""
    rows, columns = size
    scale = max(columns / width, rows / height) / settings.crop
    part = (min(columns / scale, width), min(rows / scale, height))
    grid = _grid((width, height), part, (columns, rows), settings.kernel)
    left, wide = _middle(width // grid, part[0] / grid)
    top, high = _middle(height // grid, part[1] / grid)
    box = _box(width, height, size, settings) if settings.kernel in PILLOW else None
    return PicturePlacement(left * grid, top * grid, wide * grid, high * grid, 0, 0, columns, rows, grid, box)


def _box(
    width: int, height: int, size: tuple[int, int], settings: ImageSettings
) -> tuple[float, float, float, float]:
    """As torchvision, timm and transformers crop: the picture is resized to whole pixels, its shorter side
    first, and the middle is cut out of that from a whole pixel on."""
    rows, columns = size
    scale = max(columns / width, rows / height) / settings.crop
    if rows == columns:
        shorter = int(rows / settings.crop + 0.5)
        scale = shorter / min(width, height)
    whole = max(int(width * scale + 1e-6), columns), max(int(height * scale + 1e-6), rows)
    left, top = (round((side - part) / 2) for side, part in zip(whole, (columns, rows), strict=True))
    across, down = width / whole[0], height / whole[1]
    return left * across, top * down, (left + columns) * across, (top + rows) * down


def _middle(side: int, part: float) -> tuple[int, int]:
    length = _side(part, side)
    return (side - length) // 2, length


def _side(length: float, most: int) -> int:
    """Rounds to the nearest pixel, at least one: the thinnest picture still shows."""
    return min(max(int(length + 0.5), 1), most)


def _grid(picture: tuple[int, int], part: tuple[float, float], into: tuple[int, int], kernel: str) -> int:
    """How many times smaller a JPEG may be decoded: only averaging over areas does not notice.

    The other kernels look at single pixels far apart, and would see other ones.
    """
    if kernel not in ("auto", "area", *_SEE_ALL):
        return 1
    for factor, enough in _ENOUGH_FOR_PILLOW if kernel in _SEE_ALL else _ENOUGH:
        whole = all(side % factor == 0 for side in picture)
        if whole and all(p >= factor * enough * i for p, i in zip(part, into, strict=True)):
            return factor
    return 1


# ---- what the model's input looks like as a picture


@dataclass(frozen=True, slots=True)
class InputForm:
    shape: tuple[int, ...]  # of the input, without the batch, nothing left open
    planar: bool  # channels first
    channels: int
    size: tuple[int, int]  # height, width


def read_form(settings: ImageSettings, spec: TensorSpec, where: str) -> InputForm:
    """Returns the form of an input like [3, h, w], [h, w, 3] or [1, 3, h, w]; a ConfigError names the key to
    change."""
    *ones, first, second, third = (1, 1, 1, *spec.shape) if len(spec.shape) < 3 else spec.shape
    told = f'the input "{spec.name}" is {list(spec.shape)}'
    if len(spec.shape) < 3 or any(side not in (1, DYNAMIC) for side in ones):
        raise ConfigError(f"{where}: an image needs three dimensions besides the batch, but {told}")
    planar = _planar(settings, (first, second, third), f"{where}: image.layout", told)
    channels, sides = (first, (second, third)) if planar else (third, (first, second))
    channels = 3 if channels == DYNAMIC else channels
    if channels not in (1, 3):
        raise ConfigError(f"{where}: image.layout: an image has 1 or 3 channels, but {told}")
    size = _size(settings, sides, f"{where}: image.size", told)
    _check_values(settings, channels, where)
    picture = (channels, *size) if planar else (*size, channels)
    return InputForm((*(1 for _ in ones), *picture), planar, channels, size)


def _planar(settings: ImageSettings, shape: tuple[int, int, int], key: str, told: str) -> bool:
    if settings.layout is not None:
        return settings.layout == "nchw"
    if shape[0] in (1, 3):
        return True
    if shape[2] in (1, 3):
        return False
    raise ConfigError(f'{key} is needed, "nchw" or "nhwc": {told}, which leaves it open')


def _size(settings: ImageSettings, sides: tuple[int, int], key: str, told: str) -> tuple[int, int]:
    if settings.size is None:
        if DYNAMIC in sides:
            raise ConfigError(f"{key} is needed, as height and width: {told}, which leaves it open")
        return sides
    if any(side not in (DYNAMIC, wanted) for side, wanted in zip(sides, settings.size, strict=True)):
        raise ConfigError(f"{key} {list(settings.size)} (height, width) does not fit: {told}")
    return settings.size


def _check_values(settings: ImageSettings, channels: int, where: str) -> None:
    for key, values in (("mean", settings.mean), ("std", settings.std)):
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{where}: image.{key} has {len(values)} numbers; the model's input has {channels} channel"
                + ("s" if channels > 1 else "")
            )


# ---- what each of the 256 values of a pixel becomes in the model's input, exact and in its datatype

_FLOATS = (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64)
_NOT_NUMBERS = (Datatype.BOOL, Datatype.BYTES)


def lookup_tables(settings: ImageSettings, form: InputForm, datatype: Datatype, where: str) -> list[Array]:
    """Returns [1, 256] for each plane of a planar input; [1, 256, channels] where the channels lie side by
    side."""
    if datatype in _NOT_NUMBERS:
        raise ConfigError(f"{where}: the image's input is {datatype.value}, and pixels are numbers")
    values = np.arange(256, dtype=np.float64)[:, None] * scale_of(settings, datatype)
    values = (values - np.array(settings.mean)) / np.array(settings.std)
    table = _cast(np.broadcast_to(values, (256, form.channels)), datatype)
    if form.planar or form.channels == 1:
        return [np.ascontiguousarray(table[:, c]).reshape(1, 256) for c in range(form.channels)]
    return [np.ascontiguousarray(table).reshape(1, 256, form.channels)]


def scale_of(settings: ImageSettings, datatype: Datatype) -> float:
    """Bytes stay bytes. Floats run from 0 to 1, unless a mean or a deviation is above 1: such numbers belong
    to pixels from 0 to 255, and smaller ones to pixels from 0 to 1, as torchvision, timm and others have
    them."""
    if settings.scale is not None:
        return settings.scale
    of_fractions = max(map(abs, settings.mean)) <= 1.0 and max(settings.std) <= 1.0
    return 1 / 255 if of_fractions and datatype in _FLOATS else 1.0


def _cast(values: Array, datatype: Datatype) -> Array:
    """Rounds to the nearest value that the datatype has; whole numbers stop at its ends."""
    if datatype is Datatype.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if datatype not in _FLOATS:
        ends = np.iinfo(datatype.dtype)
        values = np.clip(np.rint(values), float(ends.min), float(ends.max))
    with np.errstate(over="ignore"):
        return values.astype(datatype.dtype)
