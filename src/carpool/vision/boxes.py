"""Makes boxes of raw outputs: how each head holds them, how they overlap, and which of them to keep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from carpool.config.model import KEPT, BoxSettings
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options

_FAR = 1e6  # pixels: beyond, areas would overflow
FINAL = ("end2end", "detr", "rtdetr", "boxes_labels_scores", "dets_labels")
"""Formats of models that have chosen their boxes themselves."""


class Found(NamedTuple):
    """Holds boxes [n, 4] by corners, scores [n], classes [n], and [n, more] what else belongs to each."""

    boxes: Array
    scores: Array
    classes: Array
    rest: Array

    def only(self, which: Array) -> Found:
        return Found(*(part[which] for part in self))


# ---- how heads hold them


def of_head(form: str, output: Array, least: float, more: int = 0) -> Found:
    """Reads one output in a format of YOLO's, with so many numbers more for each anchor."""
    if form in ("end2end", KEPT):
        return kept(output, least)
    return (yolov8 if form == "yolov8" else yolov5)(output, least, more)


def yolov8(output: Array, least: float, more: int = 0) -> Found:
    """Reads [4 + classes + more, anchors]: centre x, centre y, width, height, then a score per class."""
    last = len(output) - more
    scores = output[4:last]
    columns = columns_above(scores, least)
    chosen = scores[:, columns]
    best = chosen.argmax(axis=0) if len(columns) else np.empty(0, np.intp)
    boxes = from_centres(output[:4, columns].T)
    return Found(boxes, chosen[best, np.arange(len(columns))], best, output[last:, columns].T)


def yolov5(output: Array, least: float, more: int = 0) -> Found:
    """Reads [anchors, 5 + classes + more]: as above with objectness before the classes. A score is the
    product of both, so that what lacks objectness need not be looked at."""
    rows = np.flatnonzero(output[:, 4] >= least)
    last = output.shape[1] - more
    chosen = output[rows]
    best = chosen[:, 5:last].argmax(axis=1) if len(rows) else np.empty(0, np.intp)
    scores = chosen[:, 4] * chosen[np.arange(len(rows)), 5 + best]
    enough = np.flatnonzero(scores >= least)
    return Found(from_centres(chosen[enough, :4]), scores[enough], best[enough], chosen[enough, last:])


CELLS = (8, 16, 32)
"""Pixels of the cells of YOLOX's levels, whose rows come one level after the other."""


def yolox(output: Array, least: float, height: int, width: int) -> Found:
    """Reads [cells, 5 + classes], as yolov5, of an input of this size: centres are offsets from their cell's
    corner in cells, and sizes are logarithms of cells."""
    grids = []
    for side in CELLS:
        rows, columns = np.mgrid[: height // side, : width // side].reshape(2, -1)
        grids.append(np.stack((columns, rows, np.full(len(rows), side)), axis=1))
    grid = np.concatenate(grids).astype(output.dtype)
    if len(grid) != len(output):
        raise ModelError(f"the model returned {len(output)} rows instead of {len(grid)}, one for each cell")
    boxes = np.concatenate((output[:, :2] + grid[:, :2], np.exp(output[:, 2:4])), axis=1) * grid[:, 2:]
    return yolov5(np.concatenate((boxes, output[:, 4:]), axis=1), least)


def kept(rows: Array, least: float) -> Found:
    """[most, 6 + more]: x1, y1, x2, y2, score, class; a class below 0 marks a row without a box."""
    rows = rows[(rows[:, 5] >= 0) & (rows[:, 4] >= least) & (rows[:, 5] < _FAR)]
    return Found(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.intp), rows[:, 6:])


def boxes_scores(boxes: Array, scores: Array, least: float) -> Found:
    """Reads boxes [anchors, 4] by corners and scores [anchors, classes]; an anchor counts for its best
    class."""
    rows = rows_above(scores, least)
    chosen = scores[rows]
    best = chosen.argmax(axis=1) if len(rows) else np.empty(0, np.intp)
    return Found(boxes[rows], chosen[np.arange(len(rows)), best], best, boxes[rows, 4:])


