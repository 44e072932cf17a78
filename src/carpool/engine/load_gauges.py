"""Writes the demand for each model and its capacity to its row of the counters, for autoscalers and load
balancers.

Nothing is done for single requests: the schedulers count, and a timer looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from time import monotonic
from typing import Any

import orjson

from carpool.core.scaling import Arrivals, capacity
from carpool.core.scheduler import Scheduler
from carpool.engine.models.served import Served
from carpool.observe.columns import CAPACITY, LOAD, OFFERED
from carpool.observe.counters import Table
from carpool.observe.history import MOST_SENDERS

LOAD_WINDOW_S = 5.0
_LOOK_S = 0.5
_LATELY_S = 1.0
_LEAST_RPS = 0.01
_LONGEST_SOURCE = 80


def senders(models: Iterable[Served], now: float) -> list[dict[str, Any]]:
    """Returns the sources that send the most to the models just now, by images per second, and the keys they
    came with."""
    found = [
        (served.name, lane)
        for served in models
        if served.scheduler is not None
        for lane in served.scheduler.lanes
    ]
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for model, lane in found:
        source = lane.source[:_LONGEST_SOURCE] if lane.named else ""  # all addresses are one line
        line = lines.setdefault(
            (model, source),
            {"model": model, "source": source, "key": lane.holder, "offered_rps": 0.0, "queued": 0}
            | {"rejected": False},
        )
        line["offered_rps"] += lane.rate.at(now)
        line["queued"] += lane.waiting
        line["rejected"] = line["rejected"] or lane.refused > now - _LATELY_S
    most = nlargest(MOST_SENDERS, lines.values(), key=lambda line: line["offered_rps"])
    shown = [line for line in most if line["offered_rps"] >= _LEAST_RPS]
    return [line | {"offered_rps": round(line["offered_rps"], 2)} for line in shown]


class _Gauge:
    """Holds the gauges of one model version."""

    def __init__(self, shown: float, now: float) -> None:
        self.counted = 0  # of what its scheduler counted, on its row
        self._shown = shown  # of what all processes counted
        self._arrivals = Arrivals(LOAD_WINDOW_S)
        self._arrivals.add(0.0, now)

    def look(self, served: Served, scheduler: Scheduler, table: Table, now: float) -> None:
        more, self.counted = scheduler.asked_for - self.counted, scheduler.asked_for
        if more:
            served.counters.row.add(OFFERED, more)
        able = capacity(scheduler)
        served.counters.row.set(CAPACITY, able)
        if not able:
            served.counters.row.set(LOAD, 0.0)
            return
        offered = table.cells(served.counters.slot)[OFFERED]  # with what front ends refused themselves
        self._arrivals.seen(offered, self._shown, now)
        self._shown = offered
        served.counters.row.set(LOAD, 1.0 + self._arrivals.rate(LOAD_WINDOW_S, now) / able)


class LoadGauges:
    def __init__(self, table: Table, offered: Callable[[], Mapping[int, Served]]) -> None:
        self._table = table
        self._offered = offered
        self._gauges: dict[int, _Gauge] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.look(monotonic())
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self.start)

    def look(self, now: float) -> None:
        offered = self._offered()
        for key in self._gauges.keys() - offered.keys():
            del self._gauges[key]
        for key, served in offered.items():
            scheduler = served.scheduler
            if scheduler is None:
                continue
            if key not in self._gauges:
                self._gauges[key] = _Gauge(self._table.cells(served.counters.slot)[OFFERED], now)
            self._gauges[key].look(served, scheduler, self._table, now)
        self._table.history.tell_senders(orjson.dumps(senders(offered.values(), now)))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
