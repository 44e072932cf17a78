"""Boxes [n, 4] as x1, y1, x2, y2: how they overlap, and which of them to keep."""

from __future__ import annotations

import numpy as np

from carpool.types import Array

_BLOCK = 128  # boxes settled at a time: more compare in vain, fewer pay for more calls
_LARGEST_BLOCK = 1024

KEPT = "kept"
"""The format of boxes that the model's device has chosen: rows of x1, y1, x2, y2, score and class."""


def from_centres(boxes: Array) -> Array:
    """Centre x, centre y, width, height → corners."""
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1)


def iou(one: Array, other: Array) -> Array:
    """[n, 4] and [m, 4] → [n, m]: the shared area over the area of both. Boxes without area share none."""
    inter, union = _shares(one.T, _areas(one.T), other.T, _areas(other.T))
    return np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)


def suppress(boxes: Array, scores: Array, limit: float, most: int, classes: Array | None = None) -> Array:
    """Greedy non-maximum suppression: indices of the boxes to keep, the best first, `most` at most.

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
    """Of every pair, the area that both cover and the area that either covers."""
    inter = np.minimum(one[2][:, None], other[2]) - np.maximum(one[0][:, None], other[0])
    np.maximum(inter, 0, out=inter)
    height = np.minimum(one[3][:, None], other[3]) - np.maximum(one[1][:, None], other[1])
    np.maximum(height, 0, out=height)
    inter *= height
    union = one_areas[:, None] + other_areas
    union -= inter
    return inter, union


def _covers(sides: Array, areas: Array, kinds: Array | None, one: Array, other: Array, limit: float) -> Array:
    """Which of `one` would suppress which of `other`."""
    inter, union = _shares(sides[:, one], areas[one], sides[:, other], areas[other])
    union *= np.asarray(limit, union.dtype)
    covers: Array = inter > union
    if kinds is not None:
        covers &= kinds[one][:, None] == kinds[other]
    return covers


def _settle(covers: Array) -> list[int]:
    """Who stays within a block, best first; a row of bits as one integer makes this a short loop."""
    rows = [int.from_bytes(row, "little") for row in np.packbits(covers, axis=1, bitorder="little")]
    gone, stay = 0, []
    for index, row in enumerate(rows):
        if not gone >> index & 1:
            stay.append(index)
            gone |= row
    return stay