def best_pairs(boxes: Array, scores: Array, least: float) -> Found:
    """Reads queries [n, 4] by corners and scores [n, classes], where each class of a query counts for itself:
    the best n pairs of both, in their order where scores are equal."""
    places = np.flatnonzero(np.ascontiguousarray(scores).reshape(-1) >= least)
    found = scores.reshape(-1)[places]
    if len(places) > len(boxes):
        best = np.argsort(-found, kind="stable")[: len(boxes)]
        places, found = places[best], found[best]
    rows, classes = np.divmod(places, max(1, scores.shape[1]))
    return Found(boxes[rows], found, classes, boxes[rows, 4:])


def rows_above(scores: Array, least: float) -> Array:
    """Returns rows with any number so large. To look for the numbers is several times faster than for the
    maxima."""
    places = np.flatnonzero(np.ascontiguousarray(scores).reshape(-1) >= least) // max(1, scores.shape[1])
    first = np.empty(len(places), bool)
    first[:1] = True
    np.not_equal(places[1:], places[:-1], out=first[1:])
    rows: Array = places[first]
    return rows


def columns_above(scores: Array, least: float) -> Array:
    """Does the same for columns, where the maxima are the fastest."""
    return np.flatnonzero(scores.max(axis=0, initial=-np.inf) >= least)


# ---- which of them are answered


def sound(found: Found, geometry: Geometry, around: Array | None = None) -> tuple[Found, Array]:
    """Returns what was found without what is no number or lies beside the picture; and the boxes in the
    picture's pixels, or those `around` what was found."""
    placed = geometry.to_picture(found.boxes if around is None else around)
    good = (placed[:, 2] > placed[:, 0]) & (placed[:, 3] > placed[:, 1]) & np.isfinite(found.scores)
    good &= np.isfinite(found.boxes).all(axis=1)
    if found.rest.shape[1]:
        good &= np.isfinite(found.rest).all(axis=1)
    found = found.only(good)
    boxes, rest = (np.clip(part, -_FAR, _FAR) for part in (found.boxes, found.rest))
    return found._replace(boxes=boxes, rest=rest), placed[good]


def choose(found: Found, table: BoxSettings, options: Options, form: str | None) -> Array:
    """Returns indices of those that stay, the best first."""
    most = options.max_detections or table.max_detections
    overlap = (1.0 if form in FINAL else table.iou) if options.iou is None else options.iou
    classes = found.classes if table.per_class else None
    return suppress(found.boxes, found.scores, overlap, most, classes)


def least_score(table: BoxSettings, options: Options) -> float:
    return table.score if options.score is None else options.score


# ---- boxes [n, 4] as x1, y1, x2, y2: how they overlap, and which of them to keep

_BLOCK = 128  # boxes settled at a time: more compare in vain, fewer pay for more calls
_LARGEST_BLOCK = 1024


def from_centres(boxes: Array) -> Array:
    """Turns centre x, centre y, width, height into corners."""
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1)


def iou(one: Array, other: Array) -> Array:
    """Returns the shared area over the area of both: [n, 4] and [m, 4] → [n, m]. Boxes without area share
    none."""
    inter, union = _shares(one.T, _areas(one.T), other.T, _areas(other.T))
    return np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)


def suppress(boxes: Array, scores: Array, limit: float, most: int, classes: Array | None = None) -> Array:
    """Does greedy non-maximum suppression: returns indices of the boxes to keep, the best first, `most` at
    most.

    A box goes when it overlaps a better one that stays by more than `limit`, of the same class where
    `classes` are given. Equal scores count in the order given.

    Blocks in order of score are compared with what was kept so far, then within themselves. So the work ends
    with the last box kept, and memory does not grow with the square of the boxes. Where little is left of a
    block, the next one is larger.
    """
    order = np.argsort(-scores, kind="stable")
    sides = np.ascontiguousarray(boxes[order].T)
    areas = _areas(sides)
    kinds = None if classes is None else classes[order]
    kept = np.empty(0, np.intp)
    start, size = 0, _BLOCK
    while start < len(order) and len(kept) < most:
        block = np.arange(start, min(start + size, len(order)))
        start += size
        if len(kept):
            block = block[~_covers(sides, areas, kinds, kept, block, limit).any(axis=0)]
        size = min(2 * size, _LARGEST_BLOCK) if len(block) < _BLOCK // 2 else _BLOCK
        survivors = _settle(_covers(sides, areas, kinds, block, block, limit))
        kept = np.concatenate((kept, block[survivors]))
    return order[kept[:most]]


