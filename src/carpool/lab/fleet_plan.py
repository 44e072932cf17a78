"""Plans how many replicas this traffic and that promise need. Closed forms guess; the simulator decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from random import Random

from carpool.core.curve import BatchCurve, expected_p99, promised_batch
from carpool.core.numerals import numeral as _n
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scaling import ScalingRule
from carpool.lab.fleet_day import DayReport, fluid_day, largest_step, rates_of
from carpool.lab.machine_share import UNSHARED, Machine, replica_memory_mb
from carpool.sim.arrivals import Poisson, Recording, Traffic
from carpool.sim.fleet_simulation import FleetScenario, measure_fleet
from carpool.sim.simulation import Scenario, Surge, measure, surge_outcome
from carpool.sim.step_simulation import StepPlan, alone_through, capacity

ENOUGH = 0.99  # of what is offered must be answered in time: the promise is a p99


@dataclass(frozen=True, slots=True)
class FleetQuestion:
    """Times in seconds; `surge` multiplies the rate for `surge_seconds` now and then. The curve is that of a
    model that has the machine for itself; `machine` is what one replica shares with decoding and protocol."""

    curve: BatchCurve
    slo: float
    rate: float
    surge: float = 1.0
    surge_seconds: float = 60.0
    price_per_hour: float | None = None
    redundancy: int = 0
    noise: float = 0.05
    seed: int = 1
    machine: Machine = UNSHARED
    steps: tuple[StepPlan, ...] = ()  # of a pipeline, each with a device of its own in every replica,
    shared: bool = False  # unless they share one
    traffic: Traffic = field(default_factory=Poisson)
    scaling: ScalingRule | None = None  # replicas come and go, and
    hpa_period: float = 15.0  # so often is it decided how many
    model_mb: float = 0.0  # memory of the model, weights and batches; 0: not known

    @property
    def capacity(self) -> float:
        """Returns the images per second that one replica can promise."""
        if self.steps:
            return capacity(self.steps, self.slo, self.machine.instances, shared=self.shared)
        return self.machine.capacity(self.curve, self.slo)

    @property
    def peak(self) -> float:
        """The rate to have capacity for: a surge shorter than the promise is over before it is late."""
        return self.rate * self.surge if self.surge_seconds > self.slo else self.rate


@dataclass(frozen=True, slots=True)
class Check:
    """Describes one simulated run of a plan."""

    what: str
    replicas: int
    rate_rps: float
    attainment: float
    p50_ms: float
    p99_ms: float

    def holds(self, slo: float) -> bool:
        return self.attainment >= ENOUGH and self.p99_ms <= slo * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The answer; the field names are the keys of `--json`. `replicas` is None if no number is enough."""

    replicas: int | None = None
    max_batch: int | None = None
    promised_batch: int | None = None
    max_delay_ms: float | None = None
    delay_helps: bool | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    capacity_rps: float  # of one replica
    headroom: float | None = None
    cost_per_1000: float | None = None
    memory_mb: float | None = None  # of one replica, where that of its model was given
    peak_replicas: int | None = None  # with autoscaling, over the whole of a trace,
    replica_hours: float | None = None
    lost_to_cold_start: float | None = None  # images
    largest_step: float | None = None  # how many times more may come at once
    checks: tuple[Check, ...]
    why: tuple[str, ...]


