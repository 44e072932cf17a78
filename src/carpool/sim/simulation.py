"""Runs the real scheduler under a virtual clock: this traffic, on such a device, under that rule, in
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil, exp, inf
from random import Random
from statistics import fmean
from typing import Any

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.core.instance import Batch
from carpool.core.job import Job, Reason
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Arrival, Poisson, Ride, Traffic, poisson_between
from carpool.sim.step_simulation import StepPlan, StepRide, StepSimulation, UnderLoad, bound, capacity


@dataclass(frozen=True, slots=True)
class Device:
    """Describes how long batches really take, which need not be what the scheduler's profile says."""

    curve: BatchCurve
    noise: float = 0.05  # sigma of a lognormal factor
    stall_share: float = 0.002  # of batches
    stall_factor: float = 2.0
    slowdown: Callable[[float, int], float] | None = None  # (time, instance) → factor

    def seconds(self, images: int, instance: int, now: float, random: Random) -> float:
        factor = exp(random.gauss(0.0, self.noise)) if self.noise else 1.0
        if self.stall_share and random.random() < self.stall_share:
            factor *= self.stall_factor
        if self.slowdown is not None:
            factor *= self.slowdown(now, instance)
        return self.curve.times[images] * factor


@dataclass(slots=True)
class Run:
    """Holds everything a simulated run produced."""

    rides: list[Ride] = field(default_factory=list)
    batches: list[tuple[Batch, float, int]] = field(default_factory=list)  # batch, end, requests in time
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)  # whose each batch was, in a pipeline


@dataclass
class Simulation:
    """Feeds arrivals to a scheduler and plays the device."""

    scheduler: Scheduler
    device: Device
    slo: float = inf
    seed: int = 0
    latest: bool = False  # requests that name a source are frames, of which the newest counts
    outside: float = 0.0  # seconds that clients wait beside the queue and the batch, and it is known

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._running: list[tuple[float, Batch]] = []
        self.run = Run()

    def play(self, arrivals: Sequence[Arrival]) -> Run:
        look_again: float | None = None
        for arrival in arrivals:
            look_again = self._advance(arrival.at, look_again)
            self._offer(arrival)
            look_again = self._act(arrival.at)
        self.run.seconds = arrivals[-1].at if arrivals else 0.0
        self._advance(inf, look_again)
        return self.run

    def _offer(self, arrival: Arrival) -> None:
        ride = Ride(arrival)
        self.run.rides.append(ride)
        ride.refused = self._refused(self._job(ride, arrival.at), arrival.at)

    def _refused(self, job: Job, now: float) -> bool:
        return self.scheduler.offer(job, now) is not None

    def _job(self, ride: Ride, now: float) -> Job:
        arrival = ride.arrival
        return Job(
            now,
            images=arrival.images,
            source=arrival.source,
            latest=self.latest and bool(arrival.source),
            priority=arrival.priority,
            outside=self.outside,
            payload=ride,
        )

    def _advance(self, until: float, look_again: float | None) -> float | None:
        """Play whatever the device and the scheduler do before this time."""
        while True:
            ends = min(self._running, key=lambda entry: entry[0], default=(inf, None))
            at = min(ends[0], inf if look_again is None else look_again)
            if at >= until or at == inf:
                return look_again
            if ends[1] is not None and ends[0] <= at:
                self._running.remove(ends)
                self._finish(ends[1], at)
            look_again = self._act(at)

    def _act(self, now: float) -> float | None:
        while True:
            decision = self.scheduler.decide(now)
            for gone in decision.given_up:
                gone.job.payload.given_up = True
                gone.job.payload.replaced = gone.reason is Reason.REPLACED
            if decision.batch is None:
                return decision.look_again
            self._run_batch(decision.batch, now)

    def _run_batch(self, batch: Batch, now: float) -> None:
        self._running.append((now + self._seconds(batch, now), batch))

    def _seconds(self, batch: Batch, now: float) -> float:
        return self.device.seconds(batch.images, batch.instance.index, now, self._random)

    def _finish(self, batch: Batch, now: float) -> None:
        released = self.scheduler.finished(batch, now, now - batch.started)
        for job in released:
            job.payload.latency = now - job.arrived + self.outside
        in_time = sum(1 for job in batch.jobs if now + self.outside <= job.arrived + self.slo)
        self.run.batches.append((batch, now, in_time))


