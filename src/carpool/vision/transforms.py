"""Writes upright pixels straight into the memory of the model's input.

The picture is resized once, as bytes; then one look-up per channel, which holds scale, mean, deviation and
the rounding to the input's datatype, writes the result into its place.
"""

from __future__ import annotations

import threading
from math import prod

import cv2
import numpy as np
from PIL import Image

from carpool.config.model import PILLOW, ImageSettings
from carpool.types import Array, TensorSpec
from carpool.vision.decode import Decoded
from carpool.vision.geometry import Geometry, PicturePlacement, lookup_tables, place, read_form

_KERNELS = {"area": cv2.INTER_AREA, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_NONE = -1  # of OpenCV's: Pillow resizes
_PILLOW = {kernel: Image.Resampling[kernel.removeprefix("pil-").upper()] for kernel in PILLOW}
_BY_SIZE = {1: np.uint8, 2: np.uint16, 4: np.int32, 8: np.float64}  # what cv2 moves without a look inside

_MOST_SIZES = 1024  # of pictures, whose places are kept


class Transform:
    """Transforms pictures; made once per model, called from any thread. `where` names the model in errors
    about its settings."""

    def __init__(self, settings: ImageSettings | None, spec: TensorSpec, where: str) -> None:
        self._settings = settings or ImageSettings()
        self._form = read_form(self._settings, spec, where)
        tables = lookup_tables(self._settings, self._form, spec.datatype, where)
        self._tables = [table.view(_BY_SIZE[table.itemsize]) for table in tables]
        self.shape = self._form.shape  # of the input, without the batch; no side is left open
        self.size = self._form.size  # of the input: its height and width
        self.dtype = spec.datatype.dtype
        self._scratch = threading.local()
        self._placed: dict[tuple[int, int], tuple[PicturePlacement, Geometry, int]] = {}

    def reduction(self, width: int, height: int) -> int:
        """Returns how many times smaller such a picture may be decoded and still give the same input."""
        return (self._placed.get((width, height)) or self._place(width, height))[0].grid

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns where such a picture lies in the input."""
        return self._place(width, height)[1]

    def _place(self, width: int, height: int) -> tuple[PicturePlacement, Geometry, int]:
        """Returns where a picture lies, with how its pixels are mixed. Kept, since cameras repeat their
        sizes. Two threads may work out the same, and one of them is kept: each writes a whole entry, and what
        is cleared meanwhile is worked out again."""
        found = self._placed.get((width, height))
        if found is None:
            placement = place(width, height, self._form.size, self._settings)
            asked = self._settings.kernel
            kernel = _NONE if asked in PILLOW else _KERNELS[placement.kernel(asked)]
            found = placement, placement.geometry(width, height, self._form.size), kernel
            if len(self._placed) >= _MOST_SIZES:
                self._placed.clear()
            self._placed[width, height] = found
        return found

    def prepare(self, decoded: Decoded, out: Array) -> Geometry:
        """Fills `out`, which has the shape and dtype above, and returns where the picture lies in it."""
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError(f"the input is {self.dtype} {self.shape}, not {out.dtype} {out.shape}")
        size = decoded.width, decoded.height
        placement, geometry, kernel = self._placed.get(size) or self._place(*size)
        # The parts of the input that one table each fills: planes [h, w], or everything as [h, w, 3].
        form = self._form
        picture = out.view(_BY_SIZE[out.itemsize]).reshape(form.shape[-3:])
        planes = list(picture) if form.planar else [picture if form.channels == 3 else picture[:, :, 0]]
        if (placement.into_height, placement.into_width) != planes[0].shape[:2]:
            self._pad(planes, placement)
        self._fill(planes, placement, self._resized(decoded, placement, kernel))
        return geometry

    def _resized(self, decoded: Decoded, at: PicturePlacement, kernel: int) -> Array:
        """Returns the part of the picture that is shown, in its size in the input, in a buffer of this
        thread."""
        factor = decoded.width // decoded.pixels.shape[1]
        top, left = at.top // factor, at.left // factor
        part = decoded.pixels[top : top + at.height // factor, left : left + at.width // factor]
        small = self._buffer("small", (at.into_height, at.into_width, 3))
        if self._settings.kernel in PILLOW:
            return _as_pillow(decoded.pixels, factor, at, self._settings.kernel)
        cv2.resize(part, (at.into_width, at.into_height), dst=small, interpolation=kernel)
        return small

    def _fill(self, planes: list[Array], at: PicturePlacement, small: Array) -> None:
        rows = slice(at.into_top, at.into_top + at.into_height)
        columns = slice(at.into_left, at.into_left + at.into_width)
        bgr = self._settings.channels == "bgr"
        if self._form.channels == 1:
            grey = self._buffer("grey", small.shape[:2])
            channels = [cv2.cvtColor(small, cv2.COLOR_RGB2GRAY, dst=grey)]
        elif not self._form.planar:  # all of them side by side
            channels = [cv2.cvtColor(small, cv2.COLOR_RGB2BGR, dst=small) if bgr else small]
        else:
            split = self._buffer("split", (3, *small.shape[:2]))
            channels = [split[0], split[1], split[2]]
            cv2.split(small, channels)
            channels = channels[::-1] if bgr else channels
        for plane, table, channel in zip(planes, self._tables, channels, strict=True):
            cv2.LUT(channel, table, dst=plane[rows, columns])

    def _pad(self, planes: list[Array], at: PicturePlacement) -> None:
        """Fills what the picture leaves free."""
        bottom, right = at.into_top + at.into_height, at.into_left + at.into_width
        for plane, table in zip(planes, self._tables, strict=True):
            value = table[0, self._settings.pad]
            plane[: at.into_top] = value
            plane[bottom:] = value
            plane[at.into_top : bottom, : at.into_left] = value
            plane[at.into_top : bottom, right:] = value

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Array:
        """Scratch of this thread, never larger than the input has pixels: mostly in the shape it had last."""
        last: Array | None = getattr(self._scratch, name, None)
        if last is not None and last.shape == shape:
            return last
        held = np.empty(self._form.size[0] * self._form.size[1] * 3, np.uint8) if last is None else last.base
        assert held is not None
        shaped: Array = held[: prod(shape)].reshape(shape)
        setattr(self._scratch, name, shaped)
        return shaped


def _as_pillow(pixels: Array, factor: int, at: PicturePlacement, kernel: str) -> Array:
    """A new array: Pillow has its own memory."""
    x1, y1, x2, y2 = at.box or (at.left, at.top, at.left + at.width, at.top + at.height)
    box = x1 / factor, y1 / factor, x2 / factor, y2 / factor
    resized = Image.fromarray(pixels).resize((at.into_width, at.into_height), _PILLOW[kernel], box=box)
    return np.array(resized)
