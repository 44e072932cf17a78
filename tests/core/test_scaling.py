"""Replicas from arrivals and capacity: what must hold whatever comes, and two stories."""

from __future__ import annotations

import random
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.scaling import Arrivals, Autoscaler, ScalingRule, replicas_for

STEADY = ScalingRule(least=1, most=100, cold_start=20.0, patience=60.0)


def steadily(scaler: Autoscaler, rate: float, seconds: float, at: float, step: float = 0.5) -> float:
    """Told exactly so many; returns the time."""
    for _ in range(round(seconds / step)):
        at += step
        scaler.asked(rate * step, at)
    return at


counts = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60)
capacities = st.floats(0.1, 1e5)


@given(counts, capacities, st.integers(0, 5), st.integers(0, 50))
def test_never_fewer_or_more_than_allowed(
    arrivals: list[float], capacity: float, least: int, more: int
) -> None:
    scaler = Autoscaler(ScalingRule(least=least, most=least + more))
    for number, images in enumerate(arrivals):
        scaler.asked(images, number * 0.5)
        assert least <= scaler.wanted(capacity, number * 0.5) <= least + more


@given(counts, capacities, st.floats(1.0, 300.0))
def test_nothing_that_was_wanted_is_taken_away_within_the_patience(
    arrivals: list[float], capacity: float, patience: float
) -> None:
    scaler = Autoscaler(ScalingRule(most=10**6, patience=patience))
    rises, before = [(0.0, 0)], 0
    for number, images in enumerate(arrivals):
        now = number * 2.0
        scaler.asked(images, now)
        wanted = scaler.wanted(capacity, now)
        if wanted > before:
            rises.append((now, wanted))
        assert wanted >= max((count for at, count in rises if at >= now - patience), default=0)
        before = wanted


@given(st.floats(0.1, 1e5), capacities)
def test_a_steady_rate_settles_where_the_target_is(rate: float, capacity: float) -> None:
    scaler = Autoscaler(ScalingRule(most=10**9, patience=30.0))
    now = steadily(scaler, rate, 120.0, 0.0)
    assert scaler.wanted(capacity, now) == pytest.approx(replicas_for(rate, capacity), abs=1, rel=1e-6)


@given(counts, capacities, st.floats(1.0, 4.0))
def test_more_traffic_never_wants_less(arrivals: list[float], capacity: float, times: float) -> None:
    rule = ScalingRule(most=10**9)
    # Not of chance: what counts is compared, not how it was seen.
    few, many = Arrivals(30.0), Arrivals(30.0)
    for number, images in enumerate(arrivals):
        few.add(images, float(number))
        many.add(images * times, float(number))
    now = float(len(arrivals))
    assert all(many.rate(window, now) >= few.rate(window, now) for window in rule.windows)


@given(counts)
def test_a_count_that_begins_again_adds_what_it_shows(arrivals: list[float]) -> None:
    seen = Arrivals(1e9)
    seen.seen(0.0, 0.0, 0.0)
    before, total = 0.0, 0.0
    for number, count in enumerate(arrivals, 1):
        seen.seen(count, before, float(number))
        total += count - before if count >= before else count
        before = count
    assert seen.over(1e9, float(len(arrivals)))[0] == pytest.approx(total)


def test_what_is_not_known_changes_nothing() -> None:
    scaler = Autoscaler(STEADY)
    assert scaler.wanted(0.0, 0.0) == 1
    now = steadily(scaler, 300.0, 30.0, 0.0)
    assert scaler.wanted(100.0, now) == 4
    assert scaler.wanted(0.0, now + 1.0) == scaler.wanted(float("nan"), now + 1.0) == 4


def test_a_step_is_answered_within_seconds_and_taken_back_after_the_patience() -> None:
    scaler = Autoscaler(STEADY)
    now = steadily(scaler, 75.0, 60.0, 0.0)
    assert scaler.wanted(100.0, now) == 1
    now = steadily(scaler, 600.0, 2.0, now)
    assert scaler.wanted(100.0, now) >= 7
    now = steadily(scaler, 600.0, 60.0, now)
    assert scaler.wanted(100.0, now) in (8, 9, 10), "a little more, while it grew"
    settled = now
    while scaler.wanted(100.0, settled) > 8:
        settled = steadily(scaler, 600.0, 1.0, settled)
    assert settled - now <= 60.0 + 30.0
    calm = steadily(scaler, 75.0, 40.0, settled)
    assert scaler.wanted(100.0, calm) == 8, "not yet"
    while scaler.wanted(100.0, calm) > 1:
        calm = steadily(scaler, 75.0, 1.0, calm)
    assert 60.0 <= calm - settled <= 60.0 + 40.0


def test_a_ramp_is_answered_before_it_is_there() -> None:
    """What grows by 5/s each second is 100/s more when a replica that is started now answers."""
    scaler, rate, now = Autoscaler(STEADY), 400.0, 0.0
    now = steadily(scaler, rate, 40.0, now)
    for _ in range(60):
        rate += 5.0
        now = steadily(scaler, rate, 1.0, now, step=1.0)
    assert scaler.wanted(100.0, now) >= ceil(rate / 75.0) + 1


def test_chance_does_not_scale() -> None:
    """Poisson arrivals at half the target: no window's noise asks for a second replica."""
    scaler, chance, now = Autoscaler(STEADY), random.Random(7), 0.0
    most = 0
    for _ in range(1200):
        now += 0.5
        scaler.asked(sum(chance.random() < 0.05 for _ in range(380)), now)  # 38/s
        most = max(most, scaler.wanted(100.0, now))
    assert most == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_surge_that_the_old_recipe_lost(seed: int) -> None:
    """80/s, then 300/s for five minutes; a replica answers 52/s and takes 20 s to start. Scaling on the wait
    answered 77 % of the surge."""
    chance, now, served, surge = random.Random(seed), 0.0, 0.0, 0.0
    scaler = Autoscaler(ScalingRule(least=2, most=12))
    replicas: list[float] = [0.0, 0.0]  # from when on each answers
    while now < 420.0:
        now += 1.0
        rate = 300.0 if 60.0 <= now < 360.0 else 80.0
        came = sum(chance.random() < rate / 1000.0 for _ in range(1000))
        scaler.asked(came, now)
        wanted = scaler.wanted(52.0, now)
        if int(now) % 15 == 0:  # as often as Kubernetes looks
            replicas = replicas[:wanted] + [now + 20.0] * max(0, wanted - len(replicas))
        able = 52.0 * sum(start <= now for start in replicas)
        if 60.0 <= now < 360.0:
            surge += came
            served += min(came, able)
    assert served / surge >= 0.92
    assert len(replicas) <= 12


def test_steady_counts() -> None:
    assert [replicas_for(rate, 100.0) for rate in (0.0, 75.0, 75.1, 150.0, 500.0)] == [1, 1, 2, 2, 7]
    assert replicas_for(75.0, 100.0, redundant=1) == 2
    with pytest.raises(ValueError, match="capacity"):
        replicas_for(1.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 3, "most": 2},
        {"target": 0.0},
        {"windows": ()},
        {"windows": (5.0, 1.0)},
        {"cold_start": -1.0},
        {"patience": float("inf")},
    ],
)
def test_rules_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ScalingRule(**wrong)  # type: ignore[arg-type]
