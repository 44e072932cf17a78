"""What a model would have answered: from objects in a picture to a detector's raw outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from carpool.types import Array
from carpool.vision.geometry import Geometry

FORMATS = ("yolov5", "yolov8", "boxes_scores")
ANCHORS = 300


@dataclass(frozen=True)
class Thing:
    """One object in the picture's own pixels."""

    box: tuple[float, float, float, float]
    class_id: int
    score: float


def letterbox(width: int, height: int, input_width: int, input_height: int) -> Geometry:
    scale = min(input_width / width, input_height / height)
    left, top = (input_width - width * scale) / 2, (input_height - height * scale) / 2
    return Geometry(width, height, input_width, input_height, scale, scale, left, top)


def stretch(width: int, height: int, input_width: int, input_height: int) -> Geometry:
    return Geometry(width, height, input_width, input_height, input_width / width, input_height / height)


def crop(width: int, height: int, input_width: int, input_height: int) -> Geometry:
    scale = max(input_width / width, input_height / height)
    left, top = (input_width - width * scale) / 2, (input_height - height * scale) / 2
    return Geometry(width, height, input_width, input_height, scale, scale, left, top)


GEOMETRIES = {"letterbox": letterbox, "stretch": stretch, "crop": crop}


def in_input(things: Sequence[Thing], geometry: Geometry) -> Array:
    boxes = np.array([thing.box for thing in things], np.float64).reshape(-1, 4)
    scale = np.array([geometry.scale_x, geometry.scale_y] * 2)
    return boxes * scale + np.array([geometry.left, geometry.top] * 2)


def encode(
    form: str, things: Sequence[Thing], geometry: Geometry, classes: int, *, normalized: bool = False
) -> dict[str, Array]:
    """The outputs of a detector that saw exactly these things, among anchors that saw nothing."""
    corners = in_input(things, geometry)
    if normalized:
        corners = corners / np.array([geometry.input_width, geometry.input_height] * 2)
    random = np.random.default_rng(len(things))
    places = random.permutation(ANCHORS)[: len(things)]
    boxes = random.uniform(0, 50, (ANCHORS, 4)).astype(np.float32)
    scores = random.uniform(0, 0.1, (ANCHORS, classes)).astype(np.float32)
    for place, corner, thing in zip(places, corners, things, strict=True):
        boxes[place] = corner if form == "boxes_scores" else _centred(corner)
        scores[place, thing.class_id] = thing.score
    if form == "boxes_scores":
        return {"boxes": boxes, "scores": scores}
    if form == "yolov8":
        return {"out": np.ascontiguousarray(np.concatenate((boxes, scores), axis=1).T)}
    objectness = np.full((ANCHORS, 1), 0.05, np.float32)
    objectness[places] = 0.8
    return {"out": np.concatenate((boxes, objectness, scores / np.float32(0.8)), axis=1)}


def _centred(corner: Array) -> Array:
    x1, y1, x2, y2 = corner
    return np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], np.float32)
