from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve, CurveError


def test_fixed_plus_per_image_in_milliseconds() -> None:
    curve = BatchCurve.parse("4+1")
    assert curve.max_batch == 64
    assert curve.times[16] == pytest.approx(0.020)
    assert curve.fit() == (pytest.approx(0.004), pytest.approx(0.001))


def test_straight_lines_between_points_and_the_last_slope_beyond() -> None:
    curve = BatchCurve.parse("2:10,4:20", max_batch=6)
    assert [round(t * 1e3) for t in curve.times] == [0, 10, 10, 15, 20, 25, 30]


def test_one_point_promises_no_gain_from_batching() -> None:
    curve = BatchCurve.parse("1:5", max_batch=3)
    assert [round(t * 1e3) for t in curve.times] == [0, 5, 10, 15]
    assert curve.fit() == (0.0, pytest.approx(0.005))


def test_padding_costs_what_the_bucket_costs() -> None:
    curve = BatchCurve.parse("4+1", max_batch=16, buckets=(1, 4, 64))
    assert curve.buckets == (1, 4, 16)
    assert [curve.padded(n) for n in (0, 1, 2, 4, 5, 16)] == [0, 1, 4, 4, 16, 16]
    assert curve.times[5] == curve.times[16]
    assert curve.efficient[9] == 4  # nine would run as sixteen: four now is better
    assert curve.fits(curve.times[4]) == 4


def test_a_cliff_is_not_worth_falling_off() -> None:
    curve = BatchCurve.parse("1:5,8:12,9:40,16:47")
    assert curve.efficient[9] == 8
    assert curve.efficient[16] == 8


def test_measurements_may_wobble_but_the_curve_does_not_fall() -> None:
    curve = BatchCurve.measured([(4, 0.009), (1, 0.010), (8, 0.020)])
    assert curve.times[4] == curve.times[1] == 0.010


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot read"),
        ("four+one", "cannot read"),
        ("1+2+3", "cannot read"),
        ("0+0", "both 0"),
        ("-4+1", "0 or more"),
        ("1:6,4", "cannot read"),
        ("1:6,4:5", "cannot be faster"),
        ("4:6,1:7", "must rise"),
        ("0:6", "start at 1"),
        ("1:0", "above 0"),
        ("1:nan", "above 0"),
        ("1:inf", "above 0"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(CurveError, match=says):
        BatchCurve.parse(text)


def test_no_points_at_all() -> None:
    with pytest.raises(CurveError, match="at least one point"):
        BatchCurve([])


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 1.0)), min_size=1, unique_by=lambda p: p[0]),
    st.integers(1, 50),
    st.floats(0, 2),
)
def test_fits_is_the_largest_that_does(
    points: list[tuple[int, float]], max_batch: int, seconds: float
) -> None:
    curve = BatchCurve.measured(points, max_batch)
    assert list(curve.times) == sorted(curve.times)
    size = curve.fits(seconds)
    assert curve.times[size] <= seconds
    assert size == max_batch or curve.times[size + 1] > seconds
    best = curve.efficient[max_batch]
    assert all(curve.throughput(best) >= curve.throughput(n) * 0.999 for n in range(1, max_batch + 1))
    assert curve.fits(-1.0) == 0
