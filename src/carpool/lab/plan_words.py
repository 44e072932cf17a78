"""A plan in sentences that a person can repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from carpool.core.numerals import numeral as _n
from carpool.lab.fleet_question import Check, FleetPlan, FleetQuestion, Machine


def reasons(q: FleetQuestion, plan: FleetPlan, needed: int, *, group: int, p99: float) -> Iterator[str]:
    """Why this many replicas, this batch and no delay."""
    yield from _capacity(q, plan)
    yield from _cores(q, plan)
    yield from _replicas(q, plan, needed, p99)
    yield from _surge(q, plan, needed)
    yield from _spares(q, needed)
    yield from _queues(plan, needed, group)
    yield from _knobs(q, plan, needed)
    yield from _money(q, plan)


def cannot(q: FleetQuestion, checks: Iterable[Check], longer: float | None) -> Iterator[str]:
    """Why no number of replicas is enough, and what would be."""
    alone = q.curve.times[1] * 1e3
    slo = q.slo * 1e3
    last = list(checks)[-1:]
    if not last:
        yield (
            f"No number of replicas can promise {_n(slo)} ms: one image takes {_n(alone)} ms, and a request "
            f"that arrives just after another has started needs twice that, {_n(2 * alone)} ms. More "
            "replicas make that rarer; they do not rule it out."
        )
        yield (
            f"What would help: an SLO of at least {_n(2 * alone)} ms, or a model that takes at most "
            f"{_n(slo / 2)} ms for one image."
        )
        return
    yield (
        f"No number of replicas keeps {_n(slo)} ms: with {last[0].replicas} of them still only "
        f"{_share(last[0])} are answered in time, because single batches take too long by chance."
    )
    if longer is None:
        yield "What would help: a device with less noise, or a much longer SLO."
    else:
        yield f"What would help: a device with less noise, or an SLO of about {_n(longer * 1e3)} ms."


def _capacity(q: FleetQuestion, plan: FleetPlan) -> Iterator[str]:
    batch = plan.promised_batch or 1
    takes = q.curve_at(plan.capacity_rps).times[batch] * 1e3
    yield (
        f"One replica can promise {_n(plan.capacity_rps)} images/s within {_n(q.slo * 1e3)} ms: a batch of "
        f"{batch} takes {_n(takes)} ms, and a request may have to wait for one such batch before it rides in "
        f"its own. One image at a time it would carry {_n(1 / q.curve.times[1])}/s."
    )


def _cores(q: FleetQuestion, plan: FleetPlan) -> Iterator[str]:
    machine, most = q.machine, plan.capacity_rps
    if not machine.beside:
        return
    said = f"Beside its batch an image takes {_n(machine.beside * 1e3)} ms of a core"
    parts = {"decoding": machine.decode, "protocol": machine.protocol}
    if all(parts.values()):
        said += " (" + ", ".join(f"{name} {_n(part * 1e3)}" for name, part in parts.items()) + ")"
    if machine.cores == float("inf"):
        yield f"{said}, which its client waits for. With --cores it would be known whether these suffice."
        return
    said += f": at {_n(most)}/s {_n(most * machine.beside)} of the replica's {_n(machine.cores)} cores"
    slower = machine.stretch(most)
    if slower > 1.0:
        alone = _n(Machine(instances=q.machine.instances).capacity(q.curve, q.slo))
        said += (
            f". Batches would keep {_n(machine.infer_cores)} busy and take {slower:.2f} × as long with what "
            f"is left. With a machine for itself the model could promise {alone}/s"
        )
    yield said + "."


def _replicas(q: FleetQuestion, plan: FleetPlan, needed: int, p99: float) -> Iterator[str]:
    steady = [c for c in plan.checks if c.what == "steady" and c.replicas <= needed]
    if len(steady) > 1 and not steady[-2].holds(q.slo):
        worse = steady[-2]
        yield f"{_replica(worse.replicas)} would answer {_share(worse)} of {_n(q.rate)}/s in time: too few."
    found = steady[-1]
    formula = f" (the formula says {_n(p99 * 1e3)} ms)" if p99 < float("inf") else ""
    yield (
        f"{_replica(needed)} at {_n(q.rate)}/s: {_share(found)} answered in time, p50 {_n(found.p50_ms)} ms, "
        f"p99 {_n(found.p99_ms)} ms, simulated{formula}. That is "
        f"{100 * q.rate / needed / plan.capacity_rps:.0f} % of what can be promised."
    )


def _surge(q: FleetQuestion, plan: FleetPlan, needed: int) -> Iterator[str]:
    surges = [c for c in plan.checks if c.what == "surge" and c.replicas <= needed]
    if not surges:
        return
    found = surges[-1]
    lasting = f"{_n(found.rate_rps)}/s for {_n(q.surge_seconds)} s"
    sentence = f"In a surge ({lasting}) "
    if len(surges) > 1:
        sentence += (
            f"{_replica(surges[-2].replicas, start=False)} would answer {_share(surges[-2])} in time; "
        )
    answer = "answers" if needed == 1 else "answer"
    yield (
        f"{sentence}{_replica(needed, start=False)} {answer} {_share(found)} in time, "
        f"p99 {_n(found.p99_ms)} ms."
    )


def _spares(q: FleetQuestion, needed: int) -> Iterator[str]:
    if q.redundancy:
        yield (
            f"{q.redundancy} more to spare: the promise holds with {q.redundancy} gone, which is what was "
            f"checked on {needed}. The plan's p50 and p99 are those with all of them running."
        )


def _queues(plan: FleetPlan, needed: int, group: int) -> Iterator[str]:
    apart = next((c for c in plan.checks if c.what == "separate servers"), None)
    if apart is None:
        return
    together = "all replicas" if needed <= group else f"every {group} of them"
    yield (
        f"This counts on one queue in front of {together}: one server with several GPUs. As "
        f"{needed} separate servers behind a load balancer, each with its own queue, {_share(apart)} of "
        f"{_n(apart.rate_rps)}/s would be answered in time, p99 {_n(apart.p99_ms)} ms."
    )


def _knobs(q: FleetQuestion, plan: FleetPlan, needed: int) -> Iterator[str]:
    yield (
        f"Max batch {plan.max_batch}: the largest useful one that ends within {_n(q.slo * 1e3)} ms. It is a "
        f"safety cap, not a knob to tune; with fixed knobs instead of a promise take {plan.promised_batch}."
    )
    delayed = next(c for c in plan.checks if c.what.startswith("knobs"))
    steady = next(c for c in reversed(plan.checks) if c.what == "steady" and c.replicas == needed)
    change = (
        f"p50 {_n(steady.p50_ms)} → {_n(delayed.p50_ms)} ms, p99 {_n(steady.p99_ms)} → "
        f"{_n(delayed.p99_ms)} ms, {_share(steady)} → {_share(delayed)} in time"
    )
    delay = delayed.what.removeprefix("knobs, ")
    if plan.delay_helps:
        yield (
            f"A {delay} would help at exactly this rate ({change}), but only as a fixed knob, which "
            "answers everybody late once the rate goes above capacity. A promise needs none."
        )
    else:
        yield (
            f"No delay helps: with fixed knobs and a {delay} it would be {change}. While a replica is busy "
            "the next batch gathers by itself."
        )


def _money(q: FleetQuestion, plan: FleetPlan) -> Iterator[str]:
    if plan.cost_per_1000 is not None and q.price_per_hour is not None:
        yield (
            f"{plan.replicas} × {q.price_per_hour:g} an hour for {_n(q.rate)}/s is "
            f"{plan.cost_per_1000:.3g} per 1,000 images."
        )


def _replica(count: int, *, start: bool = True) -> str:
    words = "one replica" if count == 1 else f"{count} replicas"
    return words.capitalize() if start else words


def _share(check: Check) -> str:
    return f"{check.attainment:.2%}".replace("%", " %")
