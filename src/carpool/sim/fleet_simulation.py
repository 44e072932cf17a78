"""Simulates several replicas behind a balancer, in virtual time. Every replica is a whole simulation with a
real scheduler; new here are which one gets a request, what a refusal leads to, and which come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from random import Random
from statistics import fmean
from typing import Any, Protocol

from carpool.core.instance import Batch
from carpool.core.job import Reason
from carpool.core.scaling import Autoscaler, ScalingRule
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival, Ride
from carpool.sim.simulation import Report, Run, Scenario, Simulation, report

_HOP_S = 0.0005  # until a request that was refused at a gate is at another replica: as measured
_REPORT_S = 1.0  # between two looks at what replicas say of themselves: a balancer's weights are that old
_SCRAPE_S, _SCRAPES = 5.0, 6  # between two looks at a gauge, and how many of them a query looks back
_TOLERANCE = 0.1  # Kubernetes leaves a fleet alone whose metric is this close to its target
_MORE_AT_ONCE = 4  # and adds at most so many, or as many as there are
_AT_ANOTHER = frozenset({Reason.OVERLOAD, Reason.CANNOT_FINISH, Reason.QUEUE_FULL, Reason.OVER_SHARE})


def most_at_once(there: int) -> int:
    """Returns how many replicas there may be after one look, as Kubernetes has it."""
    return max(2 * there, there + _MORE_AT_ONCE)


class Replica(Simulation):
    """Represents one server. A request that comes from elsewhere begins a new promise here; its client has
    waited since it first came."""

    def __init__(self, one: Scenario, number: int, slower: float, seed: int, began: float) -> None:
        device = one.device(one.curve)
        if slower != 1.0:
            device = replace(device, slowdown=lambda _now, _instance: slower)
        scheduler = Scheduler(one.curve, one.settings, one.instances)
        super().__init__(scheduler, device, slo=one.slo, seed=seed, latest=one.latest, outside=one.outside)
        self.number = number
        self.began, self.ended = began, inf
        self.weight, self.due = 1.0, 0.0  # of a weighted round: when it is its turn again
        self.got = 0
        self.scraped: deque[float] = deque(maxlen=_SCRAPES)  # how full it was
        self._look_again: float | None = None

    @property
    def open_requests(self) -> int:
        return self.scheduler.lanes.requests + self.scheduler.ledger.running

    @property
    def capacity(self) -> float:
        """Returns the images per second that it believes it can answer in time: what it reports."""
        scheduler = self.scheduler
        pace, curve = scheduler.instances.pace, scheduler.curve
        longest = self.slo / 2 * pace / len(scheduler.instances)
        return pace * curve.throughput(curve.efficient[curve.fits(longest)] or 1)

    def reach(self, now: float) -> None:
        """Play what happens before this time."""
        self._look_again = self._advance(now, self._look_again)

    def offer(self, ride: Ride, now: float) -> Reason | None:
        """Returns why it was refused at the gate."""
        self.reach(now)
        self.got += 1
        refusal = self.scheduler.offer(self._job(ride, now), now)
        self._look_again = self._act(now)
        return None if refusal is None else refusal.reason

    def die(self, now: float) -> list[Ride]:
        """Returns who was inside."""
        self.reach(now)
        running = [job.payload for _, batch in self._running for job in batch.jobs]
        waiting = [job.payload for job in self.scheduler.lanes.everybody()]
        self._running.clear()
        self._look_again = None
        self.ended = now
        return [*running, *waiting]

    def _finish(self, batch: Batch, now: float) -> None:
        for job in self.scheduler.finished(batch, now, now - batch.started):
            job.payload.latency = now - job.payload.arrival.at + self.outside
        in_time = sum(
            1 for job in batch.jobs if job.payload.latency is not None and job.payload.latency <= self.slo
        )
        self.run.batches.append((batch, now, in_time))


class Balancer:
    """Chooses among the replicas that serve. What it knows of their load is its own count of requests that
    are open, and for `weighted` what they reported last."""

    def __init__(self, kind: str, random: Random) -> None:
        self._kind = kind
        self._random = random
        self._turn = 0
        self._round = 0.0

    def choose(self, among: list[Replica], now: float) -> Replica:
        if self._kind == "weighted":
            chosen = min(among, key=lambda replica: (replica.due, replica.number))
            self._round = chosen.due
            chosen.due += 1.0 / chosen.weight
            return chosen
        self._turn += 1
        first = self._turn % len(among)
        if self._kind == "rr":
            return among[first]
        if self._kind == "p2c" and len(among) > 2:
            among = self._random.sample(among, 2)
            first = 0
        for replica in among:
            replica.reach(now)
        return min(among[first:] + among[:first], key=lambda replica: replica.open_requests)

    def hear(self, replicas: list[Replica]) -> None:
        """Hears what they say of themselves now. One that is new begins where the round is."""
        for replica in replicas:
            replica.weight = max(replica.capacity, 1e-9)
            replica.due = max(replica.due, self._round)


class Scaler(Protocol):
    """Decides how many replicas there shall be, every period, from each second's arrivals."""

    def asked(self, images: int, now: float) -> None: ...

    def wanted(self, serving: list[Replica], capacity: float, now: float) -> int: ...


