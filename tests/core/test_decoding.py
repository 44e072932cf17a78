"""When a picture that comes now will be decoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.decode_forecast import DecodeForecast


def decode(forecast: DecodeForecast, seconds: float, weight: float = 1.0, times: int = 1) -> None:
    for _ in range(times):
        forecast.began(weight)
        forecast.ended(weight, seconds)


def test_nothing_is_foreseen_before_anything_was_decoded() -> None:
    forecast = DecodeForecast(2)
    assert forecast.seconds(1.0, 1.0, 0.0) == 0.0


def test_who_finds_a_thread_free_waits_for_itself_and_others_for_those_ahead() -> None:
    forecast = DecodeForecast(2)
    decode(forecast, 0.010)
    assert forecast.seconds(1.0, 0.0, 0.0) == pytest.approx(0.010)
    assert forecast.seconds(3.0, 0.0, 0.0) == pytest.approx(0.030)
    forecast.began(1.0)
    assert forecast.seconds(1.0, 0.0, 0.0) == pytest.approx(0.010)  # the other thread is free
    forecast.began(1.0)
    assert forecast.seconds(1.0, 4.0, 0.0) == pytest.approx(
        0.035
    )  # four, half of two, by two threads; itself
    assert forecast.seconds(1.0, 3.0, 0.0) == pytest.approx(0.030)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(11.0, 1e4), st.floats(0.0, 100.0)), max_size=20),
    st.integers(0, 4),
)
def test_long_pictures_are_no_reason_for_short_ones_to_wait(
    threads: int, took: list[tuple[float, float]], busy: int
) -> None:
    """Whatever long ones take, and however late they are: of a source that sends short ones, each finds a
    thread."""
    forecast = DecodeForecast(threads, 10.0)
    decode(forecast, 0.004)
    for weight, seconds in took:
        decode(forecast, seconds, weight)
        forecast.came_true(weight, 0.0, seconds, 1.0)
    for _ in range(min(busy, max(1, threads - 1))):
        forecast.began(1000.0)
    assert forecast.seconds(1.0, 0.0, 1.0) == pytest.approx(0.004)
    assert forecast.seconds(1.0, 2.0, 1.0) <= 0.0121


def test_a_neighbour_is_noticed_within_ten_pictures_both_ways() -> None:
    forecast = DecodeForecast(1)
    decode(forecast, 0.003, times=20)
    decode(forecast, 0.006, times=10)
    assert forecast.seconds(1.0, 0.0, 0.0) == pytest.approx(0.006, rel=0.15)
    decode(forecast, 0.003, times=10)
    assert forecast.seconds(1.0, 0.0, 0.0) == pytest.approx(0.003, rel=0.25)


def test_one_picture_that_takes_for_ever_does_not_speak_for_the_others() -> None:
    forecast = DecodeForecast(1)
    decode(forecast, 0.003, times=20)
    decode(forecast, 3.0)
    assert forecast.seconds(1.0, 0.0, 0.0) < 0.006
    decode(forecast, 3.0, times=20)  # if they all do, it does
    assert forecast.seconds(1.0, 0.0, 0.0) > 0.1


def test_what_came_later_than_foreseen_is_reckoned_with_for_a_while() -> None:
    forecast = DecodeForecast(1)
    decode(forecast, 0.003)
    for n in range(20):
        forecast.came_true(1.0, 0.003, 0.023, 1.0 + n / 100)
    assert 0.015 < forecast.seconds(1.0, 0.0, 1.2) < 0.024
    assert forecast.seconds(1.0, 0.0, 3.0) < 0.004
    forecast.came_true(1.0, 0.003, 0.001, 3.0)  # earlier is no reason to wait less
    assert forecast.seconds(1.0, 0.0, 3.0) >= 0.003
