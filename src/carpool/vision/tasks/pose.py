"""Reads boxes with keypoints: the pose heads of YOLO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import PoseSettings, Task
from carpool.types import Array
from carpool.vision.boxes import Found, choose, least_score, of_head, sound
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import IOU, MOST_BOXES, OVERLAY, SCORE, Option, Options, Pose, Poses
from carpool.vision.point_heads import WHOLE, scrfd, whole_image
from carpool.vision.tasks.detect import listed
from carpool.vision.tasks.task import BOX_DIGITS, SCORE_DIGITS, VisionTask, read_floats, rounded, size
from carpool.vision.vision_settings import VisionSettings


class PoseTask(VisionTask):
    name = Task.POSE
    route, summary = Task.POSE.route, "Find keypoints"
    form, title = Poses, "Objects, where they are and where their keypoints are"
    example: ClassVar[Mapping[str, Any]] = {
        "detections": [
            {
                "label": "person",
                "class_id": 0,
                "score": 0.91,
                "box": [102.0, 40.5, 233.0, 410.0],
                "keypoints": [[160.2, 71.0, 0.98], [168.4, 63.9, 0.97]],
            }
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "iou": IOU,
        "max_detections": MOST_BOXES,
        "overlay": OVERLAY,
    }
    table = PoseSettings
    needs = (
        "an output [4 + classes + 2 or 3 × keypoints, anchors] of floats, or with rows of chosen boxes; "
        "SCRFD's scores, boxes and points of three levels, simcc_x and simcc_y, or heatmaps"
    )

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, PoseSettings)
        self._settings = settings
        self._table = settings.table

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(Poses(image=size(geometry), detections=self._poses(outputs, geometry, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        return draw.poses(pixels, self._poses(outputs, geometry, options), (geometry.width, geometry.height))

    def _found(self, arrays: list[Array], least: float, geometry: Geometry) -> Found:
        table = self._table
        if table.format in WHOLE:
            return whole_image(table.format, arrays, geometry)
        if table.format == "scrfd":
            return scrfd(arrays, least, geometry)
        assert table.format is not None
        assert table.keypoints is not None
        return of_head(table.format, arrays[0], least, table.keypoints[0] * table.keypoints[1])

    def _poses(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> list[Pose]:
        table = self._table
        assert table.keypoints is not None
        count, each = table.keypoints
        arrays = [read_floats(outputs, spec) for spec in self._settings.outputs]
        with np.errstate(all="ignore"):  # of what is not a number nothing comes
            found, placed = sound(self._found(arrays, least_score(table, options), geometry), geometry)
        stay = choose(found, table, options, table.format)
        found, placed = found.only(stay), placed[stay]
        points = found.rest.reshape(-1, count, each)
        places = rounded(geometry.points_to_picture(points[:, :, :2]), BOX_DIGITS)
        sure = rounded(points[:, :, 2:], SCORE_DIGITS)
        said = listed(self._settings, found, placed)
        return [
            Pose(
                label=label,
                class_id=class_id,
                score=score,
                box=box,
                keypoints=[[*place, *more] for place, more in zip(places[number], sure[number], strict=True)],
            )
            for number, (label, class_id, score, box) in enumerate(said)
        ]