class LoadScaler:
    """Scales by what is asked for over what can be answered; a second try counts once."""

    def __init__(self, rule: ScalingRule) -> None:
        self._rule = Autoscaler(rule)

    def asked(self, images: int, now: float) -> None:
        self._rule.asked(images, now)

    def wanted(self, serving: list[Replica], capacity: float, now: float) -> int:  # noqa: ARG002
        return self._rule.wanted(capacity, now)


class SaturationScaler:
    """By how long newcomers wait, as a share of the promise: the most that was seen of each replica lately,
    on average, against a target, as Kubernetes does it. It is here to be compared with: a server that refuses
    early is about half full at any load above 1."""

    def __init__(self, target: float, rule: ScalingRule) -> None:
        self._target, self._rule = target, rule
        self._past: deque[tuple[float, int]] = deque()

    def asked(self, images: int, now: float) -> None:
        pass

    def wanted(self, serving: list[Replica], capacity: float, now: float) -> int:  # noqa: ARG002
        full = [max(one.scraped) for one in serving if one.scraped]
        ratio = fmean(full) / self._target if full else 1.0
        count = len(serving) if abs(ratio - 1.0) <= _TOLERANCE else ceil(len(serving) * ratio)
        count = min(self._rule.most, max(self._rule.least, count))
        self._past.append((now, count))
        while self._past[0][0] < now - self._rule.patience:
            self._past.popleft()
        return max(number for _, number in self._past)


@dataclass(frozen=True, slots=True)
class Autoscale:
    """`by` is load or saturation, and `target` of it; looked at every `period` seconds."""

    by: str
    target: float
    least: int
    most: int
    period: float = 15.0
    patience: float = 300.0

    def scaler(self, cold_start: float) -> Scaler:
        target = self.target if self.by == "load" else 1.0
        rule = ScalingRule(self.least, self.most, target, cold_start=cold_start, patience=self.patience)
        return LoadScaler(rule) if self.by == "load" else SaturationScaler(self.target, rule)


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """`one` is what each replica is, with the traffic of the whole fleet; the rest is about all of them."""

    one: Scenario
    replicas: int
    balancer: str = "rr"
    retries: int = 0  # at another replica, of what was refused at a gate or was inside one that died
    slow: Mapping[int, float] = field(default_factory=dict)  # by number from 1: how much longer batches take
    lose: float | None = None  # when the first replica dies; another is there a cold start later
    cold_start: float = 20.0
    autoscale: Autoscale | None = None

    @property
    def capacity(self) -> float:
        """Images per second that can be promised by those of the beginning: load 1.0."""
        return self.replicas * self.one.capacity


@dataclass(slots=True)
class FleetRun:
    """Holds what happened in all replicas together."""

    run: Run
    tries: int = 0
    failed: int = 0  # inside a replica that died, and not tried again
    replica_seconds: float = 0.0  # from its start: what is paid for
    serving: list[tuple[float, int]] = field(default_factory=list)  # from then on so many
    shares: list[int] = field(default_factory=list)  # requests that each replica got


