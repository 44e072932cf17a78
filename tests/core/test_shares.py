from __future__ import annotations

import pytest

from carpool.core.shares import BACKGROUND, ORDINARY, PROTECTED, level_of, water_level


@pytest.mark.parametrize(
    ("priority", "level"), [(0, ORDINARY), (1, PROTECTED), (2, ORDINARY), (3, BACKGROUND), (99, BACKGROUND)]
)
def test_tritons_numbers(priority: int, level: int) -> None:
    assert level_of(priority) == level


def test_water_fills_the_small_first() -> None:
    assert water_level([10, 20, 300], 130) == 100
    assert water_level([50, 50], 60) == 30
    assert water_level([1, 2], 10) == float("inf")
    assert water_level([], 10) == float("inf")
    assert water_level([5], 0) == 0
