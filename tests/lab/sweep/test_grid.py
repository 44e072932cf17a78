from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.lab.sweep.sweep_runs import Point, points, settings_of

NAMES = ["promise 50 ms", "knobs 0 ms", "knobs 5 ms"]
RATES: list[tuple[float, float | None]] = [(10.0, 0.1), (20.0, 0.2), (30.0, None), (40.0, 0.4)]


def test_every_delay_meets_every_largest_batch() -> None:
    both = settings_of("both", 50, (0, 5), (8, 32))
    assert [setting.name for setting in both] == [
        "promise 50 ms",
        "knobs 0 ms, batch 8",
        "knobs 0 ms, batch 32",
        "knobs 5 ms, batch 8",
        "knobs 5 ms, batch 32",
    ]
    assert settings_of("promise", 50, (0, 5), ()) == both[:1]
    assert [setting.name for setting in settings_of("knobs", 50, (0, 5), ())] == ["knobs 0 ms", "knobs 5 ms"]


@given(st.integers(1, 4), st.integers(0, 1000))
def test_every_point_comes_once_in_each_repeat(repeats: int, seed: int) -> None:
    found = list(points(NAMES, RATES, repeats, seed))
    assert Counter(found) == Counter(
        Point(name, rate, repeat, load) for name in NAMES for rate, load in RATES for repeat in range(repeats)
    )
    assert found == list(points(NAMES, RATES, repeats, seed)), "a sweep that goes on has the same order"


@given(st.integers(0, 1000))
def test_settings_take_turns_at_each_rate_and_in_going_first(seed: int) -> None:
    found = list(points(NAMES, RATES, 3, seed))
    blocks = [found[at : at + len(NAMES)] for at in range(0, len(found), len(NAMES))]
    for block in blocks:
        assert {point.setting for point in block} == set(NAMES)
        assert len({(point.rate, point.repeat) for point in block}) == 1
        assert len({point.seed for point in block}) == 1, "the same arrivals for every setting"
    firsts = Counter(block[0].setting for block in blocks)
    assert set(firsts.values()) == {len(blocks) // len(NAMES)}
    assert found[0].seed != found[-1].seed


def test_rates_do_not_rise_in_order() -> None:
    orders = {tuple(point.rate for point in points(["a"], RATES, 1, seed)) for seed in range(20)}
    assert len(orders) > 5
