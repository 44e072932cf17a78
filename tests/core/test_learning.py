from __future__ import annotations

from random import Random

import pytest

from carpool.core.learning import Doubt, Rate, Speed


def test_a_steady_device_is_learned_with_its_noise() -> None:
    speed, random = Speed(), Random(1)
    for _ in range(3000):
        speed.learn(1.3 * random.lognormvariate(0, 0.05))
    assert speed.mean == pytest.approx(1.3, rel=0.03)
    assert 1.03 < speed.cautious / speed.mean < 1.12  # the 0.9 quantile is 1.066


def test_one_stall_changes_little() -> None:
    speed = Speed()
    speed.learn(2.0)
    assert speed.mean < 1.06


def test_three_surprises_in_a_row_are_believed_at_once() -> None:
    speed = Speed()
    for _ in range(3):
        speed.learn(3.0)
    assert speed.mean == pytest.approx(3.0, rel=0.01)
    for _ in range(3):
        speed.learn(1.0)
    assert speed.mean == pytest.approx(1.0, rel=0.05)


def test_surprises_on_both_sides_are_noise() -> None:
    speed = Speed()
    for ratio in (2.0, 0.5, 2.0, 0.5):
        speed.learn(ratio)
    assert 0.8 < speed.mean < 1.3


def test_rest_moves_the_belief_back_to_the_profile() -> None:
    speed = Speed()
    for _ in range(3):
        speed.learn(3.0)
    speed.rested(10.0)
    assert 1.5 < speed.mean < 2.0
    speed.rested(100.0)
    assert speed.mean == pytest.approx(1.0, abs=0.01)
    assert speed.cautious == pytest.approx(1.1, abs=0.02)


def test_caution_is_bounded() -> None:
    speed, random = Speed(), Random(1)
    for _ in range(5000):
        speed.learn(random.choice((0.5, 1.9)))
    assert speed.mean <= speed.cautious <= 1.5 * speed.mean + 1e-9


def test_the_rate_follows_and_decays() -> None:
    rate, random = Rate(0.2), Random(1)
    now = 0.0
    for _ in range(2000):
        now += random.expovariate(1000)
        rate.add(1, now)
    assert rate.at(now) == pytest.approx(1000, rel=0.25)
    assert rate.at(now + 2) < 1
    assert rate.at(now - 1) == rate.at(now)  # a clock that steps back changes nothing


def test_few_are_later_than_is_doubted() -> None:
    doubt, random = Doubt(1.0), Random(1)
    later = 0
    for n in range(6000):
        now = n / 100
        late = random.gauss(0.02, 0.05)
        later += n >= 3000 and late > doubt.at(now)
        doubt.seen(late, now)
    assert 0.02 < later / 3000 < 0.05
    assert 0.08 < doubt.at(60.0) < 0.18


def test_doubt_rises_within_ten_that_are_late_and_is_forgotten_when_nobody_is_seen() -> None:
    doubt = Doubt(1.0)
    for n in range(10):
        doubt.seen(0.5, n / 100)
    grown = doubt.at(0.1)
    assert grown > 0.2
    assert doubt.at(1.0) == grown
    assert doubt.at(4.0) < 0.2 * grown


def test_doubt_is_bounded_both_ways() -> None:
    doubt = Doubt(1.0)
    for n in range(10_000):
        doubt.seen(9.0, n / 1000)
    assert doubt.at(10.0) == pytest.approx(0.4)
    for n in range(10_000):
        doubt.seen(-9.0, 10 + n / 1000)
    assert doubt.at(20.0) == pytest.approx(-0.4)
