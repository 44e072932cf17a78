"""Answers an image for an image: larger, sharper or cleaner, as a file in the answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import Task
from carpool.errors import ModelError, TooLarge
from carpool.types import Array
from carpool.vision.geometry import Geometry, scale_of
from carpool.vision.picture_answers import OVERLAY, PICTURE_FORMAT, Option, Options, Restored, RestoredPicture
from carpool.vision.tasks.task import VisionTask, read_floats, size
from carpool.vision.vision_settings import VisionSettings

_CHANNELS = (1, 3)
_MOST_PIXELS = 1 << 25


class Restore(VisionTask):
    name = Task.RESTORE
    route, summary = Task.RESTORE.route, "Make a larger, sharper or cleaner image"
    form, title = Restored, "The image that the model made"
    example: ClassVar[Mapping[str, Any]] = {
        "restored": {
            "width": 1280,
            "height": 854,
            "format": "png",
            "data": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe",
        }
    }
    options: ClassVar[Mapping[str, Option]] = {"format": PICTURE_FORMAT, "overlay": OVERLAY}
    needs = "an output [3, height, width] or [height, width, 3] of floats, as large as the input or larger"

    def __init__(self, settings: VisionSettings) -> None:
        self._settings = settings
        self._output = settings.outputs[0]
        self._planar = settings.image.layout != "nhwc"

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        made = self._picture(outputs, geometry)
        data = base64.b64encode(draw.encode(made, options.format)).decode("ascii")
        height, width = made.shape[:2]
        restored = RestoredPicture(width=width, height=height, format=options.format, data=data)
        return dict(Restored(image=size(geometry), restored=restored))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        """The image itself is the answer."""
        return self._picture(outputs, geometry)

    def _picture(self, outputs: Mapping[str, Array], geometry: Geometry) -> Array:
        """Returns RGB [h, w, 3]. Values of the output are in the units of the input's, which are undone; what
        the model saw of the picture is cut out, in the picture's proportions."""
        import cv2

        values = read_floats(outputs, self._output)
        values = np.moveaxis(values, 0, -1) if self._planar and values.ndim == 3 else values
        if values.ndim != 3 or values.shape[2] not in _CHANNELS or not values.size:
            shape = list(values.shape)
            raise ModelError(f'the output "{self._output.name}" is no image in its shape {shape}')
        across, down = values.shape[1] / geometry.input_width, values.shape[0] / geometry.input_height
        x1, y1, x2, y2 = geometry.area
        left, right = (round(min(max(x, 0.0), geometry.input_width) * across) for x in (x1, x2))
        top, bottom = (round(min(max(y, 0.0), geometry.input_height) * down) for y in (y1, y2))
        part = self._bytes(values[top:bottom, left:right])
        scale_x, scale_y = geometry.scale_x * across, geometry.scale_y * down
        scale = min(scale_x, scale_y)
        wide = max(1, round((right - left) * scale / scale_x))
        high = max(1, round((bottom - top) * scale / scale_y))
        if wide * high > _MOST_PIXELS:
            raise TooLarge(f"the image would have {wide}×{high} pixels, more than the {_MOST_PIXELS} allowed")
        if part.shape[:2] != (high, wide):
            part = cv2.resize(part, (wide, high), interpolation=cv2.INTER_LINEAR)
        return np.ascontiguousarray(part)

    def _bytes(self, values: Array) -> Array:
        image = self._settings.image
        scale = scale_of(image, self._settings.input.datatype)
        pixels = (np.nan_to_num(values) * np.array(image.std) + np.array(image.mean)) / scale
        bytes_: Array = np.rint(np.clip(pixels, 0, 255)).astype(np.uint8)
        if bytes_.shape[2] == 1:
            return np.repeat(bytes_, 3, axis=2)
        return bytes_[:, :, ::-1] if image.channels == "bgr" else bytes_