@dataclass(frozen=True, slots=True)
class Report:
    """Holds a run in numbers, over requests offered between the warm-up and the tail."""

    offered_rps: float
    goodput_rps: float
    attainment: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float
    wasted_fraction: float
    shed_at_arrival_fraction: float
    busy_fraction: float
    replaced_fraction: float  # of what was offered
    staleness_ms: float  # age of the newest answered frame, over time and sources; 0 without sources


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest rank; of nothing, 0."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def report(run: Run, slo: float, instances: float, *, warm_up: float | None = None) -> Report:
    """Measure a run, without its start-up (a tenth, at most 2 s) and its tail (one SLO), which are easier."""
    begin, end = _window(run, slo, warm_up)
    rides = [ride for ride in run.rides if begin <= ride.arrival.at < end]
    window = max(end - begin, 1e-9)
    offered = sum(ride.arrival.images for ride in rides)
    answered = [ride for ride in rides if ride.latency is not None]
    good = sum(ride.arrival.images for ride in answered if (ride.latency or 0.0) <= slo)
    latencies = sorted(ride.latency * 1e3 for ride in answered if ride.latency is not None)
    shed = sum(1 for ride in rides if ride.latency is None)
    at_arrival = sum(1 for ride in rides if ride.refused)
    return Report(
        offered_rps=offered / window,
        goodput_rps=good / window,
        attainment=good / offered if offered else 1.0,
        p50_ms=percentile(latencies, 0.50),
        p95_ms=percentile(latencies, 0.95),
        p99_ms=percentile(latencies, 0.99),
        **_device_use(run, begin, end, instances),
        shed_at_arrival_fraction=at_arrival / shed if shed else 1.0,
        replaced_fraction=sum(ride.replaced for ride in rides) / len(rides) if rides else 0.0,
        staleness_ms=1e3 * _staleness(run, begin, end),
    )


def _window(run: Run, slo: float, warm_up: float | None = None) -> tuple[float, float]:
    begin = min(2.0, run.seconds / 10) if warm_up is None else warm_up
    return begin, max(run.seconds - (slo if slo < inf else 0.0), begin)


def _staleness(run: Run, begin: float, end: float) -> float:
    """Returns how old the newest answer of a source is on average: what a viewer of its picture sees."""
    answers: dict[str, list[tuple[float, float]]] = {}
    for ride in run.rides:
        if ride.arrival.source:
            seen = answers.setdefault(ride.arrival.source, [])
            if ride.latency is not None:
                seen.append((ride.arrival.at + ride.latency, ride.arrival.at))
    area = 0.0
    for seen in answers.values():
        newest, since = 0.0, begin
        for at, taken in [*sorted(seen), (inf, inf)]:
            until = min(max(at, since), end)
            area += (until - since) * ((until + since) / 2 - newest)
            newest, since = max(newest, taken), until
    return area / max(end - begin, 1e-9) / len(answers) if answers else 0.0


def _device_use(run: Run, begin: float, end: float, instances: float) -> dict[str, float]:
    busy = late = 0.0
    images = count = 0
    for batch, ended, in_time in run.batches:
        if begin <= batch.started < end:
            took = ended - batch.started
            busy += took
            late += took * (1 - in_time / len(batch.jobs))
            images += batch.images
            count += 1
    return {
        "mean_batch": images / count if count else 0.0,
        "wasted_fraction": late / busy if busy else 0.0,
        "busy_fraction": min(1.0, busy / (max(end - begin, 1e-9) * instances)),
    }


LOADS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0)
SWEEP_SECONDS = 20.0  # per point: enough for a curve, and a sweep ends while its user watches