def reasons(q: FleetQuestion, plan: FleetPlan, needed: int, *, group: int, p99: float) -> Iterator[str]:
    """Yields why this many replicas, this batch and no delay."""
    steady, surges = (
        [check for check in plan.checks if check.what == what and check.replicas <= needed]
        for what in ("steady", "surge")
    )
    yield _capacity(q, plan)
    if q.machine.beside:
        yield _cores(q, plan)
    yield from _replicas(q, plan, needed, steady, p99)
    if surges:
        yield _surge(q, needed, surges)
    if q.redundancy:
        yield (
            f"{q.redundancy} redundant: the SLO holds with {q.redundancy} failed, as checked with "
            f"{needed}. The plan's p50 and p99 are those with all of them running."
        )
    for apart in (check for check in plan.checks if check.what == "separate servers"):
        together = "all replicas" if needed <= group else f"every {group} of them"
        yield (
            f"This assumes one queue for {together}, that is one server with several GPUs. As {needed} "
            "separate servers behind a balancer (round robin, rejections retried once at another), "
            f"{_share(apart)} of {_n(apart.rate_rps)}/s would be answered within the SLO, p99 "
            f"{_n(apart.p99_ms)} ms."
        )
    if not q.steps:
        yield (
            f"Max batch {plan.max_batch}: the largest useful one that ends within {_n(q.slo * 1e3)} ms. It "
            "is a safety limit and needs no tuning; with fixed batching settings instead of an SLO, use "
            f"{plan.promised_batch}."
        )
    yield _delay(plan, next(check for check in reversed(steady) if check.replicas == needed))
    yield from _scaled(q, plan)
    if plan.cost_per_1000 is not None and q.price_per_hour is not None:
        yield (
            f"{plan.replicas} × {q.price_per_hour:g} an hour for {_n(q.rate)}/s is "
            f"{plan.cost_per_1000:.3g} per 1,000 images."
        )


def _capacity(q: FleetQuestion, plan: FleetPlan) -> str:
    promised = f"One replica sustains {_n(plan.capacity_rps)} images/s within {_n(q.slo * 1e3)} ms: "
    if q.steps:
        where = "its one device" if q.shared else "a device for each"
        alone = _n(alone_through(q.steps) * 1e3)
        return (
            f"{promised}{len(q.steps)} steps on {where}, at each of which a request may have to wait for a "
            f"batch before its own batch runs. Alone it would take {alone} ms."
        )
    batch = plan.promised_batch or 1
    takes = q.machine.curve(q.curve, plan.capacity_rps).times[batch] * 1e3
    return (
        f"{promised}a batch of {batch} takes {_n(takes)} ms, and a request may have to wait for one such "
        "batch before its own batch runs. One image at a time, it would sustain "
        f"{_n(1 / q.curve.times[1])}/s."
    )


def cannot(q: FleetQuestion, checks: Sequence[Check], longer: float | None) -> Iterator[str]:
    """Yields why no number of replicas is enough, and what would be."""
    alone = (alone_through(q.steps) if q.steps else q.curve.times[1]) * 1e3
    slo = q.slo * 1e3
    if not checks:
        yield (
            f"No number of replicas can meet an SLO of {_n(slo)} ms: one image takes {_n(alone)} ms, and a "
            f"request that arrives just after another has started needs twice that, {_n(2 * alone)} ms. "
            "More replicas make that rarer, but do not rule it out."
        )
        yield (
            f"What would help: an SLO of at least {_n(2 * alone)} ms, or a model that takes at most "
            f"{_n(slo / 2)} ms for one image."
        )
        return
    yield (
        f"No number of replicas meets {_n(slo)} ms: with {checks[-1].replicas} of them still only "
        f"{_share(checks[-1])} are answered within the SLO, because single batches take too long by chance."
    )
    enough = "a much longer SLO" if longer is None else f"an SLO of about {_n(longer * 1e3)} ms"
    yield f"What would help: a device with less noise, or {enough}."


def _cores(q: FleetQuestion, plan: FleetPlan) -> str:
    machine, most = q.machine, plan.capacity_rps
    said = f"Beside its batch an image takes {_n(machine.beside * 1e3)} ms of a core"
    parts = {"decoding": machine.decode, "protocol": machine.protocol}
    if all(parts.values()):
        said += " (" + ", ".join(f"{name} {_n(part * 1e3)}" for name, part in parts.items()) + ")"
    if machine.cores == inf:
        return f"{said}, which adds to the latency. Give --cores to check whether they suffice."
    said += f": at {_n(most)}/s {_n(most * machine.beside)} of the replica's {_n(machine.cores)} cores"
    slower = machine.stretch(most)
    if slower > 1.0:
        alone = _n(Machine(instances=machine.instances).capacity(q.curve, q.slo))
        said += (
            f". Batches would keep {_n(machine.infer_cores)} busy and take {slower:.2f} × as long with "
            f"what is left. On a machine of its own the model would sustain {alone}/s"
        )
    return said + "."


