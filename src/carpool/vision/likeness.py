"""Measures how alike two shapes are, from 0 to 1, and which things of two lists belong together."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from carpool.types import Array

_KEYPOINT = 0.1  # of the box's size: so far from each other two points are 0.6 alike


@dataclass(frozen=True, slots=True)
class Difference:
    """Describes the difference between two answers to one picture."""

    differs: bool
    how_much: float  # 0 to 1: by this the worst come first
    why: str  # in a sentence
    details: Mapping[str, Any] = field(default_factory=dict)  # for JSON


def keypoints_alike(a: Array, b: Array, area: float) -> float:
    """As COCO judges poses, with one tolerance for all points; a point that only one can see is not alike."""
    if a.shape != b.shape:
        return 0.0
    if np.array_equal(a, b, equal_nan=True):
        return 1.0
    sees = [points[:, 2] >= 0.5 if points.shape[1] > 2 else np.isfinite(points[:, 0]) for points in (a, b)]
    either = sees[0] | sees[1]
    if not either.any():
        return 1.0
    with np.errstate(all="ignore"):
        squares = np.square(a[:, :2] - b[:, :2]).sum(axis=1)
        alike = np.nan_to_num(np.exp(-squares / (2 * _KEYPOINT**2 * area)))
    return float(np.where(sees[0] & sees[1], alike, 0.0)[either].mean())


def polygons_alike(a: Array, b: Array) -> float:
    """Returns the area that both cover over the area that either covers."""
    if np.array_equal(a, b, equal_nan=True):
        return 1.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0
    import cv2  # which the engine never needs

    origin = (a.mean(axis=0) + b.mean(axis=0)) / 2  # OpenCV reckons with single precision
    one, other = (np.ascontiguousarray(corners - origin, np.float32) for corners in (a, b))
    areas = cv2.contourArea(one), cv2.contourArea(other)
    shared = max(cv2.intersectConvexConvex(one, other)[0], cv2.intersectConvexConvex(other, one)[0])
    either = areas[0] + areas[1] - shared
    return min(1.0, shared / either) if either > 0.0 else 0.0


@dataclass(slots=True)
class CutOut:
    """The part of a mask in which it is: whole ones of many objects would take more than the picture."""

    size: tuple[int, ...]
    top: int
    left: int
    pixels: Array

    def alike(self, other: CutOut) -> float:
        if self.size != other.size:
            return 0.0
        top, left = max(self.top, other.top), max(self.left, other.left)
        mine, theirs = (cut.pixels[top - cut.top :, left - cut.left :] for cut in (self, other))
        height, width = (min(sides) for sides in zip(mine.shape, theirs.shape, strict=True))
        shared = int((mine[:height, :width] & theirs[:height, :width]).sum())
        either = int(self.pixels.sum()) + int(other.pixels.sum()) - shared
        return shared / either if either else 1.0


def cut_out(mask: Mapping[str, Any]) -> CutOut:
    pixels = _pixels(mask)
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    if not len(rows):
        return CutOut(pixels.shape, 0, 0, np.zeros((0, 0), bool))
    top, left = int(rows[0]), int(columns[0])
    return CutOut(pixels.shape, top, left, pixels[top : rows[-1] + 1, left : columns[-1] + 1].copy())


def _pixels(mask: Mapping[str, Any]) -> Array:
    """Returns [height, width] of the picture: whether it is inside."""
    from carpool.vision.mask_regions import from_run_lengths  # brings OpenCV along

    if "rle" in mask:
        pixels: Array = from_run_lengths(mask["rle"]["counts"], *mask["rle"]["size"]) > 0
        return pixels
    return from_png(mask["png"]) > 0


def from_png(text: str) -> Array:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ValueError("an answer holds a PNG that cannot be read")
    return pixels


def matched(close: Array) -> dict[int, int]:
    """Returns, by row, a column of its own that is close to it, for as many rows as can have one.

    The closest come first; a row whose columns are all taken asks the rows that have them to move on. What
    was asked in vain is not repeated, so the time is bounded also where all are close to all.
    """
    first = close.argmax(axis=1).tolist() if close.size and close.max(axis=1).all() else []
    if first and len(set(first)) == len(first):
        return dict(enumerate(first))  # no two rows have the same closest column
    columns = _closest_first(close)
    row_of: dict[int, int] = {}
    column_of: dict[int, int] = {}
    in_vain: set[int] = set()
    for row in range(len(close)):
        asked_by: dict[int, int] = {}
        free = _free_column(row, columns, row_of, asked_by, in_vain)
        if free is None:
            in_vain |= asked_by.keys()
        while free is not None:
            here = asked_by[free]
            left = column_of.get(here)
            row_of[free], column_of[here] = here, free
            free = left
    return column_of


def _free_column(
    row: int,
    columns: list[list[int]],
    row_of: dict[int, int],
    asked_by: dict[int, int],
    in_vain: set[int],
) -> int | None:
    """Returns the first column that is free, or would be if others moved on."""
    waiting = [row]
    for here in waiting:  # grows while it is walked
        for column in columns[here]:
            if column in asked_by or column in in_vain:
                continue
            asked_by[column] = here
            if column not in row_of:
                return column
            waiting.append(row_of[column])
    return None


def _closest_first(close: Array) -> list[list[int]]:
    """Returns, by row, the columns that are close at all."""
    places = np.nonzero(close)
    columns: list[list[int]] = [[] for _ in close]
    order = np.lexsort((-close[places], places[0]))
    for row, column in zip(places[0][order].tolist(), places[1][order].tolist(), strict=True):
        columns[row].append(column)
    return columns
