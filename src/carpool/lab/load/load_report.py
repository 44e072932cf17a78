"""Reports what a run found, in numbers with names (the keys of --json), and whether they are the server's at
all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.tally import Histogram, Spread, Tally, milliseconds, spread

LATE_MS = 5.0  # the 99th percentile of the lag may be this, or a tenth of the SLO if that is more
_WORKING = 0.5  # of a core: one that is late with less is kept from running
BUSY = 0.9  # of a core: a loop that is so busy answers itself late


@dataclass(frozen=True, slots=True)
class Generator:
    """Describes what the generating side did and cost. Lags are from the intended time."""

    processes: int
    processor_seconds: float
    busiest_core_share: float
    processor_us_per_request: float
    start_lag_ms: Spread  # until the generator got to a request
    send_lag_ms: Spread  # until it was on a connection
    loop_lag_ms: Spread
    connections: int  # at most at once, over all processes
    connection_limit: int
    reconnects: int
    resent: int


@dataclass
class Part:
    """Holds what one generating process found."""

    tallies: list[Tally]
    seconds: float  # from the start until nothing more was due
    last_answer: float
    stopped_early: bool
    processor_seconds: float
    wall_seconds: float
    loop_lag: Histogram
    facts: dict[str, int] = field(default_factory=dict)


def bound_ms(slo: float | None) -> float:
    return max(LATE_MS, (slo or 0.0) * 100)


def judge(generator: Generator, plan: Plan) -> list[str]:
    """Returns sentences, each a reason to doubt the numbers; none if there is none."""
    found = []
    bound = bound_ms(plan.slo)
    g = generator
    if g.start_lag_ms.p99 > bound:
        others = "Other processes keep it from running: give it its own core"
        advice = "Give it more --processes" if g.busiest_core_share > _WORKING else others
        found.append(
            f"the generator sent requests late: p99 {g.start_lag_ms.p99:.1f} ms after their time, with "
            f"{bound:g} ms allowed, at {100 * g.busiest_core_share:.0f} % of a core. {advice}"
        )
    elif g.busiest_core_share > BUSY:
        found.append(
            f"the generator used {100 * g.busiest_core_share:.0f} % of a core, so it read responses late: "
            "give it more --processes"
        )
    waited = g.send_lag_ms.p99 - g.start_lag_ms.p99
    if waited > bound and not isinstance(plan.load, Closed):
        full = g.connections >= g.connection_limit
        advice = "Give more --connections" if full else "Opening more took so long"
        found.append(
            f"requests waited for a connection: p99 {waited:.1f} ms, with {g.connections} of them. "
            f"{advice}: the wait counts in the response time, but the server got these requests late"
        )
    return found


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts a phase, or all that count. Rates are per second of the phase."""

    name: str
    seconds: float
    offered: int
    sent: int
    answered: int
    good: int
    refused: dict[str, int]
    failed: dict[str, int]
    timed_out: int
    unanswered: int
    offered_rps: float
    answered_rps: float
    goodput_rps: float
    images_rps: float
    attainment: float
    response_ms: Spread
    service_ms: Spread
    refusal_ms: Spread
    queue_ms: Spread
    infer_ms: Spread
    outside_ms: Spread
    batch: Spread
    tokens: int  # of streamed answers, as the next three
    tokens_per_second: float
    first_token_ms: Spread
    token_interval_ms: Spread


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Everything; `total` is over the phases that count."""

    target: str
    loop: str
    slo_ms: float | None
    stopped_early: bool
    total: Counts
    phases: tuple[Counts, ...]
    generator: Generator
    generator_late: bool
    late_because: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Returns one flat object for the whole run, with the phases below it."""
        found = asdict(self)
        total = found.pop("total")
        total.pop("name")
        return {"target": found.pop("target"), "loop": found.pop("loop"), **total, **found}


