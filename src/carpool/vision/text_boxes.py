"""Maps of text → quadrilaterals, in pixels of the map; corners go round from where reading begins.

Models are strangers: a map may be noise from edge to edge, or hold no number at all. So regions are counted
and chosen by the thousand in compiled code, and only so many, over so many pixels, are looked at one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np

from carpool.config.model import TextRegionsSettings
from carpool.errors import ModelError
from carpool.types import Array

MOST_PIXELS = 1 << 24  # of a map
_LOOKED_AT = 16  # times the map's own pixels, in the boxes around all regions together
_LEAST_SIDE = 2.0  # pixels: what is thinner is a speck
_LEAST_AREA = 3
_STEEP = 1.0  # rise over run: a line's edge that is fitted steeper is no edge


class Quads(NamedTuple):
    corners: Array  # [n, 4, 2]: x, y
    scores: Array  # [n]


def find_quads(maps: Array, table: TextRegionsSettings, most: int) -> Quads:
    """Returns the best first. `maps` is [height, width] for format db; for lines it is [3, height, width],
    and distances are in pixels of the map."""
    if maps.shape[-1] * maps.shape[-2] > MOST_PIXELS:
        raise ModelError(f"a map of {list(maps.shape)} has more than the {MOST_PIXELS} pixels allowed")
    likely = np.nan_to_num(maps if maps.ndim == 2 else maps[0], nan=0.0, posinf=1.0, neginf=0.0)
    likely = np.ascontiguousarray(np.clip(likely, 0.0, 1.0), np.float32)
    regions = _Regions(likely, table, most)
    found = regions.rectangles() if maps.ndim == 2 else regions.lines(maps[1], maps[2])
    kept = [(quad, score) for quad, score in found if score >= table.score]
    kept.sort(key=lambda one: -one[1])
    corners = np.array([quad for quad, _ in kept[:most]], np.float32).reshape(-1, 4, 2)
    return Quads(corners, np.array([score for _, score in kept[:most]], np.float64))


class _Regions:
    """Holds connected pixels above the threshold: the largest of them, within the budget."""

    def __init__(self, likely: Array, table: TextRegionsSettings, most: int) -> None:
        self._likely, self._table = likely, table
        above = (likely > table.threshold).astype(np.uint8)
        _, self._labels, self._stats, _ = cv2.connectedComponentsWithStats(above, connectivity=8)
        areas = self._stats[1:, cv2.CC_STAT_AREA]
        largest = np.argsort(-areas, kind="stable")[: 2 * most]
        chosen = largest[areas[largest] >= _LEAST_AREA] + 1
        sides = self._stats[chosen][:, [cv2.CC_STAT_WIDTH, cv2.CC_STAT_HEIGHT]].astype(np.int64)
        within = np.cumsum(sides.prod(axis=1)) <= _LOOKED_AT * likely.size
        self._chosen: list[int] = chosen[within].tolist()

    def _part(self, number: int) -> tuple[int, int, Array, Array]:
        """Returns the box around one: left, top, which of its pixels belong to it, and how likely they
        are."""
        left, top, width, height = self._stats[number, : cv2.CC_STAT_AREA].tolist()
        rows, columns = slice(top, top + height), slice(left, left + width)
        return left, top, self._labels[rows, columns] == number, self._likely[rows, columns]

    def rectangles(self) -> list[tuple[Array, float]]:
        """Returns the smallest rectangle around each region, grown by what training took away. To grow a
        rectangle by the same on all sides, with round corners, and to take the smallest rectangle again only
        moves its sides."""
        found = []
        for number in self._chosen:
            left, top, own, likely = self._part(number)
            contours, _ = cv2.findContours(own.view(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
            (x, y), (width, height), angle = cv2.minAreaRect(np.concatenate(contours))
            width, height = width + 1.0, height + 1.0  # from the edges of pixels, not from their middles
            if min(width, height) < _LEAST_SIDE:
                continue
            inside = np.zeros(own.shape, np.uint8)
            corners = cv2.boxPoints(((x, y), (width - 1.0, height - 1.0), angle))
            cv2.fillPoly(inside, [np.rint(corners).astype(np.int32)], 1)
            score = cv2.mean(likely, inside)[0]
            more = width * height * self._table.unclip / (2.0 * (width + height))
            centre = (x + left + 0.5, y + top + 0.5)
            grown = cv2.boxPoints((centre, (width + 2.0 * more, height + 2.0 * more), angle))
            found.append((in_turn(grown), float(score)))
        return found

    def lines(self, above: Array, below: Array) -> list[tuple[Array, float]]:
        """Each edge of a line is the straight one that fits best, so that a line may run a little uphill."""
        height, width = self._likely.shape
        reach = float(2 * max(height, width))
        found = []
        for number in self._chosen:
            left, top, own, likely = self._part(number)
            rows, columns = np.nonzero(own)
            score = float(likely[own].mean())
            part = (slice(top, top + own.shape[0]), slice(left, left + own.shape[1]))
            up, down = (
                np.nan_to_num(far[part][own], nan=0.0, posinf=0.0).clip(0.0, reach) for far in (above, below)
            )
            x, y = columns + left + 0.5, rows + top + 0.5
            slope, (upper, lower) = _edges(x, (y - up, y + down), len(own[0]))
            tall = max(float(lower - upper), 1.0)
            grow = self._table.margin * tall
            ends = left - grow - _END * tall, left + own.shape[1] + grow + _END * tall
            middle = left + own.shape[1] / 2
            quad = [
                (end, edge + more + slope * (end - middle))
                for end, edge, more in (
                    (ends[0], upper, -grow),
                    (ends[1], upper, -grow),
                    (ends[1], lower, grow),
                    (ends[0], lower, grow),
                )
            ]
            found.append((np.array(quad, np.float32), score))
        return found


_END = 0.15  # of a line's height: so much shorter than the line is its middle, at either end


def _edges(x: Array, edges: tuple[Array, Array], width: int) -> tuple[float, tuple[float, float]]:
    """Returns one slope for both, and where they lie in the middle of the line."""
    centred = x - x.mean()
    spread = float((centred**2).sum())
    tall = float((edges[1] - edges[0]).mean())
    slope = 0.0
    if spread > 0.0 and width > 2.0 * tall:  # short ones say nothing about a slope
        slope = float((centred * (edges[0] + edges[1])).sum()) / (2.0 * spread)
    slope = max(-_STEEP, min(_STEEP, slope))
    shift = slope * ((float(x.min()) + float(x.max())) / 2 - float(x.mean()))
    return slope, (float(edges[0].mean()) + shift, float(edges[1].mean()) + shift)


def in_turn(corners: Array) -> Array:
    """Orders corners clockwise from the top left, as read with the head tilted by less than 45 degrees."""
    across = corners[1] - corners[0]
    turns = round(math.atan2(float(across[1]), float(across[0])) / (math.pi / 2))
    return np.roll(corners, turns, axis=0)