def _areas(sides: Array) -> Array:
    areas: Array = np.maximum(sides[2] - sides[0], 0) * np.maximum(sides[3] - sides[1], 0)
    return areas


def _shares(one: Array, one_areas: Array, other: Array, other_areas: Array) -> tuple[Array, Array]:
    """Returns, of every pair, the area that both cover and the area that either covers."""
    inter = np.minimum(one[2][:, None], other[2]) - np.maximum(one[0][:, None], other[0])
    np.maximum(inter, 0, out=inter)
    height = np.minimum(one[3][:, None], other[3]) - np.maximum(one[1][:, None], other[1])
    np.maximum(height, 0, out=height)
    inter *= height
    union = one_areas[:, None] + other_areas
    union -= inter
    return inter, union


def _covers(sides: Array, areas: Array, kinds: Array | None, one: Array, other: Array, limit: float) -> Array:
    """Returns which of `one` would suppress which of `other`."""
    inter, union = _shares(sides[:, one], areas[one], sides[:, other], areas[other])
    union *= np.asarray(limit, union.dtype)
    covers: Array = inter > union
    if kinds is not None:
        covers &= kinds[one][:, None] == kinds[other]
    return covers


def _settle(covers: Array) -> list[int]:
    """Returns who stays within a block, best first; a row of bits as one integer makes this a short loop."""
    rows = [int.from_bytes(row, "little") for row in np.packbits(covers, axis=1, bitorder="little")]
    gone, stay = 0, []
    for index, row in enumerate(rows):
        if not gone >> index & 1:
            stay.append(index)
            gone |= row
    return stay


# ---- the same for boxes with an angle, as Gaussians: what their spread shares, after Llerena and others,
# "Gaussian Bounding Boxes and Probabilistic Intersection-over-Union" (2021), as the models are trained with

_TINY = 1e-12  # keeps what has no area from dividing by 0
_MOST_ROTATED = 1024  # the best of them are compared: each with each


def suppress_rotated(found: Found, limit: float, most: int, *, per_class: bool) -> Array:
    """Does the same as `suppress`, for flat boxes with their angles in `rest`."""
    order = np.argsort(-found.scores, kind="stable")[:_MOST_ROTATED]
    best = found.only(order)
    centres = ((best.boxes[:, :2] + best.boxes[:, 2:]) / 2).astype(np.float64)
    spread = np.square((best.boxes[:, 2:] - best.boxes[:, :2]).astype(np.float64)) / 12
    covers = shared_spread(centres, spread, best.rest[:, 0].astype(np.float64)) > limit
    if per_class:
        covers &= best.classes[:, None] == best.classes
    return order[np.array(_settle(covers), np.intp)[:most]]


def shared_spread(centres: Array, spread: Array, angles: Array) -> Array:
    """[n, n]: 1 for boxes that are the same, 0 for those far apart."""
    cos, sin = np.cos(angles), np.sin(angles)
    xx = spread[:, 0] * cos**2 + spread[:, 1] * sin**2
    yy = spread[:, 0] * sin**2 + spread[:, 1] * cos**2
    xy = (spread[:, 0] - spread[:, 1]) * cos * sin
    both_xx, both_yy, both_xy = (part[:, None] + part for part in (xx, yy, xy))
    dx, dy = (centres[:, None, axis] - centres[:, axis] for axis in (0, 1))
    whole = np.maximum(both_xx * both_yy - both_xy**2, _TINY)
    own = np.maximum(xx * yy - xy**2, _TINY)
    apart = (both_xx * dy**2 + both_yy * dx**2 - 2 * both_xy * dx * dy) / (4 * whole)
    apart += np.log(whole / (4 * np.sqrt(own[:, None] * own))) / 2
    shared: Array = 1 - np.sqrt(1 - np.exp(-np.maximum(apart, 0.0)))
    return shared
