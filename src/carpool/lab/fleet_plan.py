"""How many replicas for this traffic and that promise? Closed forms guess; the simulator decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from carpool.core.curve import BatchCurve, expected_p99, promised_batch
from carpool.core.policy import Knobs, Promise
from carpool.lab.fleet_question import Check, FleetPlan, FleetQuestion
from carpool.lab.plan_words import cannot, reasons
from carpool.sim.scenario import Scenario, Surge, measure, surge_outcome

_REQUESTS = 15_000  # at least, in a checking run: its 99th percentile then rests on 150 of them
_SECONDS, _AFFORDED = 20.0, 60_000  # and for so long, unless that takes more requests than this
_SLOWEST = 1e-3  # requests per second: slower traffic never meets itself, and would take clocks too far
_GROUP = 8  # instances simulated at once: more behind one queue only do better
_STUCK = 0.0005  # a replica more that brings less than this will not be the one that is missing
_WORTH = 0.05  # a delay helps if it takes this share off the p99 without adding it to the p50

Tell = Callable[[str], None]


def plan(question: FleetQuestion, tell: Tell = lambda _: None) -> FleetPlan:
    """The smallest fleet that keeps the promise in calm and in surges, with the spares asked for on top."""
    q = question
    capacity = q.capacity
    if not capacity:
        return _no_plan(q, 0.0, (), None)
    guess = ceil(q.peak / capacity)
    checks: list[Check] = []
    best = 0.0
    for needed in _candidates(guess):
        tell(f"checking {needed} replicas")
        tried = list(_check(q, needed))
        checks += tried
        if all(check.holds(q.slo) for check in tried):
            return _describe(q, needed, checks, tell)
        if tried[-1].what == "steady" and tried[-1].attainment < best + _STUCK:
            break
        best = tried[-1].attainment if tried[-1].what == "steady" else 0.0
    tell("looking for a promise that can be kept")
    return _no_plan(q, capacity, tuple(checks), _longer_slo(q, guess))


def suffices(question: FleetQuestion, replicas: int) -> bool:
    """Whether so many would keep the promise, in calm and in surges."""
    return all(check.holds(question.slo) for check in _check(question, replicas))


def _candidates(guess: int) -> Iterator[int]:
    """Upwards in steps of a twentieth, but not for ever."""
    replicas = guess
    while replicas <= 3 * guess + 8:
        yield replicas
        replicas += max(1, replicas // 20)


def _scenario(q: FleetQuestion, replicas: int, busiest: float | None = None) -> Scenario:
    """A group of the fleet with its part of the traffic, long enough to count. `busiest` is the rate at which
    decoding and protocol take most from the batches."""
    group = min(replicas, max(1, _GROUP // q.machine.instances))
    rate = max(q.rate * group / replicas, _SLOWEST)
    promise = Promise(q.slo, max_batch(q.curve, q.slo))
    each = (busiest or q.rate) / replicas
    return Scenario(
        q.curve_at(each),
        q.slo,
        promise,
        rate,
        instances=group * q.machine.instances,
        seconds=_long_enough(rate),
        seed=q.seed,
        noise=q.noise,
        outside=q.machine.outside(each),
    )


def _long_enough(rate: float) -> float:
    return min(max(_SECONDS, _REQUESTS / rate), _AFFORDED / rate)


def max_batch(curve: BatchCurve, slo: float) -> int:
    """The largest batch that can be of any use: one that ends within the promise if it starts at once."""
    return curve.efficient[curve.fits(slo)]


def _check(q: FleetQuestion, replicas: int) -> Iterator[Check]:
    """The steady state first: if that fails, nobody need ask about surges."""
    if not q.has_cores_for(q.rate / replicas):
        yield Check("steady", replicas, q.rate, 0.0, 0.0, 0.0)
        return
    steady = measure(_scenario(q, replicas))
    check = Check("steady", replicas, q.rate, steady.attainment, steady.p50_ms, steady.p99_ms)
    yield check
    if q.surge > 1 and check.holds(q.slo):
        most = q.rate * q.surge
        if not q.has_cores_for(most / replicas):
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
        tell("checking with the spares")
        checks += _check(q, replicas)
    if needed > 1:
        checks.append(_separate(q, needed))
    normal = next(check for check in reversed(checks) if check.what == "steady")
    capacity = q.capacity
    cost = None if q.price_per_hour is None else replicas * q.price_per_hour / (q.rate * 3.6)
    answer = FleetPlan(
        replicas=replicas,
        max_batch=max_batch(q.curve, q.slo),
        promised_batch=promised_batch(q.curve_at(capacity), q.slo - q.machine.outside(capacity)),
        max_delay_ms=0.0,
        delay_helps=helps,
        p50_ms=normal.p50_ms,
        p99_ms=normal.p99_ms,
        capacity_rps=capacity,
        headroom=replicas * capacity / q.rate - 1,
        cost_per_1000=cost,
        checks=tuple(checks),
        why=(),
    )
    each = q.rate / needed
    p99 = expected_p99(q.curve_at(each), q.rate, needed * q.machine.instances) + q.machine.outside(each)
    return replace(answer, why=tuple(reasons(q, answer, needed, group=_GROUP, p99=p99)))


def _with_delay(q: FleetQuestion, replicas: int, steady: Check) -> tuple[Check, bool]:
    """The best of two small delays with fixed knobs, and whether it beats not waiting."""
    scenario = _scenario(q, replicas)
    tried = []
    for share in (20, 10):
        delay = q.slo / share
        out = measure(replace(scenario, settings=Knobs(max_batch(q.curve, q.slo), max_delay=delay)))
        what = f"knobs, {delay * 1e3:g} ms delay"
        tried.append(Check(what, replicas, q.rate, out.attainment, out.p50_ms, out.p99_ms))
    best = min(tried, key=lambda check: check.p99_ms)
    more_in_time = best.attainment > steady.attainment + 0.002
    as_many = best.attainment >= steady.attainment - 0.001
    sooner = best.p99_ms < (1 - _WORTH) * steady.p99_ms and best.p50_ms < (1 + _WORTH) * steady.p50_ms
    return best, more_in_time or (as_many and sooner)


def _separate(q: FleetQuestion, replicas: int) -> Check:
    """The same fleet as servers with a queue each, behind something that spreads requests at random."""
    rate = q.peak / replicas
    several = _scenario(q, replicas, q.peak)
    out = measure(replace(several, instances=q.machine.instances, rate=rate, seconds=_long_enough(rate)))
    return Check("separate servers", replicas, q.peak, out.attainment, out.p50_ms, out.p99_ms)


def _longer_slo(q: FleetQuestion, replicas: int) -> float | None:
    """The first of a few longer promises that as many replicas would keep."""
    for factor in (1.1, 1.25, 1.5, 2.0, 3.0, 5.0):
        longer = replace(q, slo=q.slo * factor)
        if suffices(longer, replicas):
            return longer.slo
    return None


def _no_plan(q: FleetQuestion, capacity: float, checks: tuple[Check, ...], longer: float | None) -> FleetPlan:
    return FleetPlan(capacity_rps=capacity, checks=checks, why=tuple(cannot(q, checks, longer)))
