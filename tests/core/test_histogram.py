"""Histograms that add up, and an index of change that is 0 where nothing changed."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.histogram import MOST_NAMES, Bins, Histogram, Tally, shift
from later import many

BINS = Bins(0.0, 1.0)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def of(values: list[float], bins: Bins = BINS) -> Histogram:
    made = Histogram(bins)
    for value in values:
        made.add(value)
    return made


@settings(max_examples=many(200), deadline=None)
@given(st.lists(NUMBERS), st.lists(NUMBERS))
def test_parts_merged_are_the_whole(first: list[float], second: list[float]) -> None:
    for bins in (BINS, Bins(0.01, 100.0, logarithmic=True)):
        whole, part = of(first + second, bins), of(first, bins)
        part.merge(of(second, bins))
        assert part.counts == pytest.approx(whole.counts)
        assert whole.total == pytest.approx(sum(not math.isnan(value) for value in first + second))


@settings(max_examples=many(200), deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20), st.data())
def test_never_below_zero_and_zero_for_the_same(counts: list[float], data: st.DataObject) -> None:
    size = len(counts)
    other = data.draw(st.lists(st.floats(0, 1e6), min_size=size, max_size=size))
    assert shift(counts, counts) == 0.0
    assert 0.0 <= shift(counts, other) < math.inf


def test_chance_is_taken_off() -> None:
    """Without that, 0.059 for windows of 300."""
    draw = Random(1)
    found = [
        shift(*(of([draw.gauss(0.5, 0.15) for _ in range(n)]).counts for n in (3000, 300))) for _ in range(60)
    ]
    assert fmean(found) < 0.01
    assert max(found) < 0.08


def test_a_third_of_a_deviation_is_seen() -> None:
    draw = Random(2)
    before = of([draw.gauss(0.5, 0.15) for _ in range(5000)])
    after = of([draw.gauss(0.55, 0.15) for _ in range(1000)])
    assert 0.04 < after.against(before) < 0.2
    assert of([0.9] * 300).against(before) > 2.0


def test_a_value_at_a_border_is_in_both_bins() -> None:
    """What a still camera measures may lie there: no change is not all the change there can be."""
    border = 10 / BINS.count
    below, above = of([border - 1e-4] * 300), of([border + 1e-4] * 300)
    assert above.against(below) == 0.0
    assert above.middle > below.middle


def test_ends_and_edges() -> None:
    assert of([-5.0, -math.inf]).counts[0] == 2.0
    assert of([5.0, math.inf]).counts[-1] == 2.0
    assert of([math.nan]).total == 0.0
    assert of([0.0, -1.0], Bins(0.1, 10.0, logarithmic=True)).counts[0] == 2.0
    assert BINS.edges()[:2] == [0.0, 0.05]
    assert Bins(0.01, 1.0, 2, logarithmic=True).edges() == pytest.approx([0.01, 0.1, 1.0])


@pytest.mark.parametrize("counts", [[1.0] * 19, [-1.0] * 20, [math.nan] * 20, [math.inf] * 20])
def test_counts_that_are_none(counts: list[float]) -> None:
    with pytest.raises(ValueError, match="counts"):
        Histogram(BINS, counts)


def test_names() -> None:
    before, now = Tally({"cat": 700, "dog": 300}), Tally({"cat": 690, "dog": 310})
    assert now.against(before) == 0.0
    assert Tally({"cat": 300, "dog": 700}).against(before) > 0.5
    assert Tally({"bird": 300}).against(before) > 2.0
    assert Tally({}).against(before) == 0.0
    with pytest.raises(ValueError, match="names"):
        Tally({"cat": math.nan})


def test_a_name_with_every_picture() -> None:
    tally = Tally()
    for number in range(10_000):
        tally.add(f"class-{number}")
    assert len(tally.counts) == MOST_NAMES + 1
    assert tally.total == 10_000
    names, before, now = tally.compared(tally)
    assert len(names) == len(before) == len(now) == 20
    assert sum(before) == pytest.approx(10_000)
