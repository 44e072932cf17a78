"""Percentiles of the histogram against numpy's, over any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.lab.load.tally import RELATIVE_ERROR, Histogram, milliseconds

VALUES = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300)
SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
WITHIN = RELATIVE_ERROR * (1 + 1e-9)


def test_the_error_is_below_one_percent() -> None:
    assert RELATIVE_ERROR < 0.01


@settings(deadline=None)
@given(VALUES)
def test_percentiles_are_those_of_numpy_within_the_error(values: list[float]) -> None:
    exact = np.percentile(values, [100 * share for share in SHARES], method="inverted_cdf")
    assert Histogram(values).percentiles(SHARES) == pytest.approx(list(exact), rel=WITHIN)


@settings(deadline=None)
@given(VALUES)
def test_count_mean_and_extremes_are_exact(values: list[float]) -> None:
    histogram = Histogram(values)
    assert histogram.count == len(values)
    assert (histogram.least, histogram.most) == (min(values), max(values))
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.percentile(1.0) == pytest.approx(max(values), rel=WITHIN)
    assert min(values) <= histogram.percentile(0.0) <= max(values)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_merged_is_as_if_counted_together(one: list[float], two: list[float]) -> None:
    merged = Histogram(one)
    merged.merge(Histogram(two))
    together = Histogram(one + two)
    assert merged.buckets == together.buckets
    assert (merged.count, merged.least, merged.most) == (together.count, together.least, together.most)
    assert merged.percentiles(SHARES) == together.percentiles(SHARES)


@settings(deadline=None)
@given(VALUES)
def test_percentiles_never_fall(values: list[float]) -> None:
    found = Histogram(values).percentiles(SHARES)
    assert found == sorted(found)


def test_nothing_is_zero_and_so_is_less_than_nothing() -> None:
    assert Histogram().percentiles(SHARES) == [0.0] * 5
    assert milliseconds(Histogram()).max == 0.0
    below = Histogram([-1.0, 0.0, 1e-9])  # a clock that is told to the microsecond may say so
    assert below.count == 3
    assert below.percentile(0.99) <= 1e-6