_FIRST = ("offered_rps", "goodput_rps", "attainment", "capacity_rps", "fluid_bound_rps", "fraction_of_bound")
"""Of what is printed."""

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times are in seconds. `profile_error` is how much slower the device is than the curve says."""

    curve: BatchCurve
    slo: float
    settings: Promise | FixedBatching
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
    steps: tuple[StepPlan, ...] = ()  # of a pipeline, in place of the curve, which is then that of the first
    shared: bool = False  # they run on one device
    under_load: UnderLoad | None = None  # the steps are a cascade

    @property
    def capacity(self) -> float:
        """Images per second that the profile can promise: load 1.0."""
        if self.steps:
            return capacity(self.steps, self.slo, self.instances, shared=self.shared)
        return slo_capacity(self.curve, self.slo, self.instances)

    def bound(self, rate: float) -> float:
        """Returns the most that the device can answer in time of what is offered at this rate. A cascade that
        answers with its cheap model under load can do without the other."""
        if self.steps:
            needed = self.steps[:1] if self.under_load == "quick" else self.steps
            steps = [replace(step, curve=self.device_curve(step.curve)) for step in needed]
            return bound(steps, self.slo, rate, self.instances, shared=self.shared)
        return fluid_bound(self.device_curve(), self.slo, rate, self.instances)

    @property
    def devices(self) -> int:
        """Returns the devices that run at the same time."""
        return self.instances * (1 if self.shared else max(1, len(self.steps)))

    def device_curve(self, of: BatchCurve | None = None) -> BatchCurve:
        """Returns what the device really does, which the scheduler has to find out: its own, or a step's."""
        curve = of or self.curve
        points = [(size, seconds * self.profile_error) for size, seconds in curve.points]
        return BatchCurve(points, curve.max_batch, curve.buckets)

    def device(self, curve: BatchCurve) -> Device:
        return Device(self.device_curve(curve), self.noise, self.stall_share, self.stall_factor)

    def at_load(self, load: float) -> Scenario:
        return replace(self, rate=load * self.capacity)


