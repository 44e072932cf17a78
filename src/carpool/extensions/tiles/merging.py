"""Makes one answer of what was found in the tiles: which objects are the same one, as sahi decides it.

Boxes match where their intersection is at least `match` of the smaller area (ios), or of both (iou). In the
order of their scores each box that is left takes those that match it: they are dropped (nms), or joined with
it (nmm). A joined box is compared anew as it grows, and what does not match the larger one is dropped all the
same. Which boxes match is decided in single precision, and comparisons of joined ones in double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from carpool.extensions.tiles.settings import IOS, NMM, TileSettings
from carpool.types import Array

MOST_FOUND = 20_000
"""Objects of all tiles that are compared, the best ones: each may be compared with every other."""

Box = tuple[float, float, float, float]


@dataclass(slots=True)
class Found:
    """Describes an object in pixels of the whole image; `said` is what its answer says besides of it."""

    box: Box
    score: float
    class_id: int
    said: dict[str, Any] = field(default_factory=dict)
    pieces: list[tuple[int, int, Array]] = field(default_factory=list)  # of its mask: left, top, pixels


def merged(found: Sequence[Found], settings: TileSettings) -> list[Found]:
    """Returns the objects that are left, the best first."""
    if len(found) > MOST_FOUND:
        found = sorted(found, key=lambda one: -one.score)[:MOST_FOUND]
    boxes = np.array([one.box for one in found], np.float32).reshape(-1, 4)
    scores = np.array([one.score for one in found], np.float32)
    classes = np.array([one.class_id if settings.per_class else 0 for one in found], np.int64)
    left: list[Found] = []
    for number in np.unique(classes):
        places = np.flatnonzero(classes == number)
        for first, others in _matches(boxes[places], scores[places], settings):
            one = found[places[first]]
            if settings.merge == NMM:
                for other in others:
                    one = _joined(one, found[places[other]], settings)
            left.append(one)
    return sorted(left, key=lambda one: -one.score)


def _matches(boxes: Array, scores: Array, settings: TileSettings) -> list[tuple[int, list[int]]]:
    """Returns each box that is left with those that it takes, the best first."""
    order = np.lexsort((boxes[:, 3], boxes[:, 2], boxes[:, 1], boxes[:, 0], -scores))
    boxes = boxes[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    shares = _ios if settings.metric == IOS else _iou
    rest, least, groups = np.arange(len(order)), np.float32(settings.match), []
    while len(rest):
        first, others = rest[0], rest[1:]
        inter = _shared(boxes[first], boxes[others])
        match = shares(inter, areas[first], areas[others]) >= least
        groups.append((int(order[first]), order[others[match]].tolist()))
        rest = others[~match]
    return groups


def _shared(one: Array, others: Array) -> Array:
    """Returns the area that the box shares with each of the others."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    area: Array = np.maximum(0, sides).prod(axis=1)
    return area


def _iou(inter: Array, area: Array, areas: Array) -> Array:
    return _ratio(inter, area + areas - inter)


def _ios(inter: Array, area: Array, areas: Array) -> Array:
    return _ratio(inter, np.minimum(area, areas))


def _ratio(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _joined(one: Found, other: Found, settings: TileSettings) -> Found:
    """Returns both as one, if the other still matches what the first has become. What is said of it is said
    of the better one, which is the first."""
    inter = _width(one, other, 0) * _width(one, other, 1)
    areas = _area(one.box), _area(other.box)
    whole = min(areas) if settings.metric == IOS else sum(areas) - inter
    if not (whole > 0 and inter / whole >= settings.match):
        return one
    (x1, y1, x2, y2), (u1, v1, u2, v2) = one.box, other.box
    box = min(x1, u1), min(y1, v1), max(x2, u2), max(y2, v2)
    return Found(box, max(one.score, other.score), one.class_id, one.said, [*one.pieces, *other.pieces])


def _width(one: Found, other: Found, side: int) -> float:
    return max(0.0, min(one.box[side + 2], other.box[side + 2]) - max(one.box[side], other.box[side]))


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


# ---- masks


def by_class(found: Sequence[Found]) -> list[Found]:
    """Returns one object for each class, of regions that belong to classes and not to objects: its score is
    the mean of its pixels."""
    classes: dict[int, list[Found]] = {}
    for one in found:
        classes.setdefault(one.class_id, []).append(one)
    left = []
    for number, of_class in classes.items():
        boxes = np.array([one.box for one in of_class])
        pixels = np.array([sum(int(piece[2].sum()) for piece in one.pieces) for one in of_class])
        score = float(np.average([one.score for one in of_class], weights=pixels))
        x1, y1 = boxes[:, :2].min(axis=0).tolist()
        x2, y2 = boxes[:, 2:].max(axis=0).tolist()
        pieces = [piece for one in of_class for piece in one.pieces]
        left.append(Found((x1, y1, x2, y2), score, number, of_class[0].said, pieces))
    return sorted(left, key=lambda one: -one.score)


def mask_of(one: Found, width: int, height: int) -> Array:
    """Returns the pixels of the whole image that belong to an object, as bytes of 0 and 1."""
    mask: Array = np.zeros((height, width), np.uint8)
    for left, top, pixels in one.pieces:
        rows, columns = pixels.shape
        part = mask[top : top + rows, left : left + columns]
        np.maximum(part, pixels, out=part)
    return mask


def cut_out(mask: Array) -> tuple[int, int, Array] | None:
    """Returns the smallest rectangle with all pixels of a mask, and where it is; None: the mask has none."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return None
    left, top = int(columns[0]), int(rows[0])
    part: Array = np.ascontiguousarray(mask[top : rows[-1] + 1, left : columns[-1] + 1], np.uint8)
    return left, top, part