class FleetSimulation:
    """Simulates a fleet from event to event: arrivals and retries, looks at the replicas, those that come and
    go. Replicas are only played as far as their state is needed."""

    def __init__(self, fleet: FleetScenario, seed: int) -> None:
        self.fleet = fleet
        self._seed = seed
        self._random = Random(seed + 7)
        self._numbers = count(1)
        self._all: list[Replica] = []
        self._serving: list[Replica] = []
        self._starting = 0
        self._balancer = Balancer(fleet.balancer, self._random)
        scale = fleet.autoscale
        self._scaler = None if scale is None else scale.scaler(fleet.cold_start)
        self._asked = 0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self.result = FleetRun(Run())

    def play(self, arrivals: list[Arrival]) -> FleetRun:
        fleet = self.fleet
        end = arrivals[-1].at if arrivals else 0.0
        for _ in range(fleet.replicas):
            self._serve(0.0, self._new(0.0))
        if fleet.balancer == "weighted" or self._scaler is not None:
            self._at(_REPORT_S, self._look)
        if fleet.autoscale is not None:
            self._at(_SCRAPE_S, self._scrape)
            self._at(fleet.autoscale.period, self._scale)
        if fleet.lose is not None:
            self._at(fleet.lose, self._lose)
        for arrival in arrivals:
            self._until(arrival.at)
            ride = Ride(arrival)
            self.result.run.rides.append(ride)
            self._asked += arrival.images
            self._send(ride, arrival.at, 0, None)
        self._until(end + _HOP_S * (fleet.retries + 1))
        return self._finished(end)

    def _finished(self, end: float) -> FleetRun:
        result, run = self.result, self.result.run
        for replica in self._all:
            replica.reach(inf)
            run.batches += replica.run.batches
            result.replica_seconds += max(0.0, min(replica.ended, end) - replica.began)
            result.shares.append(replica.got)
        run.seconds = end
        return result

    # ---- events

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._order), what))

    def _until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            when, _, what = heappop(self._events)
            what(when)

    def _look(self, now: float) -> None:
        for replica in self._serving:
            replica.reach(now)
        self._balancer.hear(self._serving)
        if self._scaler is not None:
            self._scaler.asked(self._asked, now)
            self._asked = 0
        self._at(now + _REPORT_S, self._look)

    def _scrape(self, now: float) -> None:
        for replica in self._serving:
            replica.reach(now)
            replica.scraped.append(replica.scheduler.saturation(now))
        self._at(now + _SCRAPE_S, self._scrape)

    def _scale(self, now: float) -> None:
        scale = self.fleet.autoscale
        assert scale is not None
        assert self._scaler is not None
        serving = self._serving
        capacity = fmean(one.capacity for one in serving) if serving else self.fleet.one.capacity
        there = len(serving) + self._starting
        wanted = self._scaler.wanted(serving, capacity, now)
        wanted = min(wanted, most_at_once(there))
        for _ in range(wanted - there):
            self._start(now)
        while len(self._serving) > max(1, wanted):
            self._serving.pop().ended = now  # it answers what it has
            self._count(now)
        self._at(now + scale.period, self._scale)

    def _start(self, now: float) -> None:
        replica = self._new(now)
        self._starting += 1

        def ready(then: float) -> None:
            self._starting -= 1
            self._serve(then, replica)

        self._at(now + self.fleet.cold_start, ready)

    def _lose(self, now: float) -> None:
        if not self._serving:
            return
        dead = self._serving.pop(0)
        self._count(now)
        for ride in dead.die(now):
            if self.fleet.retries and self._serving:
                self._again(ride, now, 0, dead)
            else:
                ride.given_up = True
                self.result.failed += 1
        self._start(now)

    # ---- replicas and requests

    def _new(self, now: float) -> Replica:
        number = next(self._numbers)
        slower = self.fleet.slow.get(number, 1.0)
        replica = Replica(self.fleet.one, number, slower, self._seed * 1009 + number, now)
        self._all.append(replica)
        return replica

    def _serve(self, now: float, replica: Replica) -> None:
        self._serving.append(replica)
        if self.fleet.balancer == "weighted":
            self._balancer.hear([replica])
        self._count(now)

    def _count(self, now: float) -> None:
        self.result.serving.append((now, len(self._serving)))

    def _again(self, ride: Ride, now: float, tried: int, last: Replica) -> None:
        self._at(now + _HOP_S, lambda then: self._send(ride, then, tried + 1, last))

    def _send(self, ride: Ride, now: float, tried: int, last: Replica | None) -> None:
        among = [one for one in self._serving if one is not last] or self._serving
        if not among:
            ride.refused = True
            return
        self.result.tries += 1
        replica = self._balancer.choose(among, now)
        reason = replica.offer(ride, now)
        if reason in _AT_ANOTHER and tried < self.fleet.retries and len(self._serving) > 1:
            self._again(ride, now, tried, replica)
        else:
            ride.refused = reason is not None


def play_fleet(fleet: FleetScenario, seed: int | None = None) -> FleetRun:
    """Plays one run, and returns everything that happened in it."""
    one = fleet.one
    seed = one.seed if seed is None else seed
    return FleetSimulation(fleet, seed).play(list(one.traffic.arrivals(one.rate, one.seconds, Random(seed))))


@dataclass(frozen=True, slots=True)
class FleetOutcome(Report):
    """What came out, as the mean over the seeds; the field names are the keys of `--json`."""

    capacity_rps: float  # of all that are there at the beginning
    hops: float  # replicas that a request was sent to
    failed: float  # requests that were inside a replica when it died, and were not answered
    most_replicas: int
    replica_seconds: float
    worst_seed_attainment: float

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def measure_fleet(fleet: FleetScenario, on_step: Callable[[], None] | None = None) -> FleetOutcome:
    """Play every seed and average."""
    one = fleet.one
    reports: list[Report] = []
    runs: list[FleetRun] = []
    hops: list[float] = []
    for seed in range(one.seed, one.seed + one.seeds):
        run = play_fleet(fleet, seed)
        mean = run.replica_seconds / max(run.run.seconds, 1e-9)
        reports.append(report(run.run, one.slo, mean * one.instances))
        hops.append(run.tries / max(1, len(run.run.rides)))
        run.run = Run()
        runs.append(run)
        if on_step is not None:
            on_step()
    return FleetOutcome(
        **{f.name: fmean(getattr(one_report, f.name) for one_report in reports) for f in fields(Report)},
        capacity_rps=fleet.capacity,
        hops=fmean(hops),
        failed=fmean(run.failed for run in runs),
        most_replicas=max(most for run in runs for _, most in run.serving),
        replica_seconds=fmean(run.replica_seconds for run in runs),
        worst_seed_attainment=min(one_report.attainment for one_report in reports),
    )
