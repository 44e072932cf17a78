"""Which line is read after which, and lines cut out of a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.types import Array
from carpool.vision.rectify import rectify
from carpool.vision.text_lines import as_lines, reading_order

Box = tuple[float, float, float, float]


def column(left: float, count: int, top: float = 0.0, width: float = 200.0) -> list[Box]:
    return [(left, top + 30 * row, left + width, top + 30 * row + 20) for row in range(count)]


def test_from_top_to_bottom_and_from_left_to_right() -> None:
    boxes = [(100.0, 0.0, 150.0, 20.0), (0.0, 2.0, 90.0, 22.0), (0.0, 40.0, 90.0, 60.0)]
    assert reading_order(boxes) == [[1, 0], [2]]


def test_columns_of_running_text_are_read_one_after_the_other() -> None:
    boxes = column(0, 5) + column(260, 5) + [(0.0, -80.0, 460.0, -50.0)]
    assert [number for row in reading_order(boxes) for number in row] == [10, *range(10)]


def test_labels_and_values_are_one_row() -> None:
    boxes = column(0, 4, width=60) + column(200, 4, width=50)
    assert reading_order(boxes) == [[row, row + 4] for row in range(4)]


def test_a_row_may_run_uphill() -> None:
    boxes = [(60.0 * step, 100.0 - 8 * step, 60.0 * step + 50, 120.0 - 8 * step) for step in range(6)]
    assert reading_order(boxes) == [list(range(6))]


SIDES = st.floats(0, 1000)


@given(st.lists(st.tuples(SIDES, SIDES, SIDES, SIDES), max_size=40))
def test_every_box_is_read_once(corners: list[Box]) -> None:
    boxes = [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in corners]
    read = [number for row in reading_order(boxes) for number in row]
    assert sorted(read) == list(range(len(boxes)))


def region(left: float, top: float, right: float, bottom: float, slope: float = 0.0) -> dict[str, Any]:
    """`slope`: pixels down for each one to the right."""
    down = slope * (right - left)
    polygon = [[left, top], [right, top + down], [right, bottom + down], [left, bottom]]
    box = [left, min(top, top + down), right, max(bottom, bottom + down)]
    return {"polygon": polygon, "box": box, "score": 0.5}


def texts(regions: Sequence[dict[str, Any]], *read: str) -> list[str]:
    lines = as_lines(regions, [{"text": text, "score": 0.9} for text in read])["lines"]
    return [line["text"] for line in lines]


def test_a_fragment_inside_a_line_that_was_read_is_part_of_it() -> None:
    line = region(10, 10, 300, 60)
    inside, at_its_edge = region(20, 15, 50, 55), region(250, 4, 290, 40)
    assert texts([inside, line, at_its_edge], "C", "Credit hundred", "4") == ["Credit hundred"]
    assert texts([inside, line], "C", "") == ["C"]  # the line was not read
    assert texts([line, line], "twice", "seen") == ["twice"]


def test_lines_beside_each_other_stay_whatever_their_boxes_do() -> None:
    above, below = region(0, 0, 900, 30, slope=0.1), region(20, 40, 120, 70, slope=0.1)
    assert above["box"][3] > below["box"][3]  # the box of the long one holds the other's
    assert texts([above, below], "a long line that slopes", "short") == ["a long line that slopes", "short"]
    touching = [region(0, 0, 200, 30), region(0, 26, 60, 56), region(195, 2, 260, 28)]
    assert sorted(texts(touching, "one", "two", "three")) == ["one", "three", "two"]


def test_lines_and_text() -> None:
    regions = [region(*box) for box in ((0, 40, 90, 60), (100, 0, 150, 20), (0, 2, 90, 22))]
    read = [
        {"text": "third", "score": 0.7},
        {"text": "second", "score": 0.8},
        {"text": "first", "score": 0.9},
    ]
    answer = as_lines(regions, read)
    assert answer["text"] == "first second\nthird"
    assert [(line["text"], line["score"]) for line in answer["lines"]] == [
        ("first", 0.9),
        ("second", 0.8),
        ("third", 0.7),
    ]
    assert as_lines(regions, [None, {"text": "", "score": 0.0}, read[2]])["text"] == "first"
    assert as_lines([], []) == {"text": "", "lines": []}


# ---- rectify


def picture(height: int = 100, width: int = 200) -> Array:
    """Red grows to the right, green downwards."""
    made = np.zeros((height, width, 3), np.uint8)
    made[..., 0], made[..., 1] = np.arange(width)[None], np.arange(height)[:, None]
    return made


def test_an_upright_box_is_a_crop() -> None:
    pixels = picture()
    cut = rectify(pixels, [[20, 10], [120, 10], [120, 58], [20, 58]], 48, 960)
    assert np.array_equal(cut, pixels[10:58, 20:120])


def test_a_line_gets_the_readers_height_and_its_own_proportions() -> None:
    quad = [[20, 10], [120, 10], [120, 30], [20, 30]]
    assert rectify(picture(), quad, 48, 960).shape == (48, 240, 3)
    assert rectify(picture(), quad, 10, 960).shape == (10, 50, 3)
    wide = rectify(picture(), quad, 10, 960, 1.2)  # or more of it across
    assert wide.shape == (10, 60, 3)
    assert wide[0, 0, 0] <= 21
    assert wide[0, -1, 0] >= 118


def test_what_is_too_long_is_squeezed() -> None:
    cut = rectify(picture(), [[0, 10], [200, 10], [200, 12], [0, 12]], 48, 960)
    assert cut.shape == (48, 960, 3)
    assert cut[0, 0, 0] < 3
    assert cut[0, -1, 0] > 196


def test_turned_lines_become_level() -> None:
    angle = math.radians(30)
    along, down = np.array([math.cos(angle), math.sin(angle)]), np.array([-math.sin(angle), math.cos(angle)])
    start = np.array([60.0, 20.0])
    quad = [start, start + 80 * along, start + 80 * along + 16 * down, start + 16 * down]
    cut = rectify(picture(), quad, 16, 960).astype(float)
    assert cut.shape == (16, 80, 3)
    rises = np.diff(cut[4:12, 4:76, 0], axis=1).mean(), np.diff(cut[4:12, 4:76, 1], axis=1).mean()
    assert rises == pytest.approx((along[0], along[1]), abs=0.03)


def test_a_line_that_runs_down_the_page_is_turned() -> None:
    cut = rectify(picture(), [[50, 10], [60, 10], [60, 90], [50, 90]], 10, 960)
    assert cut.shape == (10, 80, 3)
    assert cut[5, 0, 1] < 14  # its left end was at the top
    assert cut[5, -1, 1] > 85


@pytest.mark.parametrize(
    "quad",
    [
        [[5, 5], [6, 5], [6, 6], [5, 6]],  # one pixel
        [[5, 5]] * 4,  # none
        [[5, 5], [9, 5], [9, 5], [5, 5]],  # flat
        [[-50, -50], [400, -50], [400, 300], [-50, 300]],  # larger than the picture
        [[500, 500], [600, 500], [600, 520], [500, 520]],  # beside it
        [[math.nan, math.inf], [-math.inf, 1e30], [3, 4], [5, 6]],
        [[0, 0], [50, 50], [50, 0], [0, 50]],  # crossed
    ],
)
def test_any_quadrilateral_is_a_picture(quad: list[list[float]]) -> None:
    for longest in (1, 960):
        cut = rectify(picture(), quad, 48, longest)
        assert cut.shape[0] == 48
        assert 1 <= cut.shape[1] <= longest
        assert cut.dtype == np.uint8
