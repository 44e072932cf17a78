"""Reads boxes with an angle: the heads of YOLO for pictures from above."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import ObbSettings, Task
from carpool.types import Array
from carpool.vision.boxes import FINAL, Found, from_centres, least_score, of_head, sound, suppress_rotated
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    IOU,
    MOST_BOXES,
    OVERLAY,
    SCORE,
    Option,
    Options,
    RotatedBox,
    RotatedBoxes,
)
from carpool.vision.tasks.detect import listed
from carpool.vision.tasks.task import BOX_DIGITS, SCORE_DIGITS, VisionTask, read_floats, rounded, size
from carpool.vision.vision_settings import VisionSettings


class ObbTask(VisionTask):
    name = Task.OBB
    route, summary = Task.OBB.route, "Find objects at any angle"
    form, title = RotatedBoxes, "Objects and the turned boxes around them"
    example: ClassVar[Mapping[str, Any]] = {
        "detections": [
            {
                "label": "ship",
                "class_id": 1,
                "score": 0.88,
                "box": [93.4, 93.4, 206.6, 206.6],
                "corners": [[171.2, 206.6], [206.6, 171.2], [128.8, 93.4], [93.4, 128.8]],
                "angle": 0.785398,
            }
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "iou": IOU,
        "max_detections": MOST_BOXES,
        "overlay": OVERLAY,
    }
    table = ObbSettings
    needs = "an output [4 + classes + 1, anchors] of floats, or [boxes, 7]"

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, ObbSettings)
        self._settings = settings
        self._table = settings.table

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(RotatedBoxes(image=size(geometry), detections=self._boxes(outputs, geometry, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        found = self._boxes(outputs, geometry, options)
        return draw.rotated(pixels, found, (geometry.width, geometry.height))

    def _boxes(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> list[RotatedBox]:
        """Within the choice a box lies flat, as its centre, width and height say; then it is turned."""
        table = self._table
        assert table.format is not None
        rows = read_floats(outputs, self._settings.outputs[0])
        with np.errstate(all="ignore"):  # of what is not a number nothing comes
            found = of_head(table.format, rows, least_score(table, options), 1)
            if table.format == "end2end":  # these rows hold centres, too
                found = found._replace(boxes=from_centres(found.boxes))
            turned = corners_of(found)
            around = np.concatenate((turned.min(axis=1), turned.max(axis=1)), axis=1)
            found, placed = sound(found, geometry, around)
        most = options.max_detections or table.max_detections
        overlap = (1.0 if table.format in FINAL else table.iou) if options.iou is None else options.iou
        stay = suppress_rotated(found, overlap, most, per_class=table.per_class)
        points = geometry.points_to_picture(corners_of(found.only(stay)))
        corners = rounded(points, BOX_DIGITS)
        return [
            RotatedBox(
                label=label,
                class_id=class_id,
                score=score,
                box=box,
                corners=corners[number],
                angle=_angle(points[number]),
            )
            for number, (label, class_id, score, box) in enumerate(
                listed(self._settings, found.only(stay), placed[stay])
            )
        ]


def corners_of(found: Found) -> Array:
    """Returns [n, 4, 2]: the corners of a flat box and its angle in `rest`."""
    centre = (found.boxes[:, :2] + found.boxes[:, 2:]) / 2
    half = (found.boxes[:, 2:] - found.boxes[:, :2]) / 2
    angle = found.rest[:, 0]
    cos, sin = np.cos(angle), np.sin(angle)
    across = np.stack((half[:, 0] * cos, half[:, 0] * sin), axis=1)
    down = np.stack((-half[:, 1] * sin, half[:, 1] * cos), axis=1)
    signs = ((1, 1), (1, -1), (-1, -1), (-1, 1))
    return np.stack([centre + one * across + other * down for one, other in signs], axis=1)


def _angle(corners: Array) -> float:
    """Returns the angle of the side from the third corner to the second, along the width."""
    x, y = (corners[1] - corners[2]).tolist()
    return round(math.atan2(y, x), SCORE_DIGITS)
