"""Which objects of several tiles are one, by hand: the cases and their answers are sahi's, whose own
functions give the same (test_like_sahi.py)."""

from __future__ import annotations

import numpy as np
import pytest

from carpool.extensions.tiles.merging import MOST_FOUND, Found, by_class, cut_out, mask_of, merged
from carpool.extensions.tiles.settings import IOS, IOU, NMM, NMS, TileSettings

USUAL = TileSettings(merge=NMM, metric=IOS)


def found(*boxes: tuple[float, ...], class_id: int = 0) -> list[Found]:
    """Boxes with their scores."""
    return [Found((x1, y1, x2, y2), score, class_id) for x1, y1, x2, y2, score in boxes]


def boxes(left: list[Found]) -> list[tuple[float, ...]]:
    return [(*one.box, one.score) for one in left]


def test_halves_of_an_object_become_one() -> None:
    halves = found((10, 10, 60, 50, 0.7), (30, 10, 80, 52, 0.9))
    assert boxes(merged(halves, USUAL)) == [(10, 10, 80, 52, 0.9)]


def test_a_small_box_inside_a_large_one_matches_by_the_smaller_area_alone() -> None:
    both = found((0, 0, 100, 100, 0.8), (10, 10, 30, 30, 0.9))
    assert len(merged(both, USUAL)) == 1
    assert len(merged(both, TileSettings(merge=NMM, metric=IOU))) == 2


def test_a_match_counts_from_its_number_on() -> None:
    pair = found((0, 0, 10, 10, 0.9), (5, 0, 15, 10, 0.8))  # half of either
    assert len(merged(pair, TileSettings(merge=NMS, metric=IOS, match=0.5))) == 1
    assert len(merged(pair, TileSettings(merge=NMS, metric=IOS, match=0.501))) == 2


def test_the_best_stays_as_it_is_where_boxes_are_suppressed() -> None:
    halves = found((10, 10, 60, 50, 0.7), (30, 10, 80, 52, 0.9))
    assert boxes(merged(halves, TileSettings(merge=NMS, metric=IOS))) == [(30, 10, 80, 52, 0.9)]


def test_classes_are_apart_unless_they_should_not_be() -> None:
    two = [*found((0, 0, 10, 10, 0.9)), *found((0, 0, 10, 10, 0.8), class_id=1)]
    assert len(merged(two, USUAL)) == 2
    left = merged(two, TileSettings(merge=NMM, metric=IOS, per_class=False))
    assert [(one.class_id, one.score) for one in left] == [(0, 0.9)]


def test_merging_is_greedy_and_goes_no_further_than_the_best() -> None:
    """The third matches the second and not the first: it stays, although the joined box covers it."""
    chain = found((0, 0, 10, 10, 0.9), (4, 0, 14, 10, 0.8), (9, 0, 19, 10, 0.7))
    assert boxes(merged(chain, USUAL)) == [(0, 0, 14, 10, 0.9), (9, 0, 19, 10, 0.7)]


def test_what_no_longer_matches_the_grown_box_is_dropped() -> None:
    """Both match the first by IoU; joined with the second it is too large for the third."""
    grown = found((0, 0, 10, 10, 0.9), (0, 0, 10, 18, 0.8), (0, 0, 10, 6, 0.7))
    left = merged(grown, TileSettings(merge=NMM, metric=IOU, match=0.5))
    assert boxes(left) == [(0, 0, 10, 18, 0.9)]


def test_the_first_of_equal_scores_is_the_one_further_left() -> None:
    equal = found((1, 0, 11, 10, 0.9), (0, 0, 10, 10, 0.9))
    assert boxes(merged(equal, TileSettings(merge=NMS, metric=IOU))) == [(0, 0, 10, 10, 0.9)]


def test_boxes_without_area_match_nothing() -> None:
    flat = found((5, 5, 5, 5, 0.9), (0, 0, 10, 10, 0.8))
    assert len(merged(flat, USUAL)) == 2


def test_nothing_and_the_best_first() -> None:
    assert merged([], USUAL) == []
    apart = found((0, 0, 1, 1, 0.2), (5, 5, 6, 6, 0.9), (8, 8, 9, 9, 0.5))
    assert [one.score for one in merged(apart, USUAL)] == [0.9, 0.5, 0.2]


def test_only_so_many_are_compared() -> None:
    many = [Found((n * 2.0, 0, n * 2.0 + 1, 1), n / MOST_FOUND / 2, 0) for n in range(MOST_FOUND + 5)]
    left = merged(many[-3000:], USUAL)
    assert len(left) == 3000


@pytest.mark.parametrize(
    ("score", "given", "expected"),
    [
        (0.4, {}, (NMM, IOS)),
        (0.05, {}, (NMS, IOU)),  # merged boxes would grow without end
        (0.05, {"metric": IOS}, (NMS, IOS)),
        (0.05, {"merge": NMM}, (NMM, IOS)),
        (0.4, {"merge": NMS}, (NMS, IOS)),
    ],
)
def test_what_was_left_open(score: float, given: dict[str, str], expected: tuple[str, str]) -> None:
    settled = TileSettings(**given).settled(score)  # type: ignore[arg-type]
    assert (settled.merge, settled.metric) == expected


# ---- masks


def test_masks_of_joined_objects_are_joined() -> None:
    one, two = found((0, 0, 4, 4, 0.9), (2, 0, 6, 4, 0.8))
    one.pieces = [(0, 0, np.ones((4, 4), np.uint8))]
    two.pieces = [(2, 0, np.ones((2, 4), np.uint8))]
    (left,) = merged([one, two], TileSettings(merge=NMM, metric=IOS, match=0.4))
    mask = mask_of(left, 8, 5)
    assert mask.tolist() == [[1] * 6 + [0, 0]] * 2 + [[1] * 4 + [0] * 4] * 2 + [[0] * 8]


def test_classes_of_pixels_become_one_mask_each() -> None:
    parts = [*found((0, 0, 2, 2, 0.5), (4, 0, 6, 2, 0.9)), *found((2, 0, 4, 2, 0.6), class_id=3)]
    parts[0].pieces = [(0, 0, np.ones((2, 2), np.uint8))]
    parts[1].pieces = [(4, 0, np.ones((2, 2), np.uint8))]
    parts[2].pieces = [(2, 0, np.ones((2, 2), np.uint8))]
    left = by_class(parts)
    assert [(one.class_id, one.box, round(one.score, 6)) for one in left] == [
        (0, (0, 0, 6, 2), 0.7),
        (3, (2, 0, 4, 2), 0.6),
    ]


def test_a_mask_is_cut_out_where_it_has_pixels() -> None:
    mask = np.zeros((5, 6), np.uint8)
    assert cut_out(mask) is None
    mask[1, 2] = mask[3, 4] = 1
    cut = cut_out(mask)
    assert cut is not None
    left, top, pixels = cut
    assert (left, top, pixels.tolist()) == (2, 1, [[1, 0, 0], [0, 0, 0], [0, 0, 1]])
