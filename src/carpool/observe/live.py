"""The counters as the console reads them: cumulative, so that each reader takes differences of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from carpool.observe import columns
from carpool.observe.columns import Column, Histogram
from carpool.observe.counters import Cells


class HistogramDocument(TypedDict):
    buckets: list[int]  # not cumulative over the bounds; the last one is everything above
    sum: float


class ModelCounts(TypedDict):
    ok: int
    failures: dict[str, int]  # only what has happened
    sheds: dict[str, int]
    request: HistogramDocument
    queue: HistogramDocument
    infer: HistogramDocument
    batch: HistogramDocument
    pending: int
    saturation: float
    speed_ratio: float  # 0 without a promise


class ServerCounts(TypedDict):
    connections: int
    bytes_received: int
    bytes_sent: int
    restarts: dict[str, int]


BOUNDS: Mapping[str, list[float]] = {
    "seconds": list(columns.SECONDS_BOUNDS),
    "batch": list(columns.BATCH_BOUNDS),
}
"""Of all histograms: said once, not once per model."""


def model_counts(cells: Cells) -> ModelCounts:
    return {
        "ok": int(sum(cells[columns.REQUEST_SECONDS.buckets])),
        "failures": _happened(cells, columns.FAILURES),
        "sheds": _happened(cells, columns.SHED),
        "request": _histogram(cells, columns.REQUEST_SECONDS),
        "queue": _histogram(cells, columns.QUEUE_SECONDS),
        "infer": _histogram(cells, columns.INFER_SECONDS),
        "batch": _histogram(cells, columns.BATCH_SIZE),
        "pending": int(cells[columns.PENDING]),
        "saturation": round(cells[columns.SATURATION], 4),
        "speed_ratio": round(cells[columns.SPEED_RATIO], 4),
    }


def server_counts(cells: Cells) -> ServerCounts:
    return {
        "connections": int(cells[columns.CONNECTIONS]),
        "bytes_received": int(cells[columns.BYTES_RECEIVED]),
        "bytes_sent": int(cells[columns.BYTES_SENT]),
        "restarts": _happened(cells, columns.RESTARTS),
    }


def _happened(cells: Cells, words: Mapping[str, Column]) -> dict[str, int]:
    return {word: int(cells[column]) for word, column in words.items() if cells[column]}


def _histogram(cells: Cells, histogram: Histogram) -> HistogramDocument:
    return {"buckets": list(map(int, cells[histogram.buckets])), "sum": round(cells[histogram.sum], 6)}
