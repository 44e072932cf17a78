"""Makes lines, in reading order, of regions and what was read in them: arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Box = Sequence[float]  # x1, y1, x2, y2
Polygon = Sequence[Sequence[float]]  # its corners, x and y, in order

_SAME_ROW = 0.5  # of the lower of two boxes: so much of it lies beside the other
_GUTTER = 1.0  # of the usual height: a gap between columns is wider
_COLUMN_LINES, _COLUMN_WIDTH = 3, 6.0  # running text: so many lines, as long as so many times their height
_DEEPEST = 8
_INSIDE = 4  # of a region's middle and the points halfway to its corners: so many lie in the line around it


def reading_order(boxes: Sequence[Box]) -> list[list[int]]:
    """Returns rows from top to bottom, each from left to right, of numbers of boxes. Columns of running text
    are read one after the other; anything else beside each other, such as labels and values, is one row."""
    return _rows(boxes, list(range(len(boxes))), 0)


def _rows(boxes: Sequence[Box], chosen: list[int], depth: int) -> list[list[int]]:
    if len(chosen) > 1 and depth < _DEEPEST:
        for parts in (_columns(boxes, chosen), _blocks(boxes, chosen)):
            if len(parts) > 1:
                return [row for part in parts for row in _rows(boxes, part, depth + 1)]
    return _plain_rows(boxes, chosen)


def _height(box: Box) -> float:
    return max(box[3] - box[1], 1e-6)


def _plain_rows(boxes: Sequence[Box], chosen: Sequence[int]) -> list[list[int]]:
    """A box joins the row whose last box to the left it lies beside: a row may run uphill."""
    rows: list[list[int]] = []
    for number in sorted(chosen, key=lambda one: (boxes[one][0], boxes[one][1])):
        fitting = [row for row in rows if _beside(boxes[row[-1]], boxes[number])]
        nearest = max(fitting, key=lambda row: boxes[row[-1]][2], default=None)
        if nearest is None:
            rows.append([number])
        else:
            nearest.append(number)
    return sorted(rows, key=lambda row: sum(boxes[one][1] + boxes[one][3] for one in row) / len(row))


def _beside(one: Box, other: Box) -> bool:
    shared = min(one[3], other[3]) - max(one[1], other[1])
    across = min(one[2], other[2]) - max(one[0], other[0])
    return shared >= _SAME_ROW * min(_height(one), _height(other)) and across < 0.5 * (other[2] - other[0])


def _split(spans: Sequence[tuple[float, float, int]], gap: float) -> list[list[int]]:
    """Returns where nothing lies for longer than `gap`."""
    parts: list[list[int]] = []
    end = float("-inf")
    for low, high, number in sorted(spans):
        if not parts or low - end > gap:
            parts.append([])
        parts[-1].append(number)
        end = max(end, high)
    return parts


def _columns(boxes: Sequence[Box], chosen: Sequence[int]) -> list[list[int]]:
    """Returns columns only where each is running text; otherwise all of them in one."""
    usual = median(_height(boxes[one]) for one in chosen)
    parts = _split([(boxes[one][0], boxes[one][2], one) for one in chosen], _GUTTER * usual)
    running = all(
        len(part) >= _COLUMN_LINES
        and median((boxes[one][2] - boxes[one][0]) / _height(boxes[one]) for one in part) >= _COLUMN_WIDTH
        for part in parts
    )
    return parts if running else [list(chosen)]


def _blocks(boxes: Sequence[Box], chosen: Sequence[int]) -> list[list[int]]:
    """Returns blocks above each other, with more than a line's height between them."""
    usual = median(_height(boxes[one]) for one in chosen)
    return _split([(boxes[one][1], boxes[one][3], one) for one in chosen], usual)


def whole_lines(regions: Sequence[Mapping[str, Any]], chosen: Sequence[int]) -> list[int]:
    """Returns, of these regions, those that do not lie inside another one: a finder sees parts of large
    letters as lines of their own. Boxes alone would not do, since those of sloping lines overlap."""
    areas = {number: _area(regions[number]["polygon"]) for number in chosen}
    kept: list[int] = []
    for number in sorted(chosen, key=lambda one: -areas[one]):
        box, points = regions[number]["box"], _points(regions[number]["polygon"])
        around = (regions[one] for one in kept if _overlap(box, regions[one]["box"]))
        if not any(sum(_holds(one["polygon"], point) for point in points) >= _INSIDE for one in around):
            kept.append(number)
    return sorted(kept)


def _area(polygon: Polygon) -> float:
    around = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return abs(sum(one[0] * two[1] - two[0] * one[1] for one, two in around)) / 2


def _points(polygon: Polygon) -> list[tuple[float, float]]:
    x, y = (sum(corner[axis] for corner in polygon) / len(polygon) for axis in (0, 1))
    return [(x, y), *(((x + corner[0]) / 2, (y + corner[1]) / 2) for corner in polygon)]


def _holds(polygon: Polygon, point: tuple[float, float]) -> bool:
    """The polygon is convex: a point inside it lies on the same side of every edge."""
    x, y = point
    around = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    sides = [(two[0] - one[0]) * (y - one[1]) - (two[1] - one[1]) * (x - one[0]) for one, two in around]
    return min(sides) >= 0.0 or max(sides) <= 0.0


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def as_lines(
    regions: Sequence[Mapping[str, Any]], read: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Returns `text` and `lines`, from the answers of the two tasks. Where nothing was read there is no line,
    and a region inside a larger one that was read is part of that line; `score` is the reader's."""
    there = [number for number, found in enumerate(read) if found and found["text"]]
    there = whole_lines(regions, there)
    lines, text = list[dict[str, Any]](), list[str]()
    for row in reading_order([regions[number]["box"] for number in there]):
        said = []
        for place in row:
            region, found = regions[there[place]], read[there[place]]
            assert found is not None
            kept = {"polygon": region["polygon"], "box": region["box"]}
            lines.append({"text": found["text"], "score": found["score"], **kept})
            said.append(found["text"])
        text.append(" ".join(said))
    return {"text": "\n".join(text), "lines": lines}
