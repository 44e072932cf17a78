"""The capacity check: the busiest minute against a candidate's curve."""

from __future__ import annotations

from carpool.core.curve import BatchCurve
from carpool.core.objectives import FixedBatching, Promise
from carpool.extensions.rollout.capacity import MINUTES, Carrier, MinuteRates, carries

FAST = Carrier("1", BatchCurve.parse("4+1"), 1, Promise(0.05, 32))
SLOW = Carrier("2", BatchCurve.parse("8+2"), 1, Promise(0.05, 32))


def test_a_candidate_as_fast_carries_it() -> None:
    found = carries(FAST, FAST._replace(version="2"), [100.0, 300.0])
    assert found["enough"]
    assert found["peak_rps"] == 300.0
    assert "which it would sustain too" in found["sentence"]


def test_one_that_is_half_as_fast_does_not() -> None:
    found = carries(FAST, SLOW, [10.0, 600.0, 20.0])
    assert not found["enough"]
    assert found["lost"] > 0.1
    assert "version 2 sustains" in found["sentence"]
    assert "at 100 % it would reject" in found["sentence"]


def test_a_load_that_breaks_both_is_not_the_candidate_s_fault() -> None:
    assert carries(FAST, FAST._replace(version="2"), [5000.0])["enough"]


def test_a_handful_of_requests_in_the_busiest_minute_is_enough_to_compare() -> None:
    for requests in (1, 3, 12):
        found = carries(FAST, SLOW, [requests / 3600.0, 0.0])
        assert found["enough"]
        assert found["lost"] == 0.0


def test_without_arrivals_both_capacities_are_told() -> None:
    found = carries(FAST, SLOW, [])
    assert found["enough"]
    assert found["candidate_rps"] < found["stable_rps"]


def test_one_that_carries_nothing_is_not_enough_even_without_arrivals() -> None:
    never = SLOW._replace(curve=BatchCurve.parse("80+20"))
    found = carries(FAST, never, [])
    assert (found["enough"], found["candidate_rps"]) == (False, 0.0)
    assert carries(never, never, [])["enough"], "stable carries as little"


def test_without_a_promise_there_is_nothing_to_break() -> None:
    fixed = FAST._replace(policy=FixedBatching(8))
    assert carries(fixed, fixed, [100.0])["enough"]


def test_arrivals_are_remembered_by_the_minute() -> None:
    arrivals = MinuteRates(0.0)
    assert not arrivals.due(59.0)
    arrivals.note({"m": 600.0}, 60.0)
    assert not arrivals.due(61.0)
    arrivals.note({"m": 1200.0, "n": 60.0}, 180.0)
    arrivals.note({"m": 0.0}, 240.0)  # counters that began anew
    assert arrivals.rates == {"m": [10.0, 5.0, 0.0], "n": [0.5]}
    for minute in range(2 * MINUTES):
        arrivals.note({"m": 1.0}, 300.0 + 60.0 * minute)
    assert len(arrivals.rates["m"]) == MINUTES
