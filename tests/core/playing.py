"""Helpers of the scheduler's tests: named curves, streams of arrivals, one-line runs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival, Ride, poisson
from carpool.sim.simulation import Device, Report, Run, Simulation, report

RESNET = "1:6.2,4:9.1,16:21,64:74"
YOLO = "1:8,8:12,32:22,64:35,128:60"
NAMED = {
    "4+1/50": ("4+1", 0.050, 64),
    "resnet/30": (RESNET, 0.030, 64),
    "resnet/100": (RESNET, 0.100, 64),
    "yolo/100": (YOLO, 0.100, 128),
}


def named(name: str) -> tuple[BatchCurve, float]:
    text, slo, max_batch = NAMED[name]
    return BatchCurve.parse(text, max_batch), slo


def play(
    curve: BatchCurve,
    slo: float,
    arrivals: list[Arrival],
    *,
    instances: int = 1,
    seed: int = 0,
    device: Device | None = None,
) -> tuple[Run, Report]:
    scheduler = Scheduler(curve, Promise(slo, curve.max_batch), instances)
    run = Simulation(scheduler, device or Device(curve), slo=slo, seed=seed).play(arrivals)
    return run, report(run, slo, instances)


def play_poisson(
    curve: BatchCurve, slo: float, load: float, *, seconds: float = 60.0, seed: int = 0, instances: int = 1
) -> Report:
    rate = load * slo_capacity(curve, slo, instances)
    arrivals = poisson(rate, seconds, Random(seed))
    return play(curve, slo, arrivals, instances=instances, seed=seed)[1]


def stream(
    rate: float, seconds: float, random: Random, *, source: str = "", priority: int = 0, names: int = 1
) -> list[Arrival]:
    """Poisson from one source, or from one that hides behind many names."""

    def name() -> str:
        return source if names == 1 else f"{source}-{random.randrange(names)}"

    return [Arrival(a.at, 1, name(), priority) for a in poisson(rate, seconds, random)]


def together(*streams: list[Arrival]) -> list[Arrival]:
    return sorted((arrival for one in streams for arrival in one), key=lambda arrival: arrival.at)


def attainment(run: Run, slo: float, begin: float, end: float, whose: Callable[[Arrival], bool]) -> float:
    rides = [r for r in run.rides if begin <= r.arrival.at < end and whose(r.arrival)]
    return sum(in_time(ride, slo) for ride in rides) / len(rides)


def in_time(ride: Ride, slo: float) -> bool:
    return ride.latency is not None and ride.latency <= slo
