"""Regions and what was read in them → lines in the order in which somebody reads them: arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Box = Sequence[float]  # x1, y1, x2, y2

_SAME_ROW = 0.5  # of the lower of two boxes: so much of it lies beside the other
_GUTTER = 1.0  # of the usual height: a gap between columns is wider
_COLUMN_LINES, _COLUMN_WIDTH = 3, 6.0  # running text: so many lines, as long as so many times their height
_DEEPEST = 8


def reading_order(boxes: Sequence[Box]) -> list[list[int]]:
    """Rows from top to bottom, each from left to right, of numbers of boxes. Columns of running text are read
    one after the other; anything else beside each other, such as labels and values, is one row."""
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
    """Where nothing lies for longer than `gap`."""
    parts: list[list[int]] = []
    end = float("-inf")
    for low, high, number in sorted(spans):
        if not parts or low - end > gap:
            parts.append([])
        parts[-1].append(number)
        end = max(end, high)
    return parts


def _columns(boxes: Sequence[Box], chosen: Sequence[int]) -> list[list[int]]:
    """Only where each is running text; otherwise all of them in one."""
    usual = median(_height(boxes[one]) for one in chosen)
    parts = _split([(boxes[one][0], boxes[one][2], one) for one in chosen], _GUTTER * usual)
    running = all(
        len(part) >= _COLUMN_LINES
        and median((boxes[one][2] - boxes[one][0]) / _height(boxes[one]) for one in part) >= _COLUMN_WIDTH
        for part in parts
    )
    return parts if running else [list(chosen)]


def _blocks(boxes: Sequence[Box], chosen: Sequence[int]) -> list[list[int]]:
    """Above each other, with more than a line's height between them."""
    usual = median(_height(boxes[one]) for one in chosen)
    return _split([(boxes[one][1], boxes[one][3], one) for one in chosen], usual)


def as_lines(
    regions: Sequence[Mapping[str, Any]], read: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """`text` and `lines`, from the answers of the two tasks. Where nothing was read there is no line; `score`
    is the reader's."""
    there = [number for number, found in enumerate(read) if found and found["text"]]
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
