"""The real scheduler under a virtual clock: what happens to these arrivals on a device like that?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, exp, inf
from random import Random

from carpool.core.curve import BatchCurve
from carpool.core.front_load import DecodeForecast
from carpool.core.instance import Batch
from carpool.core.job import OFFERED, Job, Reason
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class Device:
    """How long batches really take, which need not be what the scheduler's profile says."""

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
class Ride:
    """What became of one request. A latency of None means that it was not answered."""

    arrival: Arrival
    latency: float | None = None
    refused: bool = False  # at the gate
    given_up: bool = False  # later
    replaced: bool = False  # by a newer frame of its source


@dataclass(slots=True)
class Run:
    """Everything a simulated run produced."""

    rides: list[Ride] = field(default_factory=list)
    batches: list[tuple[Batch, float, int]] = field(default_factory=list)  # batch, end, riders in time
    seconds: float = 0.0


class Simulation:
    """Feeds arrivals to a scheduler and plays the device."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        *,
        slo: float = inf,
        seed: int = 0,
        latest: bool = False,
        outside: float = 0.0,
        decoder: Decoder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.slo = slo
        self.latest = latest  # requests that name a source are frames, of which the newest counts
        self.outside = outside  # seconds that clients wait beside the queue and the batch, and it is known
        self._random = Random(seed)
        self.stage = None if decoder is None else DecodeStage(decoder, self._random)
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
        job = Job(
            arrival.at,
            images=arrival.images,
            source=arrival.source,
            latest=self.latest and bool(arrival.source),
            priority=arrival.priority,
            outside=self.outside,
            payload=ride,
        )
        stage = self.stage
        if stage is not None:
            job.ready_at = arrival.at + stage.forecast.seconds(1.0, arrival.at)
        ride.refused = self.scheduler.offer(job, arrival.at, ready=stage is None) is not None
        if stage is not None and not ride.refused:
            stage.admitted(job, arrival.at)

    def _advance(self, until: float, look_again: float | None) -> float | None:
        """Play whatever the device and the scheduler do before this time."""
        while True:
            ends = min(self._running, key=lambda entry: entry[0], default=(inf, None))
            decoded = inf if self.stage is None else self.stage.next_end
            at = min(ends[0], decoded, inf if look_again is None else look_again)
            if at >= until or at == inf:
                return look_again
            if self.stage is not None and decoded <= at:
                self.scheduler.ready(self.stage.end(at), at)
            if ends[1] is not None and ends[0] <= at:
                self._running.remove(ends)
                self._finish(ends[1], at)
            look_again = self._act(at)

    def _act(self, now: float) -> float | None:
        while True:
            decision = self.scheduler.decide(now)
            for gone in decision.given_up:
                gone.job.payload.given_up = True
                if self.stage is not None:
                    self.stage.given_up(gone.job)
                gone.job.payload.replaced = gone.reason is Reason.REPLACED
            if decision.batch is None:
                return decision.look_again
            batch = decision.batch
            seconds = self.device.seconds(batch.images, batch.instance.index, now, self._random)
            self._running.append((now + seconds, batch))

    def _finish(self, batch: Batch, now: float) -> None:
        released = self.scheduler.finished(batch, now, now - batch.started)
        for job in released:
            job.payload.latency = now - job.arrived + self.outside
        in_time = sum(1 for job in batch.jobs if now + self.outside <= job.arrived + self.slo)
        self.run.batches.append((batch, now, in_time))


@dataclass(frozen=True, slots=True)
class Report:
    """A run in numbers, over requests offered between the warm-up and the tail."""

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
    """Nearest rank; of nothing, 0."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def report(run: Run, slo: float, instances: int, *, warm_up: float | None = None) -> Report:
    """Measure a run, without its start-up (a tenth, at most 2 s) and its tail (one SLO), which are easier."""
    begin = min(2.0, run.seconds / 10) if warm_up is None else warm_up
    end = max(run.seconds - (slo if slo < inf else 0.0), begin)
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


def _staleness(run: Run, begin: float, end: float) -> float:
    """How old the newest answer of a source is on average: what somebody who watches its picture sees."""
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


def _device_use(run: Run, begin: float, end: float, instances: int) -> dict[str, float]:
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


@dataclass(frozen=True, slots=True)
class Decoder:
    """How long pictures really take, in so many threads."""

    seconds: float
    threads: int = 2
    noise: float = 0.2  # sigma of a lognormal factor
    slowdown: Callable[[float], float] | None = None  # time → factor


class DecodeStage:
    """Before a scheduler: decodes who was let in, earliest deadline first, and skips who was given up."""

    def __init__(self, decoder: Decoder, random: Random) -> None:
        self.decoder = decoder
        self.forecast = DecodeForecast(decoder.threads)
        self.decoded: list[Job] = []
        self._random = random
        self._waiting: list[tuple[float, int, Job, float, float]] = []  # … when it joined, what was foreseen
        self._running: list[tuple[float, int, Job, float, float, float]] = []  # when it ends … when it began
        self._sequence = 0

    @property
    def next_end(self) -> float:
        return self._running[0][0] if self._running else inf

    def admitted(self, job: Job, now: float) -> None:
        self._sequence += 1
        self.forecast.joined(1.0)
        foreseen = job.ready_at - now
        heappush(self._waiting, (job.deadline, self._sequence, job, now, foreseen))
        self._start(now)

    def given_up(self, job: Job) -> None:
        """One that waits to be decoded need not be; one that is being decoded goes on, for nothing."""
        if any(entry[2] is job for entry in self._waiting):
            self._waiting = sorted(entry for entry in self._waiting if entry[2] is not job)
            self.forecast.left(1.0)

    def end(self, now: float) -> Job:
        """The picture that is decoded now."""
        _, _, job, joined, foreseen, began = heappop(self._running)
        self.forecast.ended(1.0, now - began)
        self.forecast.came_true(foreseen, now - joined, now)
        self.decoded.append(job)
        self._start(now)
        return job

    def _start(self, now: float) -> None:
        while self._waiting and len(self._running) < self.decoder.threads:
            _, number, job, joined, foreseen = heappop(self._waiting)
            assert job.state is OFFERED
            self.forecast.began(1.0)
            seconds = self.decoder.seconds * exp(self._random.gauss(0.0, self.decoder.noise))
            if self.decoder.slowdown is not None:
                seconds *= self.decoder.slowdown(now)
            heappush(self._running, (now + seconds, number, job, joined, foreseen, now))
