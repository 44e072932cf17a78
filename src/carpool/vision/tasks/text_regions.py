"""Turns maps of where there is text into a quadrilateral around each piece of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import Task, TextRegionsSettings
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    MOST_REGIONS,
    OVERLAY,
    SCORE,
    Option,
    Options,
    TextRegion,
    TextRegions,
)
from carpool.vision.tasks.task import BOX_DIGITS, SCORE_DIGITS, VisionTask, read_floats, rounded, size
from carpool.vision.vision_settings import VisionSettings

_LEAST_SHARE = 1e-3  # pixels of the picture that a region must have left inside it


class FindText(VisionTask):
    name = Task.TEXT_REGIONS
    route, summary = Task.TEXT_REGIONS.route, "Find text in an image"
    form, title = TextRegions, "Where there is text"
    example: ClassVar[Mapping[str, Any]] = {
        "regions": [
            {
                "polygon": [[31.5, 20.2], [318.0, 22.9], [317.7, 51.4], [31.2, 48.7]],
                "box": [31.2, 20.2, 318.0, 51.4],
                "score": 0.913204,
            }
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "max_detections": MOST_REGIONS,
        "overlay": OVERLAY,
    }
    table = TextRegionsSettings
    needs = (
        "an output [height, width] or [1, height, width] of probabilities, or [3, height, width] for lines"
    )

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, TextRegionsSettings)
        self._table = settings.table
        self._output = settings.outputs[0]

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(TextRegions(image=size(geometry), regions=self._regions(outputs, geometry, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        found = self._regions(outputs, geometry, options)
        return draw.text(pixels, found, (geometry.width, geometry.height))

    def _regions(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> list[TextRegion]:
        from carpool.vision.text_boxes import find_quads  # with OpenCV, too

        table = self._table
        if options.score is not None:
            table = replace(table, score=options.score)
        maps = self._maps(outputs)
        stretch = np.array(
            [geometry.input_width / maps.shape[-1], geometry.input_height / maps.shape[-2]], np.float32
        )
        if maps.ndim == 3:
            maps = np.concatenate((maps[:1], maps[1:] / stretch[1]))
        found = find_quads(maps, table, options.max_detections or table.max_regions)
        points = geometry.points_to_picture(found.corners * stretch)
        limits = np.array([geometry.width, geometry.height], np.float32)
        inside = np.clip(points, 0.0, limits)
        boxes = np.concatenate((inside.min(axis=1), inside.max(axis=1)), axis=1)
        there = (boxes[:, 2:] - boxes[:, :2] > _LEAST_SHARE).all(axis=1)
        listed = zip(
            rounded(points[there], BOX_DIGITS),
            rounded(boxes[there], BOX_DIGITS),
            rounded(found.scores[there], SCORE_DIGITS),
            strict=True,
        )
        return [TextRegion(polygon=polygon, box=box, score=score) for polygon, box, score in listed]

    def _maps(self, outputs: Mapping[str, Array]) -> Array:
        """Returns [height, width], or [3, height, width] in the format of lines."""
        maps = read_floats(outputs, self._output)
        if self._table.format == "lines":
            fits = maps.ndim == 3 and maps.shape[0] == 3
        else:
            maps = maps[0] if maps.ndim == 3 and maps.shape[0] == 1 else maps
            fits = maps.ndim == 2
        if not fits or not maps.size:
            raise ModelError(f'the output "{self._output.name}" has no map in its shape {list(maps.shape)}')
        return maps
