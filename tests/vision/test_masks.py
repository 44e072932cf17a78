"""Masks survive both of their forms."""

from __future__ import annotations

import base64

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.mask_regions import from_run_lengths, png, png_text, run_lengths


@st.composite
def masks(draw: st.DrawFn) -> Array:
    height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    bits = draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    return np.array(bits, np.uint8).reshape(height, width)


@settings(deadline=None)
@given(masks())
def test_run_lengths_round_trip(mask: Array) -> None:
    counts = run_lengths(mask)
    assert sum(counts) == mask.size
    assert all(count > 0 for count in counts[1:])
    assert np.array_equal(from_run_lengths(counts, *mask.shape), mask)


@settings(deadline=None)
@given(masks())
def test_run_lengths_equal_the_slow_way(mask: Array) -> None:
    counts, value = [0], 0
    for column in range(mask.shape[1]):
        for row in range(mask.shape[0]):
            if mask[row, column] != value:
                counts.append(0)
                value = 1 - value
            counts[-1] += 1
    assert run_lengths(mask) == counts


@settings(deadline=None)
@given(masks())
def test_png_round_trip(mask: Array) -> None:
    back = cv2.imdecode(np.frombuffer(base64.b64decode(png_text(mask)), np.uint8), cv2.IMREAD_UNCHANGED)
    assert back.dtype == np.uint8
    assert np.array_equal(back, mask * 255)


def test_booleans_and_other_memory_orders_are_masks_too() -> None:
    mask = np.zeros((6, 8), bool)
    mask[1:3, 2:7] = True
    assert run_lengths(mask) == run_lengths(np.asfortranarray(mask)) == [13, 2, 4, 2, 4, 2, 4, 2, 4, 2, 9]
    assert png(mask[:, ::2]) == png(mask[:, ::2].copy())


def test_an_empty_mask() -> None:
    assert run_lengths(np.zeros((0, 5), np.uint8)) == []
    assert run_lengths(np.zeros((2, 3), np.uint8)) == [6]
    assert run_lengths(np.ones((2, 3), np.uint8)) == [0, 6]


@pytest.mark.parametrize("counts", [[5], [7], [-1, 7], []])
def test_run_lengths_that_do_not_add_up(counts: list[int]) -> None:
    with pytest.raises(InvalidInput, match="add up to 2 × 3 pixels"):
        from_run_lengths(counts, 2, 3)