def _replicas(
    q: FleetQuestion, plan: FleetPlan, needed: int, steady: Sequence[Check], p99: float
) -> Iterator[str]:
    if len(steady) > 1 and not steady[-2].holds(q.slo):
        fewer = _replica(steady[-2].replicas).capitalize()
        yield f"{fewer} would answer {_share(steady[-2])} of {_n(q.rate)}/s within the SLO: too few."
    found = steady[-1]
    formula = f" (the formula says {_n(p99 * 1e3)} ms)" if p99 < inf else ""
    yield (
        f"{_replica(needed).capitalize()} at {_n(q.rate)}/s: {_share(found)} within the SLO, p50 "
        f"{_n(found.p50_ms)} ms, p99 {_n(found.p99_ms)} ms, simulated{formula}. That is "
        f"{100 * q.rate / needed / plan.capacity_rps:.0f} % of the capacity within the SLO."
    )


def _surge(q: FleetQuestion, needed: int, surges: Sequence[Check]) -> str:
    found = surges[-1]
    said = f"In a surge ({_n(found.rate_rps)}/s for {_n(q.surge_seconds)} s) "
    if len(surges) > 1:
        said += f"{_replica(surges[-2].replicas)} would answer {_share(surges[-2])} within the SLO; "
    answer = "answers" if needed == 1 else "answer"
    return f"{said}{_replica(needed)} {answer} {_share(found)} within the SLO, p99 {_n(found.p99_ms)} ms."


def _delay(plan: FleetPlan, steady: Check) -> str:
    delayed = next(check for check in plan.checks if check.what.startswith("knobs"))
    change = (
        f"p50 {_n(steady.p50_ms)} → {_n(delayed.p50_ms)} ms, p99 {_n(steady.p99_ms)} → "
        f"{_n(delayed.p99_ms)} ms, {_share(steady)} → {_share(delayed)} within the SLO"
    )
    delay = delayed.what.removeprefix("knobs, ")
    if plan.delay_helps:
        return (
            f"A {delay} would help at exactly this rate ({change}), but only as a fixed setting, which "
            "makes every response late once the rate exceeds the capacity. An SLO needs none."
        )
    return (
        f"No delay helps: with fixed batching settings and a {delay} it would be {change}. The next batch "
        "fills while a replica is busy."
    )


def _scaled(q: FleetQuestion, plan: FleetPlan) -> Iterator[str]:
    if q.scaling is None or plan.largest_step is None:
        return
    most = f"{plan.largest_step:.1f} ×"
    yield (
        f"With autoscaling to a load of {q.scaling.target:g}, decided every {_n(q.hpa_period)} s, and "
        f"{_n(q.scaling.cold_start)} s until a new replica answers, a step to {most} the rate is survived: "
        "99 % of the requests in the five minutes after it are accepted."
    )
    if plan.replica_hours is not None and plan.lost_to_cold_start is not None:
        yield (
            f"Over the trace it would have had {plan.peak_replicas} replicas at its peak and "
            f"{_n(plan.replica_hours)} replica-hours, and {_n(plan.lost_to_cold_start)} images would have "
            "arrived before their replicas were ready."
        )


def _replica(count: int) -> str:
    return "one replica" if count == 1 else f"{count} replicas"


def _share(check: Check) -> str:
    return f"{check.attainment:.2%}".replace("%", " %")


_REQUESTS = 15_000  # at least, in a checking run: its 99th percentile then rests on 150 of them
_SECONDS, _AFFORDED = 20.0, 60_000  # and for so long, unless that takes more requests than this
_SLOWEST = 1e-3  # requests per second: slower traffic never meets itself, and would take clocks too far
_CELL = 32  # separate servers, simulated one by one
_GROUP = 8  # instances simulated at once: more behind one queue only do better
_STUCK = 0.0005  # a replica more that brings less than this will not be the one that is missing
_WORTH = 0.05  # a delay helps if it takes this share off the p99 without adding it to the p50

Tell = Callable[[str], None]


