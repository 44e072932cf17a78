"""Makes a picture of one map of distances, in the size of the one that was sent."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import DepthSettings, Task
from carpool.errors import ModelError
from carpool.types import Array, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import OVERLAY, Depths, Option, Options, Range
from carpool.vision.tasks.task import VisionTask, read_floats, size
from carpool.vision.vision_settings import VisionSettings

_MOST = 65_535


class Depth(VisionTask):
    name = Task.DEPTH
    route, summary = Task.DEPTH.route, "Estimate the depth of each pixel"
    form, title = Depths, "Depth of each pixel"
    example: ClassVar[Mapping[str, Any]] = {
        "depth": {"low": 0.4, "high": 12.5, "png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAAAAABi"}
    }
    options: ClassVar[Mapping[str, Option]] = {"overlay": OVERLAY}
    table = DepthSettings
    needs = "an output [height, width] or [1, height, width] of floats"

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, DepthSettings)
        self._output = settings.outputs[0]
        self._inverse = bool(settings.table.inverse)
        self._aligned = bool(settings.table.align_corners)

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        values, low, high = self._values(outputs, geometry)
        return dict(Depths(image=size(geometry), depth=written_range(values, low, high)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw

        values, low, high = self._values(outputs, geometry)
        near = (values - low) / (high - low or 1.0)
        return draw.distances(pixels, near if self._inverse else 1.0 - near)

    def _values(self, outputs: Mapping[str, Array], geometry: Geometry) -> tuple[Array, float, float]:
        return read_map(outputs, self._output, geometry, corners=self._aligned)


def read_map(
    outputs: Mapping[str, Array], output: TensorSpec, geometry: Geometry, *, corners: bool = False
) -> tuple[Array, float, float]:
    """Returns a map laid over the whole picture, and its ends; what is no number counts as the lowest."""
    from carpool.vision.mask_regions import whole_picture

    found = read_floats(outputs, output).astype(np.float32, copy=False)
    found = found.reshape([side for side in found.shape if side != 1] or [1, 1])
    good = np.isfinite(found)
    if found.ndim != 2 or not good.any():
        raise ModelError(f'the output "{output.name}" has no distances in its shape {list(found.shape)}')
    low, high = float(found[good].min()), float(found[good].max())
    values = whole_picture(np.where(good, found, np.float32(low)), geometry, low, corners=corners)
    return values, low, high


def written_range(values: Array, low: float, high: float) -> Range:
    import cv2  # which the engine never needs

    steps = np.rint((values - low) * (_MOST / (high - low or 1.0))).astype(np.uint16)
    _, file = cv2.imencode(".png", steps)
    return Range(low=low, high=high, png=base64.b64encode(file.tobytes()).decode("ascii"))
