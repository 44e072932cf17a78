from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.curve import line, shape_of


def straight(fixed: float, per_image: float, sizes: tuple[int, ...]) -> list[tuple[int, float]]:
    return [(size, fixed + per_image * size) for size in sizes]


def test_a_line_is_found_with_its_knee() -> None:
    shape = shape_of(straight(0.004, 0.001, (1, 2, 4, 8, 16, 32, 64)))
    assert (shape.fixed, shape.per_image) == pytest.approx((0.004, 0.001))
    assert (shape.line_from, shape.line_until) == (1, 64)
    assert not shape.bends
    assert shape.knee == 32  # 0.94 of the rate at 64
    assert all(abs(off) < 1e-9 for _, off in shape.residuals)


def test_where_the_line_stops_being_one() -> None:
    points = [*straight(0.004, 0.001, (1, 2, 4, 8)), (16, 0.060), (32, 0.160)]
    shape = shape_of(points)
    assert (shape.line_from, shape.line_until) == (1, 8)
    assert shape.bends
    assert shape.fixed == pytest.approx(0.004)
    assert dict(shape.residuals)[32] == pytest.approx(0.160 / 0.036 - 1)
    assert shape.knee == 8


def test_single_images_may_be_faster_than_the_line() -> None:
    """They are run where they lie, and stay in the cache."""
    shape = shape_of([(1, 0.04), (2, 0.1), *straight(0.0, 0.075, (4, 8, 16, 32))])
    assert (shape.line_from, shape.line_until) == (4, 32)
    assert shape.knee == 1


def test_points_on_no_line() -> None:
    shape = shape_of([(1, 1.0), (2, 5.0), (4, 5.1), (8, 60.0)])
    assert (shape.line_from, shape.line_until) == (0, 0)
    assert shape.bends


def test_one_point_and_two() -> None:
    assert shape_of([(1, 0.01)]).per_image == 0.01
    assert shape_of([(1, 0.01), (8, 0.03)]).line_until == 8


def test_noise_makes_neither_part_negative() -> None:
    assert line([(1, 0.010), (2, 0.009)]) == (pytest.approx(0.0095, rel=0.1), 0.0)
    assert line([(1, 0.010), (2, 0.040)])[0] == 0.0


@given(st.floats(0, 1), st.floats(1e-5, 1), st.sets(st.integers(1, 512), min_size=2, max_size=10))
def test_any_line_is_found_again(fixed: float, per_image: float, sizes: set[int]) -> None:
    found = line(straight(fixed, per_image, tuple(sorted(sizes))))
    assert found == (
        pytest.approx(fixed, rel=1e-3, abs=1e-3 * per_image),
        pytest.approx(per_image, rel=1e-3, abs=1e-3 * fixed),
    )
