"""Reads heads that place points: faces in the cells of several levels, and keypoints of what fills the whole
image, by lines (SimCC) or by heatmaps.

The formats are facts about insightface's SCRFD, mmpose's RTMPose and transformers' ViTPose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.boxes import Found, rows_above
from carpool.vision.geometry import Geometry

WHOLE = ("simcc", "heatmaps")
"""Formats of models that find the keypoints of one thing, which fills the image."""

_STRIDES = (8, 16, 32)
_PER_CELL = 2  # boxes
_BLUR, _SIGMA = 11, 0.8  # of heatmaps, before their peaks are refined
_LEAST, _MOST = 0.001, 50.0  # of a heatmap whose logarithm is taken


def scrfd(outputs: Sequence[Array], least: float, geometry: Geometry) -> Found:
    """Reads scores [rows, 1] of each level, then boxes [rows, 4], then points [rows, 10] if there are any:
    distances from a cell's corner to the sides, and offsets from it, both in cells."""
    each = enumerate(_STRIDES)
    levels = [_level(outputs[place :: len(_STRIDES)], side, least, geometry) for place, side in each]
    return Found(*(np.concatenate(parts) for parts in zip(*levels, strict=True)))


def _level(outputs: Sequence[Array], stride: int, least: float, geometry: Geometry) -> Found:
    scores, distances = outputs[0], outputs[1]
    columns, cells = geometry.input_width // stride, geometry.input_height // stride
    wanted = _PER_CELL * cells * columns
    if any(len(one) != wanted for one in outputs):
        found = [len(one) for one in outputs]
        raise ModelError(f"the model returned {found} rows instead of {wanted} for cells of {stride}")
    rows = rows_above(scores, least)
    cell = rows // _PER_CELL
    corner = np.stack((cell % columns, cell // columns), axis=1).astype(np.float32) * np.float32(stride)
    near = distances[rows] * np.float32(stride)
    boxes = np.concatenate((corner - near[:, :2], corner + near[:, 2:]), axis=1)
    points = np.empty((len(rows), 0), np.float32)
    if len(outputs) > 2:
        offsets = outputs[2][rows].reshape(len(rows), outputs[2].shape[1] // 2, 2) * np.float32(stride)
        points = (offsets + corner[:, None]).reshape(len(rows), outputs[2].shape[1])
    return Found(boxes, scores[rows, 0], np.zeros(len(rows), np.intp), points)


def whole_image(form: str, outputs: Sequence[Array], geometry: Geometry) -> Found:
    """Returns one thing that fills the image, as sure as its keypoints are on average."""
    points = simcc(outputs[0], outputs[1], geometry) if form == "simcc" else heatmaps(outputs[0], geometry)
    around = np.array([geometry.area], np.float32)
    score = np.array([points[:, 2].mean() if len(points) else 0.0], np.float32)
    return Found(around, score, np.zeros(1, np.intp), points.reshape(1, -1))


def simcc(across: Array, down: Array, geometry: Geometry) -> Array:
    """Reads [keypoints, bins] along the width and the height: the largest bin is the place, and the lower one
    of both maxima says how sure that is."""
    bins = np.array([across.shape[1] / geometry.input_width, down.shape[1] / geometry.input_height])
    places = np.stack((across.argmax(axis=1), down.argmax(axis=1)), axis=1) / bins
    sure = np.minimum(across.max(axis=1), down.max(axis=1))
    return np.concatenate((places, sure[:, None]), axis=1).astype(np.float32)


def heatmaps(maps: Array, geometry: Geometry) -> Array:
    """Reads [keypoints, rows, columns]: the peak of each, moved to where a parabola through its neighbours'
    logarithms has its own. The middles of the outermost pixels of a map lie on those of the input's."""
    count, rows, columns = maps.shape
    peaks = maps.reshape(count, -1).argmax(axis=1)
    sure = maps.reshape(count, -1)[np.arange(count), peaks]
    places = np.stack((peaks % columns, peaks // columns), axis=1).astype(np.float64)
    places += _towards_the_top(maps, peaks % columns, peaks // columns)
    steps = (geometry.input_width - 1) / max(columns - 1, 1), (geometry.input_height - 1) / max(rows - 1, 1)
    return np.concatenate((places * steps + 0.5, np.clip(sure, 0, 1)[:, None]), axis=1).astype(np.float32)


def _towards_the_top(maps: Array, x: Array, y: Array) -> Array:
    """Returns by how much of a pixel the peaks lie elsewhere (Zhang and others, "Distribution-Aware
    Coordinate Representation for Human Pose Estimation", 2020)."""
    import cv2  # which the engine never needs

    blurred = [
        cv2.GaussianBlur(one.astype(np.float64), (_BLUR, _BLUR), _SIGMA, borderType=cv2.BORDER_REFLECT)
        for one in maps
    ]
    logs = np.pad(np.log(np.clip(np.stack(blurred), _LEAST, _MOST)), ((0, 0), (1, 1), (1, 1)), mode="edge")
    number = np.arange(len(maps))

    def at(right: int, below: int) -> Array:
        found: Array = logs[number, y + 1 + below, x + 1 + right]
        return found

    dx, dy = (at(1, 0) - at(-1, 0)) / 2, (at(0, 1) - at(0, -1)) / 2
    dxx, dyy = at(1, 0) - 2 * at(0, 0) + at(-1, 0), at(0, 1) - 2 * at(0, 0) + at(0, -1)
    dxy = (at(1, 1) - at(1, 0) - at(0, 1) + 2 * at(0, 0) - at(-1, 0) - at(0, -1) + at(-1, -1)) / 2
    tiny = np.finfo(np.float32).eps
    dxx, dyy = dxx + tiny, dyy + tiny
    whole = dxx * dyy - dxy * dxy
    whole = np.where(whole == 0, np.inf, whole)  # flat: it stays where it is
    return -np.stack(((dyy * dx - dxy * dy) / whole, (dxx * dy - dxy * dx) / whole), axis=1)
