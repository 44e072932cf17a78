"""Turns raw detector outputs into boxes in the picture's pixels: threshold first, then suppress, then map
back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import KEPT, DetectSettings, Task
from carpool.errors import InvalidInput, ModelError
from carpool.types import Array
from carpool.vision.boxes import (
    Found,
    best_pairs,
    boxes_scores,
    choose,
    from_centres,
    least_score,
    of_head,
    sound,
    yolox,
)
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    IOU,
    MOST_BOXES,
    OVERLAY,
    SCORE,
    Detection,
    Detections,
    Option,
    Options,
)
from carpool.vision.point_heads import scrfd
from carpool.vision.tasks.task import (
    BOX_DIGITS,
    SCORE_DIGITS,
    VisionTask,
    activate,
    read_floats,
    rounded,
    size,
)
from carpool.vision.vision_settings import VisionSettings


class Detect(VisionTask):
    name = Task.DETECT
    route, summary = Task.DETECT.route, "Find objects"
    form, title = Detections, "Objects and where they are"
    example: ClassVar[Mapping[str, Any]] = {
        "detections": [
            {"label": "dog", "class_id": 16, "score": 0.66112, "box": [131.2, 120.5, 310.4, 402.0]}
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "iou": IOU,
        "max_detections": MOST_BOXES,
        "overlay": OVERLAY,
    }
    table = DetectSettings
    needs = (
        "for its format outputs of floats: [4 + classes, anchors], [anchors, 5 + classes], [boxes, 6], "
        "[anchors, 4] and [anchors, classes], or boxes, labels and scores"
    )
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, DetectSettings)
        self._settings = settings
        self._table = settings.table

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(Detections(image=size(geometry), detections=self._detections(outputs, geometry, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        found = self._detections(outputs, geometry, options)
        return draw.detections(pixels, found, (geometry.width, geometry.height))

    def _detections(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> list[Detection]:
        table = self._table
        if table.format == KEPT:
            _check_within(options, table)
        arrays = [read_floats(outputs, spec) for spec in self._settings.outputs]
        with np.errstate(all="ignore"):  # of what is not a number nothing comes, below
            found = self._candidates(arrays, least_score(table, options), geometry)
            if table.normalized:
                sides = np.array([geometry.input_width, geometry.input_height] * 2, found.boxes.dtype)
                found = found._replace(boxes=found.boxes * sides)
            found, placed = sound(found, geometry)
        stay = choose(found, table, options, table.format)
        return [
            Detection(label=label, class_id=class_id, score=score, box=box)
            for label, class_id, score, box in listed(self._settings, found.only(stay), placed[stay])
        ]

    def _candidates(self, arrays: list[Array], least: float, geometry: Geometry) -> Found:
        table = self._table
        if table.format in ("yolov8", "yolov5", "end2end", KEPT):
            return of_head(table.format, arrays[0], least)
        if table.format == "scrfd":
            return scrfd(arrays, least, geometry)
        if table.format == "yolox":
            return yolox(arrays[0], least, geometry.input_height, geometry.input_width)
        if table.format in ("boxes_labels_scores", "dets_labels"):
            boxes, labels = arrays[:2]
            if table.format == "dets_labels":
                _check_width(boxes, 5)
            boxes, scores = (boxes[:, :4], boxes[:, 4]) if len(arrays) == 2 else (boxes, arrays[2])
            _check_rows(boxes, labels, scores)
            good = (scores >= least) & (labels >= 0) & np.isfinite(labels)
            found = Found(boxes[good], scores[good], labels[good].astype(np.intp), boxes[good, 4:])
        elif table.format == "rtdetr":
            found = boxes_scores(arrays[0][:, :4], arrays[0][:, 4:], least)
        else:
            boxes, scores = arrays
            _check_rows(boxes, scores)
            scores = self._probabilities(scores)
            several = table.format == "detr" and table.activation == "sigmoid"
            found = (best_pairs if several else boxes_scores)(boxes, scores, least)
        return found._replace(boxes=_corners(found.boxes, table.boxes))

    def _probabilities(self, scores: Array) -> Array:
        table = self._table
        if table.activation not in (None, "none"):
            scores = activate(scores.T, table.activation, np.float32).T
        if table.background is not None and table.background < scores.shape[1]:
            scores = scores.copy()
            scores[:, table.background] = -1.0
        return scores


def listed(
    settings: VisionSettings, found: Found, placed: Array
) -> Iterator[tuple[str, int, float, list[float]]]:
    """Yields what stands in the answer for each: label, class, score and box in the picture's pixels."""
    scores = rounded(np.minimum(found.scores, 1.0), SCORE_DIGITS)
    boxes = rounded(placed, BOX_DIGITS)
    for class_id, score, box in zip(found.classes.tolist(), scores, boxes, strict=True):
        yield settings.label(class_id), class_id, score, box


def _corners(boxes: Array, form: str | None) -> Array:
    if form == "centers":
        return from_centres(boxes)
    return boxes[:, [1, 0, 3, 2]] if form == "corners_yx" else boxes


def _check_rows(boxes: Array, *others: Array) -> None:
    for other in others:
        if len(boxes) != len(other):
            raise ModelError(f"the model returned {len(boxes)} boxes and {len(other)} rows of scores")


def _check_width(rows: Array, numbers: int) -> None:
    if rows.shape[1:] != (numbers,):
        raise ModelError(f"the model returned rows of {rows.shape[1:]} numbers instead of {numbers}")


def _check_within(options: Options, table: DetectSettings) -> None:
    """Rejects options that need what the device has dropped: better no answer than one that hides it."""
    if options.score is not None and options.score < table.score:
        raise _beyond("score", f"at least {table.score:g}")
    if options.max_detections is not None and options.max_detections > table.max_detections:
        raise _beyond("max_detections", f"at most {table.max_detections}")
    if options.iou not in (None, table.iou):
        raise _beyond("iou", f"only {table.iou:g}")


def _beyond(name: str, allowed: str) -> InvalidInput:
    return InvalidInput(
        f"{name} can be {allowed} for this model, because its device selects boxes by the model's "
        'settings. Change the settings, or set nms = "cpu"',
        field=name,
    )
