"""Keeps fifteen minutes of what the server did, one point a second, in the memory that all processes share.

One process writes points (`HistoryKeeper`, in the supervisor, which outlives front ends and engines), any may
read them: nothing is asked of it, and nothing is done for single requests. A point is JSON, and holds what
happened since the one before it. Memory is bounded: where many models are busy, the oldest points are
overwritten before their time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from carpool.extensions import installed
from carpool.observe import columns
from carpool.observe.columns import Column, HistogramColumns
from carpool.observe.counters import Cells, Table
from carpool.observe.gpu_readings import Gpus
from carpool.observe.logs import logger
from carpool.observe.process_tree import family, read_proc
from carpool.observe.steady_time import steady_time

EVERY_S = 1.0
MOST_SENDERS = 20

_log = logger("history")

Document = dict[str, Any]


def _of_extension(extension: str, source: str) -> HistogramColumns | tuple[Column, ...]:
    """Returns a histogram of an extension, or the columns whose cells add up to the source."""
    found = columns.OF_EXTENSIONS.get((extension, source))
    return found if isinstance(found, HistogramColumns) else columns.summed(extension, source)


_OF_EXTENSIONS = {
    field: _of_extension(name, source)
    for name, extension in installed().items()
    for field, source in extension.history.items()
    if isinstance(source, str)
}
_COUNTERS = {field: found for field, found in _OF_EXTENSIONS.items() if isinstance(found, tuple)}
_SEVERAL_GAUGES: Mapping[str, Sequence[tuple[Column, ...]]] = {
    field: [columns.summed(name, source) for source in sources]
    for name, extension in installed().items()
    for field, sources in extension.history.items()
    if isinstance(sources, tuple)
}
_HISTOGRAMS: Mapping[str, HistogramColumns] = {
    "latency": columns.REQUEST_SECONDS,
    "queue": columns.QUEUE_SECONDS,
    "infer": columns.INFER_SECONDS,
    "batch": columns.BATCH_SIZE,
    **{name: found for name, found in _OF_EXTENSIONS.items() if isinstance(found, HistogramColumns)},
}
_FAILURES = {word: column for word, column in columns.FAILURES.items() if word != "REJECTED"}
_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
_GAUGES: Mapping[str, Column] = {
    "pending": columns.PENDING,
    "saturation": columns.SATURATION,
}
_PAGE = os.sysconf("SC_PAGE_SIZE")


def keep_history(table: Table) -> Callable[[], None]:
    """Write a point a second from the running loop on, until what is returned is called."""
    loop = asyncio.get_running_loop()
    keeper = HistoryKeeper(table)
    timer = loop.call_later(EVERY_S, lambda: None)

    def look() -> None:
        nonlocal timer
        timer = loop.call_later(EVERY_S, look)
        try:
            keeper.look()
        except Exception:  # what is shown is no reason to lose what is served
            _log.exception("history-failed")

    timer.cancel()
    look()
    return lambda: timer.cancel()


def quantile(buckets: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """The value below which this share of the observations lies, interpolated inside its bucket. None without
    any; the last bound where it is only known to be above that."""
    wanted = share * sum(buckets)
    if not wanted:
        return None
    below = 0.0
    for index, bound in enumerate(bounds):
        here = buckets[index]
        if here and below + here >= wanted:
            start = bounds[index - 1] if index else 0.0
            return start + (bound - start) * (wanted - below) / here
        below += here
    return bounds[-1]


class HistoryKeeper:
    """Writes the points. `look` is called once a second, by one process."""

    def __init__(
        self,
        table: Table,
        now: Callable[[], float] = time.monotonic,
        day: Callable[[], float] | None = None,
    ) -> None:
        """Takes `day`, a steady clock of the time of day: a point that seems to be hours after the one before
        would push all others out."""
        self._table = table
        self._now = now
        self._day = day or steady_time()
        self._gpus = Gpus()
        self._before = {row.slot: row.cells for row in table.models()}
        self._server = table.server()
        self._at = now()
        self._number = 0
        self._cpu = _cpu_seconds(family(os.getpid()))

    def look(self) -> None:
        now, wall = self._now(), self._day()
        self._number = max(self._number + 1, int(wall))
        rows = self._table.models()
        points = {
            f"{row.model}/{row.version}": _difference(self._before.get(row.slot), row.cells) for row in rows
        }
        self._before = {row.slot: row.cells for row in rows}
        seconds = now - self._at
        document = {
            "number": self._number,
            "time": round(wall, 3),
            "seconds": round(seconds, 3),
            "server": self._server_point(seconds),
            "models": {name: point for name, point in points.items() if point},
        }
        self._at = now
        shared = self._table.history
        shared.write(self._number, orjson.dumps(document), shared.senders() or b"[]")

    def _server_point(self, seconds: float) -> Document:
        before, self._server = self._server, self._table.server()
        processes = family(os.getpid())
        cpu, self._cpu = self._cpu, _cpu_seconds(processes)
        known = sum(self._cpu[pid] - cpu.get(pid, self._cpu[pid]) for pid in self._cpu)
        return {
            "connections": int(self._server[columns.CONNECTIONS]),
            "bytes_received": int(self._server[columns.BYTES_RECEIVED] - before[columns.BYTES_RECEIVED]),
            "bytes_sent": int(self._server[columns.BYTES_SENT] - before[columns.BYTES_SENT]),
            "cores": round(known / seconds, 2) if seconds > 0 else 0.0,
            "memory_bytes": _memory_bytes(processes),
            "gpus": [
                {
                    "uuid": uuid,
                    "utilization": _known(gpu.utilization),
                    "memory_used_bytes": _known(gpu.memory_used_bytes),
                    "memory_total_bytes": _known(gpu.memory_total_bytes),
                }
                for uuid, gpu in self._gpus.read()
            ],
        }


def _difference(before: Cells | None, after: Cells) -> Document:
    """Returns what happened between the two; nothing for a model at rest. Without the first, since it was
    loaded."""
    before = [0.0] * len(after) if before is None else before
    point: Document = {}
    for name, histogram in _HISTOGRAMS.items():
        buckets = [b - a for a, b in zip(before[histogram.buckets], after[histogram.buckets], strict=True)]
        if any(buckets):
            happened = {str(index): int(count) for index, count in enumerate(buckets) if count}
            point[name] = {"buckets": happened, "sum": round(after[histogram.sum] - before[histogram.sum], 6)}
            if name == "latency":
                point |= _latency(buckets, histogram.bounds)
    for name, words in (("rejected", columns.SHED), ("failed", _FAILURES)):
        more = {word: int(after[column] - before[column]) for word, column in words.items()}
        if any(more.values()):
            point[name] = {word: count for word, count in more.items() if count}
    for name, summed in _COUNTERS.items():
        if grown := sum(after[one] - before[one] for one in summed):
            point[name] = int(grown)
    return point | _gauges(after)


def _latency(buckets: Sequence[float], bounds: Sequence[float]) -> Document:
    found = {word: quantile(buckets, bounds, share) for word, share in _PERCENTILES.items()}
    shown = {word: round(value * 1e3, 3) for word, value in found.items() if value is not None}
    return {"answered": int(sum(buckets)), **shown}


def _gauges(after: Cells) -> Document:
    found: Document = {name: round(after[column], 4) for name, column in _GAUGES.items() if after[column]}
    for name, sums in _SEVERAL_GAUGES.items():
        values = [int(sum(after[one] for one in summed)) for summed in sums]
        if values[0]:
            found[name] = values
    return found


def _known(value: float) -> float | None:
    return None if value != value else value  # it does not say


def _cpu_seconds(processes: Sequence[int]) -> dict[int, float]:
    tick = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for pid in processes:
        try:
            fields = read_proc(f"{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        seconds[pid] = (int(fields[11]) + int(fields[12])) / tick
    return seconds


def _memory_bytes(processes: Sequence[int]) -> int:
    """Returns what is theirs alone, and the largest part that one of them shares with others."""
    own, shared = 0, 0
    for pid in processes:
        try:
            _, resident, with_others, *_ = map(int, read_proc(f"{pid}/statm").split())
        except OSError:
            continue
        own += resident - with_others
        shared = max(shared, with_others)
    return (own + shared) * _PAGE