def report(plan: Plan, parts: Sequence[Part], target: str) -> LoadReport:
    """Reports on one process or on several that shared a plan."""
    phases = plan.load.phases
    tallies = [Tally() for _ in phases]
    for part in parts:
        for tally, more in zip(tallies, part.tallies, strict=True):
            tally.merge(more)
    stopped_early = any(part.stopped_early for part in parts)
    seconds = _seconds(plan, parts, stopped_early)
    counted = [number for number, phase in enumerate(phases) if not phase.warmup]
    together = Tally()
    for number in counted:
        together.merge(tallies[number])
    generator = _generator(parts, tallies)
    because = judge(generator, plan)
    clients = f"{plan.load.concurrency} clients" if isinstance(plan.load, Closed) else ""
    return LoadReport(
        target=target,
        loop="closed" if clients else "open",
        slo_ms=None if plan.slo is None else plan.slo * 1e3,
        stopped_early=stopped_early,
        total=_counts("all", sum(seconds[number] for number in counted), together, plan.batch),
        phases=tuple(
            _counts(clients if clients and not phase.warmup else phase.name, length, tally, plan.batch)
            for phase, length, tally in zip(phases, seconds, tallies, strict=True)
        ),
        generator=generator,
        generator_late=bool(because),
        late_because=tuple(because),
    )


def _seconds(plan: Plan, parts: Sequence[Part], stopped_early: bool) -> list[float]:
    """Returns how long each phase was: as planned, unless the run ended before or had no planned end."""
    phases = plan.load.phases
    ran = max(part.seconds for part in parts)
    if isinstance(plan.load, Closed):
        ran = max(ran, *(part.last_answer for part in parts))  # the last answers belong to it
        warm = min(plan.load.warmup, ran)
        return [warm, ran - warm] if len(phases) > 1 else [ran]
    found = []
    left = ran if stopped_early else float("inf")
    for phase in phases:
        found.append(min(phase.seconds, max(0.0, left)))
        left -= phase.seconds
    return found


_COUNTED = ("offered", "sent", "answered", "good", "timed_out", "unanswered", "tokens")
_TIMED = ("response", "service", "refusal", "queue", "infer", "outside", "first_token", "token_interval")


def _counts(name: str, seconds: float, tally: Tally, batch: int) -> Counts:
    per_second = 1 / seconds if seconds > 0 else 0.0
    numbers: dict[str, Any] = {counted: getattr(tally, counted) for counted in _COUNTED}
    numbers |= {f"{timed}_ms": milliseconds(getattr(tally, timed)) for timed in _TIMED}
    return Counts(
        name=name,
        seconds=round(seconds, 3),
        refused=dict(tally.refused.most_common()),
        failed=dict(tally.failed.most_common()),
        offered_rps=round(tally.offered * per_second, 3),
        answered_rps=round(tally.answered * per_second, 3),
        goodput_rps=round(tally.good * per_second, 3),
        images_rps=round(tally.images * batch * per_second, 3),
        attainment=round(tally.good / tally.offered, 6) if tally.offered else 0.0,
        batch=spread(tally.batch, 1.0),
        tokens_per_second=round(tally.tokens * per_second, 3),
        **numbers,
    )


def _generator(parts: Sequence[Part], tallies: Sequence[Tally]) -> Generator:
    start_lag, send_lag, loop_lag = Histogram(), Histogram(), Histogram()
    facts: Counter[str] = Counter()
    for tally in tallies:
        start_lag.merge(tally.start_lag)
        send_lag.merge(tally.send_lag)
    for part in parts:
        loop_lag.merge(part.loop_lag)
        facts.update(part.facts)
    processor = sum(part.processor_seconds for part in parts)
    sent = sum(tally.sent for tally in tallies)
    return Generator(
        processes=len(parts),
        processor_seconds=round(processor, 3),
        busiest_core_share=round(max(part.processor_seconds / part.wall_seconds for part in parts), 4),
        processor_us_per_request=round(processor / sent * 1e6, 2) if sent else 0.0,
        start_lag_ms=milliseconds(start_lag),
        send_lag_ms=milliseconds(send_lag),
        loop_lag_ms=milliseconds(loop_lag),
        **{name: facts[name] for name in ("connections", "connection_limit", "reconnects", "resent")},
    )
