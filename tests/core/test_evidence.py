"""Intervals that may be looked at after every trial."""

from __future__ import annotations

from math import inf, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.evidence import good_until_below, interval, times_as_often

CONFIDENCES = st.sampled_from((0.5, 0.9, 0.99, 0.999))


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int]:
    trials = draw(st.integers(0, 5000))
    return draw(st.integers(0, trials)), trials


@given(counts(), CONFIDENCES)
def test_what_was_seen_is_always_possible(seen: tuple[int, int], confidence: float) -> None:
    bad, trials = seen
    low, high = interval(bad, trials, confidence)
    assert 0.0 <= low <= high <= 1.0
    assert not trials or low <= bad / trials <= high


@given(counts(), CONFIDENCES)
def test_good_and_bad_are_two_sides_of_one_thing(seen: tuple[int, int], confidence: float) -> None:
    bad, trials = seen
    one, other = interval(bad, trials, confidence), interval(trials - bad, trials, confidence)
    assert one.low == pytest.approx(1.0 - other.high, abs=1e-9)
    assert one.high == pytest.approx(1.0 - other.low, abs=1e-9)


@given(counts(), CONFIDENCES)
def test_one_more_that_is_bad_moves_both_ends_up(seen: tuple[int, int], confidence: float) -> None:
    bad, trials = seen
    fewer, more = interval(bad, trials + 1, confidence), interval(bad + 1, trials + 1, confidence)
    before = interval(bad, trials, confidence)
    assert fewer.low <= before.low + 1e-9  # a good trial never speaks against, a bad one never for it
    assert more.high >= before.high - 1e-9
    assert fewer.low <= more.low + 1e-9
    assert fewer.high <= more.high + 1e-9


@given(counts())
def test_more_confidence_is_a_wider_interval(seen: tuple[int, int]) -> None:
    narrow, wide = interval(*seen, 0.9), interval(*seen, 0.99)
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


@pytest.mark.parametrize(("rate", "trials"), [(0.02, 2000), (0.5, 200)])
def test_a_rate_exactly_at_the_limit_is_not_called_over_it(rate: float, trials: int) -> None:
    """However often one looks: at most 1 in 100. A bad trial alone can lift the lower end, so that is when to
    look."""
    wrong = 0
    for seed in range(200):
        random, bad = Random(seed), 0
        for trial in range(1, trials + 1):
            if random.random() < rate:
                bad += 1
                if interval(bad, trial).low > rate:
                    wrong += 1
                    break
    assert wrong <= 2


@pytest.mark.parametrize(("rate", "most"), [(0.08, 400), (0.3, 40), (1.0, 2)])
def test_what_is_clearly_bad_is_told_soon(rate: float, most: int) -> None:
    looks = sorted(_looks_until_over(0.02, rate, Random(seed)) for seed in range(50))
    assert looks[25] <= most


def _looks_until_over(limit: float, rate: float, random: Random) -> int:
    bad = 0
    for trial in range(1, 5000):
        bad += random.random() < rate
        if interval(bad, trial).low > limit:
            return trial
    raise AssertionError("it was never told")


def test_none_bad_proves_a_limit_after_some_hundred() -> None:
    assert interval(0, 380).high > 0.02
    assert interval(0, 450).high < 0.02


def test_it_is_what_the_mixture_says() -> None:
    """Two bad of two: B(2.5, 0.5) / B(0.5, 0.5) is 3/8, so rates below √(0.01 · 3/8) are out."""
    assert interval(2, 2).low == pytest.approx((0.01 * 3 / 8) ** 0.5)
    assert interval(2, 2).high == 1.0
    assert log(interval(0, 2, 0.99).high) == pytest.approx(log(1 - (0.01 * 3 / 8) ** 0.5))


@pytest.mark.parametrize(
    ("bad", "trials", "confidence"), [(3, 2, 0.9), (-1, 2, 0.9), (1, 2, 1.0), (1, 2, 0.0)]
)
def test_impossible_counts_are_refused(bad: int, trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match=r"cannot be bad|confidence"):
        interval(bad, trials, confidence)


def test_no_trials_tell_nothing() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    assert times_as_often(0, 0, 0.1) == (0.0, inf)
    assert times_as_often(3, 3, 0.0) == times_as_often(3, 3, 1.0) == (0.0, inf)
    with pytest.raises(ValueError, match="share"):
        times_as_often(1, 1, 1.5)


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.01, 0.99))
def test_whose_it_was_is_the_same_asked_the_other_way(mine: int, others: int, share: float) -> None:
    one, back = times_as_often(mine, others, share), times_as_often(others, mine, 1.0 - share)
    assert 0.0 <= one.low <= one.high
    assert one.low == pytest.approx(1.0 / back.high if back.high else inf, rel=1e-4, abs=1e-9)
    if mine and others:
        mean = (mine / share) / (others / (1.0 - share))
        assert one.low <= mean * (1 + 1e-9)
        assert mean <= one.high * (1 + 1e-9)


def test_equal_errors_on_a_canary_are_nobodys_fault_and_many_are_told_soon() -> None:
    for times, most, wrong in ((1.0, 0, 2), (10.0, 20, 200)):
        mine_of_all = 0.1 * times / (0.1 * times + 0.9)
        alarms, needed = 0, []
        for seed in range(200):
            random, mine = Random(seed), 0
            for event in range(1, 121):
                mine += random.random() < mine_of_all
                if times_as_often(mine, event - mine, 0.1).low > 1.0:
                    alarms += 1
                    needed.append(event)
                    break
        assert alarms <= wrong
        assert not most or (alarms == 200 and sorted(needed)[100] <= most)


@given(st.integers(0, 20), st.integers(0, 500), st.floats(0.005, 0.5))
def test_how_many_more_good_ones_prove_it(bad: int, good: int, limit: float) -> None:
    more = good_until_below(bad, bad + good, limit)
    assert interval(bad, bad + good + more).high <= limit
    assert more == 0 or interval(bad, bad + good + more - 1).high > limit


def test_what_cannot_be_proven_is_not_looked_for_for_ever() -> None:
    assert good_until_below(10**6, 10**6, 1e-6, most=1000) == 1000