@dataclass(frozen=True, slots=True)
class Outcome(Report):
    """What came out, as the mean over the seeds; the field names are the keys of `--json`."""

    capacity_rps: float
    fluid_bound_rps: float
    fraction_of_bound: float
    worst_seed_attainment: float
    shed_any: bool
    steps: tuple[Mapping[str, float], ...] = ()  # of a pipeline: what the device of each did
    cascade: Mapping[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        steps = [{name: round(value, 6) for name, value in step.items()} for step in values.pop("steps")]
        cascade = {name: round(value, 6) for name, value in (values.pop("cascade") or {}).items()}
        ordered = {name: values[name] for name in _FIRST} | values
        rounded = {name: v if isinstance(v, bool) else round(v, 6) for name, v in ordered.items()}
        return rounded | ({"steps": steps} if steps else {}) | ({"cascade": cascade} if cascade else {})


def play(scenario: Scenario, seed: int | None = None) -> Run:
    """Plays one run, and returns everything that happened in it."""
    seed = scenario.seed if seed is None else seed
    arrivals = list(scenario.traffic.arrivals(scenario.rate, scenario.seconds, Random(seed)))
    if scenario.steps:
        return _play_steps(scenario, arrivals, seed)
    device = scenario.device(scenario.curve)
    scheduler = Scheduler(scenario.curve, scenario.settings, scenario.instances)
    simulation = Simulation(
        scheduler, device, slo=scenario.slo, seed=seed, latest=scenario.latest, outside=scenario.outside
    )
    return simulation.play(arrivals)


def _play_steps(scenario: Scenario, arrivals: Sequence[Arrival], seed: int) -> Run:
    devices = [scenario.device(step.curve) for step in scenario.steps]
    simulation = StepSimulation(
        scenario.steps,
        scenario.settings,
        lambda step, *batch: devices[step].seconds(*batch),
        shared=scenario.shared,
        instances=scenario.instances,
        seed=seed,
        outside=scenario.outside,
        under_load=scenario.under_load,
    )
    played = simulation.play(arrivals)
    in_time = {id(ride) for ride in played.rides if ride.latency is not None and ride.latency <= scenario.slo}
    batches = [
        (batch, ended, sum(id(job.payload) in in_time for job in batch.jobs))
        for batch, ended, _ in played.batches
    ]
    return Run(list(played.rides), batches, played.seconds, [step for _, _, step in played.batches])


def _step_figures(runs: Sequence[Run], scenario: Scenario) -> tuple[dict[str, float], ...]:
    """Returns what each step's device did, over all seeds."""
    found = []
    for number in range(len(scenario.steps)):
        figures = []
        for run in runs:
            own = [batch for batch, step in zip(run.batches, run.steps, strict=True) if step == number]
            figures.append(_device_use(Run(batches=own), *_window(run, scenario.slo), scenario.instances))
        found.append({name: fmean(figure[name] for figure in figures) for name in figures[0]})
    return tuple(found)


def _cascade_figures(runs: Sequence[Run], slo: float) -> dict[str, float]:
    """Returns how many answers in time are the cheap model's for want of time; and how many of the requests
    that were to go to the big model it answered in time."""
    in_time = degraded = hard = by_big = 0
    for run in runs:
        begin, end = _window(run, slo)
        for ride in run.rides:
            assert isinstance(ride, StepRide)
            if begin <= ride.arrival.at < end:
                good = ride.latency is not None and ride.latency <= slo
                in_time += good
                degraded += good and ride.degraded
                hard += ride.images[1]
                by_big += good and bool(ride.images[1]) and not ride.degraded
    return {
        "degraded_fraction": degraded / in_time if in_time else 0.0,
        "hard_by_big_fraction": by_big / hard if hard else 1.0,
    }


def measure(scenario: Scenario, on_step: Step | None = None) -> Outcome:
    """Play every seed and average."""
    reports: list[Report] = []
    runs: list[Run] = []  # of a pipeline
    shed_any = False
    for seed in range(scenario.seed, scenario.seed + scenario.seeds):
        run = play(scenario, seed)
        runs += [run] if scenario.steps else []
        reports.append(report(run, scenario.slo, scenario.devices))
        shed_any = shed_any or any(ride.latency is None for ride in run.rides)
        if on_step is not None:
            on_step()
    mean = {f.name: fmean(getattr(r, f.name) for r in reports) for f in fields(Report)}
    if not mean["offered_rps"]:
        raise InvalidInput(
            "nothing arrived between the warm-up and the tail (one SLO), which do not count: "
            "give more --seconds or a higher rate"
        )
    most = scenario.bound(mean["offered_rps"])
    return Outcome(
        **mean,
        capacity_rps=scenario.capacity,
        fluid_bound_rps=most,
        fraction_of_bound=mean["goodput_rps"] / most if most else 0.0,
        worst_seed_attainment=min(r.attainment for r in reports),
        shed_any=shed_any,
        steps=_step_figures(runs, scenario),
        cascade=None if scenario.under_load is None else _cascade_figures(runs, scenario.slo),
    )


def contenders(scenario: Scenario, fixed: FixedBatching) -> dict[str, Scenario]:
    """Returns the same traffic under a promise, with these settings, without a delay, and one by one."""
    return {
        "promise": replace(scenario, settings=Promise(scenario.slo, fixed.max_batch)),
        "knobs": replace(scenario, settings=fixed),
        "eager": replace(scenario, settings=FixedBatching(fixed.max_batch)),
        "batch-1": replace(scenario, settings=FixedBatching(1)),
    }


def sweep(
    scenario: Scenario, loads: Iterable[float] = LOADS, on_step: Step | None = None
) -> list[tuple[float, Outcome]]:
    """Runs the same scenario over a range of loads, in runs of at most SWEEP_SECONDS."""
    short = replace(scenario, seconds=min(scenario.seconds, SWEEP_SECONDS), seeds=1)
    return [(load, measure(short.at_load(load), on_step)) for load in loads]


_LONGEST = 10.0  # seconds: the scheduler's memory is shorter, so that a longer surge goes on as this one does
_WANTED, _AFFORDED = 10_000, 40_000  # requests inside surges, and in a whole run


@dataclass(frozen=True, slots=True)
class Surge(Traffic):
    """Describes traffic that multiplies its calm rate for a while, again and again, after `calm` seconds
    each."""

    factor: float
    length: float
    calm: float
    name = "surge"

    def windows(self, seconds: float) -> Iterator[tuple[float, float]]:
        start = self.calm
        while start < seconds:
            yield start, start + self.length
            start += self.length + self.calm

    def arrivals(self, rate: float, seconds: float, random: Random) -> Iterator[Arrival]:
        """`rate` is the calm one."""
        edge = 0.0
        for start, end in self.windows(seconds):
            yield from poisson_between(edge, start, rate, random)
            yield from poisson_between(start, end, rate * self.factor, random)
            edge = end
        yield from poisson_between(edge, edge + self.calm, rate, random)


def surge_outcome(scenario: Scenario, surge: Surge) -> tuple[float, float, float]:
    """Returns (attainment, p50 ms, p99 ms) of what arrives during surges: as many as a clear result takes."""
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
