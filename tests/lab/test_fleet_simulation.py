"""Replicas behind a balancer in virtual time, against what was measured with real balancers and servers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.sim.arrivals import Poisson
from carpool.sim.fleet_simulation import (
    Autoscale,
    FleetOutcome,
    FleetRun,
    FleetScenario,
    measure_fleet,
    play_fleet,
)
from carpool.sim.simulation import Scenario, Surge

MEASURED = BatchCurve.parse(
    "16+4"
)  # three real servers of this curve, promise 200 ms, stood behind each balancer
QUICK = BatchCurve.parse("4+1")


def attainment_between(run: FleetRun, slo: float, start: float, end: float) -> float:
    """Of what came in this time: answered within the SLO."""
    rides = [ride for ride in run.run.rides if start <= ride.arrival.at < end]
    return sum(1 for ride in rides if ride.latency is not None and ride.latency <= slo) / max(1, len(rides))


def fleet(curve: BatchCurve, slo: float, load: float, replicas: int, **more: Any) -> FleetScenario:
    one = Scenario(curve, slo, Promise(slo, curve.max_batch), rate=1.0, seconds=more.pop("seconds", 8.0))
    one = replace(one, rate=load * replicas * one.capacity, profile_error=more.pop("profile_error", 1.0))
    return FleetScenario(one, replicas, **more)


@cache
def as_measured(load: float, replicas: int, balancer: str, retries: int) -> FleetOutcome:
    """Real batches take a hundredth longer than the curve says, to be handed over: one server alone, at one
    and a half times its load, answered 211/s. Two runs on a loaded machine are not among the cases, since
    they are further off: Envoy with a retry, 628/s and 563/s, by 3 % and more and HAProxy's random of
    two, 602/s, by about 3 %. On quiet cores both are as the others, below."""
    return measure_fleet(
        fleet(
            MEASURED, 0.2, load, replicas, balancer=balancer, retries=retries, profile_error=1.01, seconds=10
        )
    )


@pytest.mark.parametrize(
    ("replicas", "balancer", "retries", "goodput"),
    [
        (1, "rr", 0, 211),  # no balancer
        (3, "rr", 0, 632),  # HAProxy
        (3, "rr", 0, 624),  # Envoy
        (3, "rr", 1, 639),  # HAProxy
        (3, "rr", 1, 635),  # nginx
        (3, "least", 0, 603),  # HAProxy
        (3, "least", 1, 604),  # HAProxy
    ],
)
def test_overload_is_as_it_was_measured(replicas: int, balancer: str, retries: int, goodput: float) -> None:
    found = as_measured(1.5, replicas, balancer, retries)
    assert found.goodput_rps == pytest.approx(goodput, rel=0.03)
    assert found.p99_ms < 200


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("balancer", "retries", "measured"),
    [
        ("rr", 1, 1.037),  # HAProxy
        ("rr", 1, 1.038),  # Envoy
        ("rr", 1, 1.036),  # nginx
        ("rr", 0, 1.007),  # HAProxy, these three
        ("least", 0, 0.983),
        ("p2c", 0, 0.983),
    ],
)
def test_three_over_three_of_one_are_as_measured_on_quiet_cores(
    balancer: str, retries: int, measured: float
) -> None:
    """`benchmarks/fleet.py --only goodput,ways`: one alone and each balancer in turn, on the same machine."""
    slow = BatchCurve.parse("40+8")
    one = measure_fleet(fleet(slow, 0.4, 1.5, 1, seconds=12.0))
    three = measure_fleet(fleet(slow, 0.4, 1.5, 3, balancer=balancer, retries=retries, seconds=12.0))
    assert three.goodput_rps / (3 * one.goodput_rps) == pytest.approx(measured, rel=0.03)


@pytest.mark.conformance
@pytest.mark.parametrize(("balancer", "in_time"), [("rr", 1.0), ("least", 0.999), ("p2c", 0.996)])
def test_below_capacity_all_balancers_are_alike(balancer: str, in_time: float) -> None:
    assert as_measured(0.9, 3, balancer, 0).attainment == pytest.approx(in_time, abs=0.03)
    assert as_measured(0.9, 3, balancer, 0).attainment > 0.99


def test_fewest_open_requests_starves_batches() -> None:
    """A replica that refuses looks idle."""
    turns, least = (
        measure_fleet(fleet(QUICK, 0.05, 1.5, 8, balancer=kind, seconds=1.0)) for kind in ("rr", "least")
    )
    assert least.goodput_rps < 0.96 * turns.goodput_rps
    assert least.mean_batch < 0.75 * turns.mean_batch


@pytest.mark.conformance
def test_one_slow_replica_is_made_up_for_by_retries_or_weights() -> None:
    def in_time(balancer: str, retries: int) -> float:
        slow = fleet(QUICK, 0.05, 0.7, 4, balancer=balancer, retries=retries, slow={1: 2.0}, seconds=3.0)
        return measure_fleet(replace(slow, one=replace(slow.one, rate=slow.one.rate * 3.5 / 4))).attainment

    assert in_time("rr", 0) == pytest.approx(0.927, abs=0.03)
    assert in_time("rr", 1) == pytest.approx(0.985, abs=0.02)
    assert in_time("weighted", 0) > 0.97  # weights come with the first report, a second later


def test_weights_share_by_what_replicas_can_answer() -> None:
    slow = fleet(QUICK, 0.05, 0.6, 2, balancer="weighted", slow={1: 2.0}, seconds=10.0)
    got = play_fleet(slow).shares
    assert 0.35 < got[0] / got[1] < 0.65


def test_a_replica_that_dies_takes_its_requests_along_unless_they_are_tried_again() -> None:
    dying = fleet(QUICK, 0.05, 0.5, 3, lose=1.0, cold_start=0.5, seconds=2.0)
    alone, again = play_fleet(dying), play_fleet(replace(dying, retries=1))
    assert alone.failed > 0
    assert again.failed == 0
    assert [count for _, count in again.serving] == [1, 2, 3, 2, 3]
    answered = sum(ride.latency is not None for ride in again.run.rides)
    assert answered == len(again.run.rides)


def test_everybody_is_answered_refused_or_given_up() -> None:
    run = play_fleet(fleet(QUICK, 0.05, 2.0, 3, retries=1, lose=1.0, seconds=2.0))
    assert all((r.latency is not None) != (r.refused or r.given_up) for r in run.run.rides)
    assert sum(run.shares) == run.tries


def test_the_same_seed_gives_the_same_fleet() -> None:
    asked = fleet(QUICK, 0.05, 1.2, 3, balancer="p2c", retries=1, seconds=1.0)
    assert measure_fleet(asked) == measure_fleet(asked)


def surged(by: str, target: float, *, length: float, slower: float) -> tuple[float, float]:
    """80 → 300 images/s where one replica answers 52/s, or all of that `slower`: in time during the surge,
    and in its last minute."""
    curve, slo = BatchCurve.parse(f"{16 * slower}+{16 * slower}"), 0.2 * slower
    calm, rate = 40.0, 80.0 / slower
    one = Scenario(curve, slo, Promise(slo, 64), rate, traffic=Surge(300 / 80, length, calm), seconds=length)
    run = play_fleet(FleetScenario(one, 2, retries=1, autoscale=Autoscale(by, target, 2, 12)))
    end = calm + length
    return attainment_between(run, slo, calm, end), attainment_between(run, slo, end - 60.0, end)


@pytest.mark.conformance
def test_load_scales_where_saturation_does_not() -> None:
    by_load, afterwards = surged("load", 0.75, length=120.0, slower=8)
    by_saturation, still = surged("saturation", 0.6, length=120.0, slower=8)
    assert afterwards > 0.99
    assert still < 0.9
    assert by_load > by_saturation + 0.1


@pytest.mark.conformance
def test_a_surge_of_five_minutes() -> None:
    """The bar: at least 92 % in time, where a target for the saturation gives about 77."""
    assert surged("load", 0.75, length=300.0, slower=1)[0] >= 0.92
    assert surged("saturation", 0.6, length=300.0, slower=1)[0] == pytest.approx(0.77, abs=0.06)


def test_fewer_are_kept_when_the_surge_is_over() -> None:
    one = Scenario(QUICK, 0.05, Promise(0.05, 64), 60.0, traffic=Poisson(), seconds=60.0)
    scale = Autoscale("load", 0.75, 1, 8, patience=20.0)
    run = play_fleet(FleetScenario(one, 4, autoscale=scale))
    assert run.serving[-1][1] == 1
    assert run.replica_seconds < 4 * 60
