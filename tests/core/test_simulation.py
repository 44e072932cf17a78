from __future__ import annotations

from random import Random

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival, Cameras, poisson
from carpool.sim.simulation import Device, Simulation, percentile, report

CURVE = BatchCurve.parse("4+1", 8)
EXACT = Device(CURVE, noise=0.0, stall_share=0.0)


def simulation(
    policy: Promise | FixedBatching, slo: float, instances: int = 1, device: Device = EXACT
) -> Simulation:
    return Simulation(Scheduler(CURVE, policy, instances), device, slo=slo)


def test_two_requests_by_hand() -> None:
    run = simulation(Promise(0.05, 8), 0.05).play([Arrival(0.0), Arrival(0.001), Arrival(0.002)])
    assert [ride.latency for ride in run.rides] == [
        pytest.approx(0.005),  # alone, at once
        pytest.approx(0.010),  # waits 4 ms, then rides with the third: 6 ms
        pytest.approx(0.009),
    ]
    assert [batch.images for batch, _, _ in run.batches] == [1, 2]


def test_what_is_late_is_counted_as_wasted() -> None:
    run = simulation(FixedBatching(8), 0.0099).play(
        [Arrival(0.0), Arrival(0.001), Arrival(0.002), Arrival(1.0)]
    )
    result = report(run, 0.0099, 1, warm_up=0.0)
    assert result.wasted_fraction == pytest.approx((6 * 0.5) / 11)


def test_a_delay_is_waited_out_in_virtual_time() -> None:
    run = simulation(FixedBatching(8, max_delay=0.020), 1.0).play([Arrival(0.0), Arrival(0.005)])
    assert [ride.latency for ride in run.rides] == [pytest.approx(0.026), pytest.approx(0.021)]


def test_nothing_arrives() -> None:
    result = report(simulation(Promise(0.05, 8), 0.05).play([]), 0.05, 1)
    assert (result.offered_rps, result.attainment, result.p99_ms) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize(("text", "slo", "most"), [("16+4", 0.2, 16), ("4+1", 0.05, 8), ("1+0.2", 0.01, 16)])
def test_a_gate_that_has_just_begun_goes_by_the_profile(
    text: str, slo: float, most: int, load: float
) -> None:
    """After an engine's restart: who waited for it comes at once, and the others as before."""
    curve = BatchCurve.parse(text, most)
    for seed in range(5):
        arrivals = [Arrival(0.0)] * most + poisson(load * curve.throughput(most), 10 * slo, Random(seed))
        core = Scheduler(curve, Promise(slo, most))
        run = Simulation(core, Device(curve), slo=slo, seed=seed).play(arrivals)
        assert all(ride.latency is not None for ride in run.rides)


def test_the_same_seed_gives_the_same_run() -> None:
    arrivals = poisson(900, 3, Random(1))
    noisy = Device(CURVE)
    runs = [
        report(
            Simulation(Scheduler(CURVE, Promise(0.05, 8)), noisy, slo=0.05, seed=s).play(arrivals), 0.05, 1
        )
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_noise_and_stalls_and_slowdowns_change_the_time() -> None:
    random = Random(1)
    assert EXACT.seconds(8, 0, 0.0, random) == CURVE.times[8]
    assert Device(CURVE, noise=0.0, stall_share=1.0).seconds(8, 0, 0.0, random) == 2 * CURVE.times[8]
    slow = Device(CURVE, noise=0.0, stall_share=0.0, slowdown=lambda now, instance: now + instance)
    assert slow.seconds(8, 2, 1.0, random) == 3 * CURVE.times[8]


def test_percentiles_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([], 0.5) == 0.0


def test_cameras_that_send_faster_than_they_are_served_see_fresher_answers_with_latest() -> None:
    curve = BatchCurve.parse("20+10", 64)
    arrivals = Cameras(8, 30.0, per_source=True).arrivals(240.0, 8.0, Random(1))
    reports = {}
    for latest in (False, True):
        scheduler = Scheduler(curve, Promise(0.2, 64))
        run = Simulation(scheduler, Device(curve), slo=0.2, latest=latest).play(arrivals)
        reports[latest] = report(run, 0.2, 1)
        assert all(
            (ride.latency is not None) + ride.refused + ride.given_up == 1 for ride in run.rides
        )  # everybody ends once
    assert reports[False].replaced_fraction == 0
    assert reports[True].replaced_fraction > 0.5
    assert reports[True].staleness_ms < 0.9 * reports[False].staleness_ms
    assert reports[True].p99_ms < reports[False].p99_ms