def plan(question: FleetQuestion, tell: Tell = lambda _: None) -> FleetPlan:
    """Returns the smallest fleet that keeps the promise in calm and in surges, with the spares asked for on
    top."""
    q = question
    most = q.capacity
    if not most:
        return FleetPlan(capacity_rps=0.0, checks=(), why=tuple(cannot(q, (), None)))
    guess = ceil(q.peak / most)
    checks: list[Check] = []
    best = 0.0
    needed = guess
    while needed <= 3 * guess + 8:
        tell(f"checking {needed} replicas")
        tried = list(_check(q, needed))
        checks += tried
        if all(check.holds(q.slo) for check in tried):
            return _describe(q, needed, checks, tell)
        if tried[-1].what == "steady" and tried[-1].attainment < best + _STUCK:
            break
        best = tried[-1].attainment if tried[-1].what == "steady" else 0.0
        needed += max(1, needed // 20)
    tell("looking for an SLO that can be met")
    longer = (q.slo * factor for factor in (1.1, 1.25, 1.5, 2.0, 3.0, 5.0))
    kept = next((slo for slo in longer if suffices(replace(q, slo=slo), guess)), None)
    return FleetPlan(capacity_rps=most, checks=tuple(checks), why=tuple(cannot(q, checks, kept)))


def suffices(question: FleetQuestion, replicas: int) -> bool:
    """Returns whether so many would keep the promise, in calm and in surges."""
    return all(check.holds(question.slo) for check in _check(question, replicas))


def _scenario(q: FleetQuestion, replicas: int, busiest: float | None = None) -> Scenario:
    """Returns a group of the fleet with its part of the traffic, long enough to count. `busiest` is the rate
    at which decoding and protocol take most from the batches."""
    group = min(replicas, max(1, _GROUP // q.machine.instances))
    rate = max(q.rate * group / replicas, _SLOWEST)
    promise = Promise(q.slo, max_batch(q.curve, q.slo))
    each = (busiest or q.rate) / replicas
    traffic, seconds = q.traffic, _long_enough(rate)
    if isinstance(traffic, Recording):
        traffic = traffic.part(group / replicas, Random(q.seed))
        rate, seconds = traffic.own_rate, traffic.span * (1 + 1e-9)
    return Scenario(
        q.machine.curve(q.curve, each),
        q.slo,
        promise,
        rate,
        traffic=traffic,
        instances=group * q.machine.instances,
        seconds=seconds,
        seed=q.seed,
        noise=q.noise,
        outside=q.machine.outside(each),
        steps=q.steps,
        shared=q.shared,
    )


def _long_enough(rate: float) -> float:
    return min(max(_SECONDS, _REQUESTS / rate), _AFFORDED / rate)


def max_batch(curve: BatchCurve, slo: float) -> int:
    """Returns the largest batch that can be of any use: one that ends within the promise if it starts at
    once."""
    return curve.efficient[curve.fits(slo)]


def _check(q: FleetQuestion, replicas: int) -> Iterator[Check]:
    """Checks the steady state first: if that fails, surges need no check."""
    if q.machine.stretch(q.rate / replicas) == inf:  # nothing is left for batches
        yield Check("steady", replicas, q.rate, 0.0, 0.0, 0.0)
        return
    steady = measure(_scenario(q, replicas))
    check = Check("steady", replicas, q.rate, steady.attainment, steady.p50_ms, steady.p99_ms)
    yield check
    if q.surge > 1 and check.holds(q.slo):
        most = q.rate * q.surge
        if q.machine.stretch(most / replicas) == inf:
            yield Check("surge", replicas, most, 0.0, 0.0, 0.0)
            return
        surge = Surge(q.surge, q.surge_seconds, calm=max(1.0, 4 * q.slo))
        attainment, p50, p99 = surge_outcome(_scenario(q, replicas, most), surge)
        yield Check("surge", replicas, most, attainment, p50, p99)


def _describe(q: FleetQuestion, needed: int, checks: list[Check], tell: Tell) -> FleetPlan:
    replicas = needed + q.redundancy
    tell("checking whether a delay would help")
    steady = checks[-1] if checks[-1].what == "steady" else checks[-2]
    delayed, helps = _with_delay(q, needed, steady)
    checks.append(delayed)
    if q.redundancy:
        tell("checking with the redundant replicas")
        checks += _check(q, replicas)
    if needed > 1:
        tell("checking separate servers")
        checks.append(_apart(q, needed))
    normal = next(check for check in reversed(checks) if check.what == "steady")
    most = q.capacity
    cost = None if q.price_per_hour is None else replicas * q.price_per_hour / (q.rate * 3.6)
    batches = q.machine.curve(q.curve, most)
    answer = FleetPlan(
        replicas=replicas,
        max_batch=None if q.steps else max_batch(q.curve, q.slo),
        promised_batch=None if q.steps else promised_batch(batches, q.slo - q.machine.outside(most)),
        max_delay_ms=0.0,
        delay_helps=helps,
        p50_ms=normal.p50_ms,
        p99_ms=normal.p99_ms,
        capacity_rps=most,
        headroom=replicas * most / q.rate - 1,
        cost_per_1000=cost,
        memory_mb=replica_memory_mb(q.model_mb) if q.model_mb else None,
        checks=tuple(checks),
        why=(),
    )
    answer = _with_scaling(q, answer)
    each = q.rate / needed
    p99 = inf  # of a pipeline, and of uneven traffic, there is no formula
    if not q.steps and isinstance(q.traffic, Poisson):
        p99 = expected_p99(q.machine.curve(q.curve, each), q.rate, needed * q.machine.instances)
    why = reasons(q, answer, needed, group=_GROUP, p99=p99 + q.machine.outside(each))
    return replace(answer, why=tuple(why))


def _apart(q: FleetQuestion, needed: int) -> Check:
    """Checks the same as servers with a queue each. Of a pipeline one of them at random is simulated; else a
    cell of as many as are simulated one by one, behind a balancer."""
    if q.steps:
        rate = q.peak / needed
        alone = replace(_scenario(q, needed, q.peak), instances=q.machine.instances, rate=rate)
        out = measure(replace(alone, seconds=_long_enough(rate)))
        return Check("separate servers", needed, q.peak, out.attainment, out.p50_ms, out.p99_ms)
    cell = min(needed, _CELL)
    one = replace(_scenario(q, needed, q.peak), instances=q.machine.instances)
    if isinstance(q.traffic, Recording):
        traffic = q.traffic.part(cell / needed, Random(q.seed))
        one = replace(one, traffic=traffic, rate=traffic.own_rate)
    else:
        rate = max(q.peak * cell / needed, _SLOWEST)
        one = replace(one, rate=rate, seconds=_long_enough(rate))
    fleet = measure_fleet(FleetScenario(one, cell, retries=1))
    return Check("separate servers", needed, q.peak, fleet.attainment, fleet.p50_ms, fleet.p99_ms)


def _with_scaling(q: FleetQuestion, plan: FleetPlan) -> FleetPlan:
    rule = q.scaling
    if rule is None:
        return plan
    step = largest_step(q.rate, plan.capacity_rps, rule, period=q.hpa_period)
    day: DayReport | None = None
    if isinstance(q.traffic, Recording):
        rates = rates_of(q.traffic.recorded, q.traffic.span)
        day = fluid_day(rates, plan.capacity_rps, rule, period=q.hpa_period)
    return replace(
        plan,
        largest_step=step,
        peak_replicas=None if day is None else day.peak_replicas,
        replica_hours=None if day is None else day.replica_hours,
        lost_to_cold_start=None if day is None else day.lost,
    )


def _with_delay(q: FleetQuestion, replicas: int, steady: Check) -> tuple[Check, bool]:
    """Returns the best of two small delays with fixed settings, and whether it beats not waiting."""
    scenario = _scenario(q, replicas)
    tried = []
    for share in (20, 10):
        delay = q.slo / share
        out = measure(replace(scenario, settings=FixedBatching(max_batch(q.curve, q.slo), max_delay=delay)))
        what = f"knobs, {delay * 1e3:g} ms delay"
        tried.append(Check(what, replicas, q.rate, out.attainment, out.p50_ms, out.p99_ms))
    best = min(tried, key=lambda check: check.p99_ms)
    more_in_time = best.attainment > steady.attainment + 0.002
    as_many = best.attainment >= steady.attainment - 0.001
    sooner = best.p99_ms < (1 - _WORTH) * steady.p99_ms and best.p50_ms < (1 + _WORTH) * steady.p50_ms
    return best, more_in_time or (as_many and sooner)
