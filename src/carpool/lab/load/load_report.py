"""What a run found, in numbers with names. The names are the keys of `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from carpool.lab.load.histogram import Histogram
from carpool.lab.load.lateness import Generator, judge
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.schedule import Phase
from carpool.lab.load.spread import Spread, milliseconds, spread
from carpool.lab.load.tally import Tally

if TYPE_CHECKING:
    from carpool.lab.load.generator import Part


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a phase, or of all that count. Rates are per second of the phase."""

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


@dataclass(frozen=True, slots=True)
class Report:
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
        """One flat object for the whole run, with the phases below it."""
        found = asdict(self)
        total = found.pop("total")
        total.pop("name")
        return {"target": found.pop("target"), "loop": found.pop("loop"), **total, **found}


def report(plan: Plan, parts: Sequence[Part], target: str) -> Report:
    """Of one process or of several that shared a plan."""
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
    return Report(
        target=target,
        loop="closed" if isinstance(plan.load, Closed) else "open",
        slo_ms=None if plan.slo is None else plan.slo * 1e3,
        stopped_early=stopped_early,
        total=_counts("all", sum(seconds[number] for number in counted), together, plan.batch),
        phases=tuple(
            _counts(_name(phase, plan), length, tally, plan.batch)
            for phase, length, tally in zip(phases, seconds, tallies, strict=True)
        ),
        generator=generator,
        generator_late=bool(because),
        late_because=tuple(because),
    )


def _name(phase: Phase, plan: Plan) -> str:
    if isinstance(plan.load, Closed) and not phase.warmup:
        return f"{plan.load.concurrency} clients"
    return phase.name


def _seconds(plan: Plan, parts: Sequence[Part], stopped_early: bool) -> list[float]:
    """How long each phase was: as planned, unless the run ended before or had no planned end."""
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


def _counts(name: str, seconds: float, tally: Tally, batch: int) -> Counts:
    per_second = 1 / seconds if seconds > 0 else 0.0
    return Counts(
        name=name,
        seconds=round(seconds, 3),
        offered=tally.offered,
        sent=tally.sent,
        answered=tally.answered,
        good=tally.good,
        refused=_ordered(tally.refused),
        failed=_ordered(tally.failed),
        timed_out=tally.timed_out,
        unanswered=tally.unanswered,
        offered_rps=round(tally.offered * per_second, 3),
        answered_rps=round(tally.answered * per_second, 3),
        goodput_rps=round(tally.good * per_second, 3),
        images_rps=round(tally.images * batch * per_second, 3),
        attainment=round(tally.good / tally.offered, 6) if tally.offered else 0.0,
        response_ms=milliseconds(tally.response),
        service_ms=milliseconds(tally.service),
        refusal_ms=milliseconds(tally.refusal),
        queue_ms=milliseconds(tally.queue),
        infer_ms=milliseconds(tally.infer),
        outside_ms=milliseconds(tally.outside),
        batch=spread(tally.batch, 1.0),
    )


def _ordered(counter: Counter[str]) -> dict[str, int]:
    return dict(counter.most_common())


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
        connections=facts["connections"],
        connection_limit=facts["connection_limit"],
        reconnects=facts["reconnects"],
        resent=facts["resent"],
    )
