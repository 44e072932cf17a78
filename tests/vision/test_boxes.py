"""Suppression is exact: it keeps what the slow, obvious way keeps, in the same order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.types import Array
from carpool.vision.boxes import from_centres, iou, suppress
from later import later, many

SIDES = st.integers(-20, 60)
# few values, so that ties, identical, empty and inverted boxes are frequent
BOXES = st.lists(
    st.tuples(SIDES, SIDES, SIDES, SIDES, st.sampled_from([0.1, 0.5, 0.5, 0.9, 1.0]), st.integers(0, 2)),
    max_size=60,
)
LIMITS = st.sampled_from([0.0, 0.25, 0.45, 0.5, 1.0])


def slow(boxes: Array, scores: Array, limit: float, most: int, classes: Array | None) -> list[int]:
    order = sorted(range(len(boxes)), key=lambda index: (-scores[index], index))
    kept: list[int] = []
    for index in order:
        rivals = [k for k in kept if classes is None or classes[k] == classes[index]]
        if not any(covers(boxes[k], boxes[index], limit) for k in rivals):
            kept.append(index)
    return kept[:most]


def covers(one: Array, other: Array, limit: float) -> bool:
    zero = np.float32(0)
    width = max(zero, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(zero, min(one[3], other[3]) - max(one[1], other[1]))
    inter = width * height
    return bool(inter > (area(one) + area(other) - inter) * np.float32(limit))


def area(box: Array) -> np.float32:
    zero = np.float32(0)
    return np.float32(max(zero, box[2] - box[0]) * max(zero, box[3] - box[1]))


@settings(deadline=None, max_examples=many(200))
@given(BOXES, LIMITS, st.integers(1, 70), st.booleans())
def test_suppression_equals_the_slow_way(
    rows: list[tuple[float, ...]], limit: float, most: int, per_class: bool
) -> None:
    table = np.array(rows, np.float32).reshape(-1, 6)
    boxes, scores = table[:, :4], table[:, 4]
    classes = table[:, 5].astype(int) if per_class else None
    kept = suppress(boxes, scores, limit, most, classes)
    assert kept.tolist() == slow(boxes, scores, limit, most, classes)


@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize("limit", [later(0.0), 0.3, later(0.6)])
def test_several_blocks_equal_the_slow_way(limit: float, per_class: bool) -> None:
    """Several blocks, with what was kept in earlier ones."""
    random = np.random.default_rng(7)
    centres = random.uniform(0, 400, (700, 2))
    boxes = from_centres(np.hstack((centres, random.uniform(1, 90, (700, 2)))).astype(np.float32))
    scores = random.choice(np.linspace(0, 1, 200), 700).astype(np.float32)
    classes = random.integers(0, 4, 700) if per_class else None
    kept = suppress(boxes, scores, limit, 10**6, classes)
    assert kept.tolist() == slow(boxes, scores, limit, 10**6, classes)
    assert suppress(boxes, scores, limit, 130, classes).tolist() == kept[:130].tolist()


@pytest.mark.parametrize("count", [2100, later(8400)])
def test_of_thousands_all_that_stay_are_apart_and_all_that_go_are_covered(count: int) -> None:
    random = np.random.default_rng(3)
    centres = random.uniform(0, 600, (count, 2))
    boxes = from_centres(np.hstack((centres, random.uniform(4, 120, (count, 2)))))
    scores = random.uniform(0, 1, count)
    kept = suppress(boxes, scores, 0.5, count)
    assert (np.diff(scores[kept]) < 0).all()
    table = iou(boxes[kept], boxes)
    among = table[:, kept]
    assert (among - np.eye(len(kept)) <= 0.5).all()
    better = scores[kept][:, None] > scores
    gone = np.setdiff1d(np.arange(count), kept)
    assert ((table > 0.5) & better)[:, gone].any(axis=0).all()


def test_identical_boxes_leave_one_and_the_first() -> None:
    boxes = np.tile(np.array([[1, 1, 9, 9]], np.float32), (5000, 1))
    assert suppress(boxes, np.full(5000, 0.5, np.float32), 0.9, 300).tolist() == [0]


def test_nothing_in_nothing_out() -> None:
    assert suppress(np.empty((0, 4), np.float32), np.empty(0, np.float32), 0.5, 300).tolist() == []


@given(BOXES)
def test_iou_is_symmetric_and_one_with_itself(rows: list[tuple[float, ...]]) -> None:
    boxes = np.array(rows, np.float64).reshape(-1, 6)[:, :4]
    table = iou(boxes, boxes)
    assert np.array_equal(table, table.T)
    assert ((table >= 0) & (table <= 1)).all()
    solid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    assert np.array_equal(np.diag(table), solid.astype(float))


def test_iou_of_two_that_overlap() -> None:
    one, other = np.array([[0, 0, 10, 10.0]]), np.array([[5, 0, 15, 10.0]])
    assert iou(one, other)[0, 0] == pytest.approx(1 / 3)
