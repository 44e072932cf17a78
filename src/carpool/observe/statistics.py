"""Writes Triton's statistics document, from the same counters as the metrics page.

Exact times per batch size would take too many columns, so the engine keeps those in its own memory and builds
the document. They start again with the engine; everything else goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic, time
from typing import Any, NamedTuple

from carpool.errors import CarpoolError
from carpool.extensions import installed
from carpool.observe import columns
from carpool.observe.columns import Column, HistogramColumns
from carpool.observe.counters import Cells, CounterRow, ModelCells, Row, count_failure
from carpool.types import Timing

Document = dict[str, Any]


class BatchStatistics:
    """How long batches of each size took, of one model version: an execution counts once, not per request."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: dict[int, list[int]] = {}  # count, then nanoseconds of input, infer, output

    def add(self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        size = self._sizes.setdefault(batch_size, [0, 0, 0, 0])
        size[0] += 1
        size[1] += input_ns
        size[2] += infer_ns
        size[3] += output_ns

    def document(self) -> list[Document]:
        return [
            {
                "batch_size": batch_size,
                "compute_input": {"count": count, "ns": input_ns},
                "compute_infer": {"count": count, "ns": infer_ns},
                "compute_output": {"count": count, "ns": output_ns},
            }
            for batch_size, (count, input_ns, infer_ns, output_ns) in sorted(self._sizes.items())
        ]


class VersionCounters:
    """Holds all that is counted of one model version by the engine."""

    __slots__ = ("batches", "last_used", "recent", "row", "server_row", "slot")

    def __init__(self, slot: CounterRow, row: Row, server_row: Row) -> None:
        self.slot = slot  # where its row is
        self.row = row
        self.server_row = server_row
        self.batches = BatchStatistics()
        self.recent = RecentBatches()
        self.last_used = monotonic()  # its last batch, or else its beginning

    def ran(
        self, images: int, queued: Sequence[float], input_s: float, infer_s: float, output_s: float
    ) -> None:
        """Counts one execution that succeeded. `queued` is each request's wait in seconds."""
        ended_ms = time() * 1e3
        self.row.add_batch(
            images, queued, input_s=input_s, infer_s=infer_s, output_s=output_s, ended_ms=ended_ms
        )
        self.batches.add(images, round(input_s * 1e9), round(infer_s * 1e9), round(output_s * 1e9))

    def answered(self, images: int, timing: Timing) -> None:
        """A request that went through several models was answered: it counts as a batch of its own."""
        parts = timing.input, timing.infer, timing.output
        self.ran(images, [timing.queue], *parts)
        self.recent.add(images, sum(parts), monotonic())

    def asked(self, error: CarpoolError | None, seconds: float) -> None:
        """Counts what came of it when another model of this engine asked it, as a step or by a call of its
        own. What clients ask is counted by their front ends."""
        if error is None:
            self.row.observe(columns.REQUEST_SECONDS, seconds)
        else:
            count_failure(self.row, error, seconds)


_OF_EXTENSIONS = {
    field: (columns.summed(name, counts), columns.single(name, seconds))
    for name, extension in installed().items()
    for field, (counts, seconds) in extension.statistics.items()
}
"""By field of Triton's document: the columns of its count, and that of its seconds."""


def model_statistics(row: ModelCells, batches: BatchStatistics) -> Document:
    cells = row.cells
    failures = int(sum(cells[column] for column in columns.FAILURES.values()))
    executed = _count(cells, columns.INFER_SECONDS)
    return {
        "name": row.model,
        "version": row.version,
        "last_inference": int(cells[columns.LAST_INFERENCE_MS]),
        "inference_count": int(cells[columns.BATCH_SIZE.sum]),
        "execution_count": _count(cells, columns.BATCH_SIZE),
        "inference_stats": {
            "success": _observed(cells, columns.REQUEST_SECONDS),
            "fail": _duration(failures, cells[columns.FAILURE_SECONDS]),
            "queue": _observed(cells, columns.QUEUE_SECONDS),
            "compute_input": _duration(executed, cells[columns.INPUT_SECONDS]),
            "compute_infer": _observed(cells, columns.INFER_SECONDS),
            "compute_output": _duration(executed, cells[columns.OUTPUT_SECONDS]),
            **{
                field: _duration(int(sum(cells[one] for one in counts)), cells[seconds])
                for field, (counts, seconds) in _OF_EXTENSIONS.items()
            },
        },
        "response_stats": {},
        "batch_stats": batches.document(),
        "memory_usage": [],
    }


def statistics(models: Iterable[Document]) -> Document:
    return {"model_stats": list(models)}


def _observed(cells: Cells, histogram: HistogramColumns) -> Document:
    return _duration(_count(cells, histogram), cells[histogram.sum])


def _count(cells: Cells, histogram: HistogramColumns) -> int:
    return int(sum(cells[histogram.buckets]))


def _duration(count: int, seconds: float) -> Document:
    return {"count": count, "ns": round(seconds * 1e9)}


# ---- as the console reads them: cumulative, so that each reader takes differences of its own ---------------


BOUNDS: Mapping[str, list[float]] = {
    "seconds": list(columns.SECONDS_BOUNDS),
    "batch": list(columns.BATCH_BOUNDS),
}
"""Of all histograms: said once, not once per model."""


def model_counts(cells: Cells) -> Document:
    """A histogram's buckets are not cumulative over the bounds; the last one is everything above."""
    return {
        "ok": _count(cells, columns.REQUEST_SECONDS),
        "failures": _happened(cells, columns.FAILURES),  # only what has happened
        "sheds": _happened(cells, columns.SHED),
        "request": histogram_counts(cells, columns.REQUEST_SECONDS),
        "queue": histogram_counts(cells, columns.QUEUE_SECONDS),
        "infer": histogram_counts(cells, columns.INFER_SECONDS),
        "batch": histogram_counts(cells, columns.BATCH_SIZE),
        "pending": int(cells[columns.PENDING]),
        "saturation": round(cells[columns.SATURATION], 4),
        "speed_ratio": round(cells[columns.SPEED_RATIO], 4),  # 0 without a promise
    }


def step_counts(step: str, cells: Cells) -> Document:
    """Returns the counts of a step: how often and how long each of its phases was, and how many
    images it got."""
    phases = {name: _summed(cells, histogram) for name, histogram in columns.STEP_PHASES.items()}
    later = round(cells[columns.STEP_LATER], 6)
    return {"step": step, **phases, "fan_out": _summed(cells, columns.FAN_OUT), "later_s": later}


def _summed(cells: Cells, histogram: HistogramColumns) -> Document:
    return {"count": _count(cells, histogram), "sum": round(cells[histogram.sum], 6)}


def server_counts(cells: Cells) -> Document:
    return {
        "connections": int(cells[columns.CONNECTIONS]),
        "bytes_received": int(cells[columns.BYTES_RECEIVED]),
        "bytes_sent": int(cells[columns.BYTES_SENT]),
        "restarts": _happened(cells, columns.RESTARTS),
    }


def _happened(cells: Cells, words: Mapping[str, Column]) -> dict[str, int]:
    return {word: int(cells[column]) for word, column in words.items() if cells[column]}


def histogram_counts(cells: Cells, histogram: HistogramColumns) -> Document:
    return {"buckets": list(map(int, cells[histogram.buckets])), "sum": round(cells[histogram.sum], 6)}


# ---- the batches of the last seconds, for displays of what a model does now

RECENT_S = 10  # long enough for a mean that does not flicker, short enough to follow a surge


class RecentSize(NamedTuple):
    images: int
    batches: int
    seconds: float  # of one batch, on average


class RecentBatches:
    """Counts by the second, so that the past falls off at the end and memory stays bounded."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        self._cells: deque[tuple[int, dict[int, list[float]]]] = deque(maxlen=RECENT_S)

    def add(self, images: int, seconds: float, now: float) -> None:
        """A batch took so long."""
        second = int(now)
        if not self._cells or self._cells[-1][0] != second:
            self._cells.append((second, {}))
        found = self._cells[-1][1].setdefault(images, [0, 0.0])
        found[0] += 1
        found[1] += seconds

    def sizes(self, now: float) -> list[RecentSize]:
        """Returns every size that was run, the smallest first."""
        sums: dict[int, list[float]] = {}
        for second, cell in self._cells:
            if second <= now - RECENT_S:
                continue
            for images, (batches, seconds) in cell.items():
                found = sums.setdefault(images, [0, 0.0])
                found[0] += batches
                found[1] += seconds
        return [RecentSize(images, int(n), total / n) for images, (n, total) in sorted(sums.items())]
