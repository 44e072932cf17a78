"""Requests that are let in before their inputs are there: pictures, which threads decode meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random
from statistics import mean

import pytest

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.job import GONE, GivenUp, Job, Reason
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Device, percentile, report
from core.decoding import Decoder, DecodingSimulation
from later import later

WIDE = ("120+2", 8, 0.300)  # hardly two batches in a promise: who misses one is lost
NARROW = ("10+7", 16, 0.250)
SHORT = ("4+1", 32, 0.050)
SECONDS = 12.0


def decoding(
    model: tuple[str, int, float], load: float, decoder: Decoder, device: Device | None = None
) -> tuple[DecodingSimulation, float]:
    """A run with so much of what the device and the decoding threads can carry, and that."""
    text, most, slo = model
    curve = BatchCurve.parse(text, most)
    carries = min(slo_capacity(curve, slo), 0.99 * decoder.threads / decoder.seconds)
    core = Scheduler(curve, Promise(slo, most))
    steady = Device(curve, stall_share=0.0)  # one stall in so short a run would be its p99
    simulation = DecodingSimulation(core, device or steady, decoder, slo=slo, seed=1)
    simulation.play(poisson(load * carries, SECONDS, Random(1)))
    return simulation, carries


def lost(simulation: DecodingSimulation) -> float:
    """Of what was decoded, the share that was decoded for nothing."""
    decoded = simulation.decoded
    return sum(job.payload.latency is None for job in decoded) / len(decoded)


@pytest.mark.parametrize("load", [later(1.5), 3.0, later(12.0)])
@pytest.mark.parametrize("seconds", [0.003, 0.020], ids=["quick", "slow"])
@pytest.mark.parametrize("model", [WIDE, NARROW], ids=["wide", "narrow"])
def test_pictures_keep_the_promise_however_many_come(
    model: tuple[str, int, float], seconds: float, load: float
) -> None:
    """Also where decoding carries less than the device. Who is refused is refused before it is decoded."""
    simulation, carries = decoding(model, load, Decoder(seconds))
    found = report(simulation.run, model[2], 1)
    assert found.goodput_rps >= 0.9 * carries
    assert found.p99_ms <= 1.05e3 * model[2]
    assert lost(simulation) <= 0.06
    assert found.shed_at_arrival_fraction > 0.9


@pytest.mark.parametrize("load", [1.5, later(12.0)])
def test_on_cores_that_are_never_quiet_what_is_let_in_is_seldom_for_nothing(load: float) -> None:
    """Decoding and batches slow down together, for a while at a time: no forecast alone is right."""
    found = []
    for seed in range(3):
        random, level, slow = Random(seed), 0.0, []
        for _ in range(200):
            level = 0.6 * level + 0.8 * random.gauss(0.0, 1.0)
            slow.append(exp(0.15 * level))

        def slowdown(at: float, _instance: int = 0, slow: list[float] = slow) -> float:
            return slow[int(at / 0.15)]

        curve = BatchCurve.parse("0.5+18", 8)
        carries = 2 * 8 / curve.times[8]
        core = Scheduler(curve, Promise(0.250, 8), 2)
        device = Device(curve, noise=0.1, slowdown=slowdown)
        decoder = Decoder(0.006, noise=0.3, slowdown=slowdown)
        simulation = DecodingSimulation(core, device, decoder, slo=0.250, seed=seed)
        simulation.play(poisson(load * carries, SECONDS, Random(seed)))
        found.append((report(simulation.run, 0.250, 2).goodput_rps / carries, lost(simulation)))
    assert mean(goodput for goodput, _ in found) >= 0.93
    assert mean(wasted for _, wasted in found) <= 0.05


@pytest.mark.parametrize("load", [3.0, later(12.0)])
def test_what_decoding_cannot_carry_shuts_the_gate_on_nobody_else(load: float) -> None:
    """Before anything is known of decoding, a flood of pictures is let in. The gate must open again."""
    simulation, carries = decoding(SHORT, load, Decoder(0.010))
    assert report(simulation.run, SHORT[2], 1).goodput_rps >= 0.9 * carries


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_a_neighbour_on_the_cores_is_reckoned_with_and_forgotten(load: float) -> None:
    slow: Callable[[float], float] = lambda at: 1.5 if 4.0 <= at < 8.0 else 1.0  # noqa: E731
    curve = BatchCurve.parse("10+7", 16)
    device = Device(curve, slowdown=lambda at, _instance: slow(at))
    simulation, carries = decoding(NARROW, load, Decoder(0.004, slowdown=slow), device)

    def goodput(begin: float, end: float) -> float:
        rides = [ride for ride in simulation.run.rides if begin <= ride.arrival.at < end]
        return sum(1 for ride in rides if (ride.latency or 9.0) <= NARROW[2]) / (end - begin)

    assert goodput(1.0, 4.0) >= 0.9 * carries
    assert goodput(4.5, 8.0) >= 0.9 * carries / 1.5  # two promises after it came
    assert goodput(8.5, 11.5) >= 0.9 * carries
    steady = [ride for ride in simulation.run.rides if 4.5 <= ride.arrival.at < 8.0]
    latencies = sorted(ride.latency for ride in steady if ride.latency is not None)
    assert percentile(latencies, 0.99) <= 1.05 * NARROW[2]


def promised(slo: float = 0.05) -> Scheduler:
    return Scheduler(BatchCurve.parse("4+1"), Promise(slo, 64))


def coming(at: float, ready_at: float, **more: float) -> Job:
    job = Job(at, **more)  # type: ignore[arg-type]
    job.own_course().ready_at = ready_at
    return job


def test_one_that_is_coming_counts_but_does_not_run() -> None:
    core = promised()
    job = coming(0.0, 0.010)
    assert core.offer(job, 0.0, ready=False) is None
    assert (core.lanes.waiting, core.lanes.ready, core.lanes.everybody()) == (1, 0, [job])
    decision = core.decide(0.0)
    assert decision.batch is None
    assert decision.look_again == pytest.approx(0.045)  # after that it could not run any more
    core.ready(job, 0.012)
    batch = core.decide(0.012).batch
    assert batch is not None
    assert batch.jobs == [job]
    assert core.lanes.everybody() == []


def test_an_idle_instance_waits_for_nobody_who_is_coming() -> None:
    core = promised()
    core.offer(coming(0.0, 0.010), 0.0, ready=False)
    there = Job(0.001)
    core.offer(there, 0.001)
    batch = core.decide(0.001).batch
    assert batch is not None
    assert batch.jobs == [there]


def test_one_that_does_not_come_in_time_is_told_while_it_is_still_coming() -> None:
    core = promised()
    job = coming(0.0, 0.010)
    core.offer(job, 0.0, ready=False)
    assert core.decide(0.044).given_up == []
    assert core.decide(0.0451).given_up == [GivenUp(job, Reason.DEADLINE, batch=pytest.approx(0.005))]
    core.ready(job, 0.046)  # too late: nothing comes of it
    assert job.state is GONE
    assert core.decide(0.046).batch is None
    assert core.lanes.requests == core.lanes.waiting == core.lanes.ready == 0


def test_a_newer_frame_takes_the_place_of_one_that_is_coming() -> None:
    core = promised()
    core.offer(Job(-0.01), -0.01)
    first = core.decide(-0.01).batch
    assert first is not None
    core.finished(first, -0.005, 0.005)
    decoded, old, new = (
        coming(at, at + 0.010, source="cam", latest=True) for at in (0.0, 0.003, 0.005)
    )  # the first of them may be decoded by now, and stays
    for job in (decoded, old, new):
        core.offer(job, job.arrived, ready=False)
    assert core.decide(0.005).given_up == [GivenUp(old, Reason.REPLACED)]
    assert core.lanes.everybody() == [decoded, new]
    unfit = coming(0.006, 0.9, source="cam", latest=True)
    assert core.offer(unfit, 0.006, ready=False) is not None  # who is refused replaces nobody
    assert core.lanes.everybody() == [decoded, new]


def test_fixed_run_who_was_coming_in_the_order_of_arrival() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), FixedBatching(4))
    first, second = coming(0.0, 0.010), Job(0.001)
    core.offer(first, 0.0, ready=False)
    core.ready(first, 0.001)
    core.offer(second, 0.001)
    batch = core.decide(0.001).batch
    assert batch is not None
    assert batch.jobs == [first, second]
