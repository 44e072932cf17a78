"""A question to the simulator, and its answer in numbers: this traffic, on such a device, under that rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from random import Random
from statistics import fmean

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.core.policy import Knobs, Promise
from carpool.core.scheduler import Scheduler
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Arrival, Poisson, Traffic, poisson
from carpool.sim.simulation import Device, Report, Run, Simulation, percentile, report

LOADS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0)
SWEEP_SECONDS = 20.0  # per point: enough for a curve, and a sweep ends while somebody watches

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times are in seconds. `profile_error` is how much slower the device is than the curve says."""

    curve: BatchCurve
    slo: float
    settings: Promise | Knobs
    rate: float
    traffic: Traffic = field(default_factory=Poisson)
    instances: int = 1
    seconds: float = 60.0
    seed: int = 1
    seeds: int = 1
    noise: float = 0.05
    stall_share: float = 0.002
    stall_factor: float = 2.0
    profile_error: float = 1.0
    outside: float = 0.0  # what clients wait beside the queue and the batch
    latest: bool = False  # a newer frame of a source takes the place of a waiting one

    @property
    def capacity(self) -> float:
        """Images per second that the profile can promise: load 1.0."""
        return slo_capacity(self.curve, self.slo, self.instances)

    def device_curve(self) -> BatchCurve:
        """What the device really does, which the scheduler has to find out."""
        points = [(size, seconds * self.profile_error) for size, seconds in self.curve.points]
        return BatchCurve(points, self.curve.max_batch, self.curve.buckets)

    def at_load(self, load: float) -> Scenario:
        return replace(self, rate=load * self.capacity)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out, as the mean over the seeds; the field names are the keys of `--json`."""

    offered_rps: float
    goodput_rps: float
    attainment: float
    capacity_rps: float
    fluid_bound_rps: float
    fraction_of_bound: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float
    wasted_fraction: float
    shed_at_arrival_fraction: float
    busy_fraction: float
    replaced_fraction: float
    staleness_ms: float
    worst_seed_attainment: float
    shed_any: bool

    def as_json(self) -> dict[str, float | bool]:
        values = asdict(self).items()
        return {key: value if isinstance(value, bool) else round(value, 6) for key, value in values}


def play(scenario: Scenario, seed: int | None = None) -> Run:
    """One run with everything that happened in it."""
    seed = scenario.seed if seed is None else seed
    arrivals = scenario.traffic.arrivals(scenario.rate, scenario.seconds, Random(seed))
    device = Device(scenario.device_curve(), scenario.noise, scenario.stall_share, scenario.stall_factor)
    scheduler = Scheduler(scenario.curve, scenario.settings, scenario.instances)
    simulation = Simulation(
        scheduler, device, slo=scenario.slo, seed=seed, latest=scenario.latest, outside=scenario.outside
    )
    return simulation.play(arrivals)


def measure(scenario: Scenario, on_step: Step | None = None) -> Outcome:
    """Play every seed and average."""
    reports: list[Report] = []
    shed_any = False
    for seed in range(scenario.seed, scenario.seed + scenario.seeds):
        run = play(scenario, seed)
        reports.append(report(run, scenario.slo, scenario.instances))
        shed_any = shed_any or any(ride.latency is None for ride in run.rides)
        if on_step is not None:
            on_step()
    mean = {f.name: fmean(getattr(r, f.name) for r in reports) for f in fields(Report)}
    if not mean["offered_rps"]:
        raise InvalidInput(
            "nothing arrived between the warm-up and the tail (one SLO), which do not count: "
            "give more --seconds or a higher rate"
        )
    bound = fluid_bound(scenario.device_curve(), scenario.slo, mean["offered_rps"], scenario.instances)
    return Outcome(
        **mean,
        capacity_rps=scenario.capacity,
        fluid_bound_rps=bound,
        fraction_of_bound=mean["goodput_rps"] / bound if bound else 0.0,
        worst_seed_attainment=min(r.attainment for r in reports),
        shed_any=shed_any,
    )


def contenders(scenario: Scenario, knobs: Knobs) -> dict[str, Scenario]:
    """The same traffic under a promise, under these knobs, with no delay at all, and one by one."""
    return {
        "promise": replace(scenario, settings=Promise(scenario.slo, knobs.max_batch)),
        "knobs": replace(scenario, settings=knobs),
        "eager": replace(scenario, settings=Knobs(knobs.max_batch)),
        "batch-1": replace(scenario, settings=Knobs(1)),
    }


def sweep(
    scenario: Scenario, loads: Iterable[float] = LOADS, on_step: Step | None = None
) -> list[tuple[float, Outcome]]:
    """The same scenario over a range of loads, in runs of at most SWEEP_SECONDS."""
    short = replace(scenario, seconds=min(scenario.seconds, SWEEP_SECONDS), seeds=1)
    return [(load, measure(short.at_load(load), on_step)) for load in loads]


_LONGEST = 10.0  # seconds: the scheduler's memory is shorter, so that a longer surge goes on as this one does
_WANTED, _AFFORDED = 10_000, 40_000  # requests inside surges, and in a whole run


@dataclass(frozen=True, slots=True)
class Surge:
    """Traffic that multiplies its calm rate for a while, again and again, after `calm` seconds each."""

    factor: float
    length: float
    calm: float
    name: str = "surge"
    own_rate: float | None = None
    even: bool = False

    def windows(self, seconds: float) -> Iterator[tuple[float, float]]:
        start = self.calm
        while start < seconds:
            yield start, start + self.length
            start += self.length + self.calm

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        """`rate` is the calm one."""
        found: list[Arrival] = []
        edge = 0.0
        for start, end in self.windows(seconds):
            found += _moved(poisson(rate, start - edge, random), edge)
            found += _moved(poisson(rate * self.factor, end - start, random), start)
            edge = end
        return found + _moved(poisson(rate, self.calm, random), edge)


def surge_outcome(scenario: Scenario, surge: Surge) -> tuple[float, float, float]:
    """(attainment, p50 ms, p99 ms) of what arrives during surges, over as many as it takes to tell."""
    surge = replace(surge, length=min(surge.length, _LONGEST))
    inside = scenario.rate * surge.factor * surge.length
    around = scenario.rate * surge.calm
    times = min(ceil(_WANTED / inside), max(1, int(_AFFORDED / (inside + around))))
    seconds = times * (surge.length + surge.calm)
    run = play(replace(scenario, traffic=surge, seconds=seconds))
    windows = list(surge.windows(seconds))
    rides = [r for r in run.rides if any(start <= r.arrival.at < end for start, end in windows)]
    latencies = sorted(r.latency for r in rides if r.latency is not None)
    in_time = sum(1 for latency in latencies if latency <= scenario.slo)
    attainment = in_time / len(rides) if rides else 1.0
    return attainment, percentile(latencies, 0.5) * 1e3, percentile(latencies, 0.99) * 1e3


def _moved(arrivals: list[Arrival], by: float) -> list[Arrival]:
    return [Arrival(arrival.at + by, arrival.images) for arrival in arrivals]
