"""One finished run of a sweep, as it is kept in a line of JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from carpool.lab.load.histogram import Histogram
from carpool.lab.load.ledger import Record
from carpool.lab.load.load_report import Report
from carpool.lab.load.ticket import Answer, Kind, Ticket
from carpool.lab.sweep.sweep_order import Point


class Watcher:
    """Hears of every request that ends, and keeps what the report's charts need."""

    def __init__(self, first_counted: int) -> None:
        self._first = first_counted  # phase: those before it are warm-up
        self.response = Histogram()
        self.batches: Counter[int] = Counter()
        self.infer: dict[int, Histogram] = {}

    def __call__(self, ticket: Ticket, now: float, answer: Answer) -> None:
        if ticket.phase < self._first or answer.kind is not Kind.ANSWERED:
            return
        self.response.add(now - ticket.intended)
        if answer.timing is not None:
            self.batches[answer.timing.batch] += 1
            self.infer.setdefault(answer.timing.batch, Histogram()).add(answer.timing.infer)

    @property
    def record(self) -> Record:
        return self


@dataclass(frozen=True, slots=True)
class Measured:
    """The field names are the keys of `runs` in results.json. `batches`: answers by their batch's size."""

    setting: str
    rate: float
    repeat: int
    load: float | None
    at: str  # when it began, UTC
    seconds: float
    offered: int
    answered: int
    good: int
    refused: dict[str, int]
    failed: dict[str, int]
    timed_out: int
    unanswered: int
    goodput_rps: float
    attainment: float
    p50_ms: float
    p99_ms: float
    steal: float  # share of the processor that others took meanwhile
    void: tuple[str, ...]  # why the numbers are not the server's; empty if they are
    batches: dict[int, int] = field(default_factory=dict)
    response: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, float, int]:
        return self.setting, self.rate, self.repeat

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"batches": {str(size): count for size, count in self.batches.items()}}


def measured(point: Point, at: str, found: Report, seen: Watcher, steal: float) -> Measured:
    total = found.total
    return Measured(
        setting=point.setting,
        rate=point.rate,
        repeat=point.repeat,
        load=point.load,
        at=at,
        seconds=total.seconds,
        offered=total.offered,
        answered=total.answered,
        good=total.good,
        refused=total.refused,
        failed=total.failed,
        timed_out=total.timed_out,
        unanswered=total.unanswered,
        goodput_rps=total.goodput_rps,
        attainment=total.attainment,
        p50_ms=total.response_ms.p50,
        p99_ms=total.response_ms.p99,
        steal=round(steal, 4),
        void=found.late_because,
        batches=dict(sorted(seen.batches.items())),
        response=pack(seen.response),
    )


def read_measured(document: Mapping[str, Any]) -> Measured:
    """From a line of JSON; ValueError, KeyError or TypeError if it is none of ours."""
    values = {name.name: document[name.name] for name in fields(Measured)}
    values["batches"] = {int(size): int(count) for size, count in document["batches"].items()}
    values["void"] = tuple(str(reason) for reason in document["void"])
    found = Measured(**values)
    unpack(found.response)
    return found


def pack(histogram: Histogram) -> dict[str, Any]:
    if not histogram.count:
        return {"buckets": []}
    buckets = [[index, count] for index, count in sorted(histogram.buckets.items())]
    return {
        "buckets": buckets,
        "least": histogram.least,
        "most": histogram.most,
        "total": histogram.total,
    }


def unpack(document: Mapping[str, Any]) -> Histogram:
    histogram = Histogram()
    buckets = {int(index): int(count) for index, count in document["buckets"]}
    if buckets:
        histogram.buckets = buckets
        histogram.count = sum(buckets.values())
        histogram.least, histogram.most = float(document["least"]), float(document["most"])
        histogram.total = float(document["total"])
    return histogram
