"""Fixed results of a sweep that nobody ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool.lab.load.tally import Histogram
from carpool.lab.sweep.sweep_prediction import Predicted
from carpool.lab.sweep.sweep_results import Results
from carpool.lab.sweep.sweep_runs import FIXED, PROMISE, MeasuredRun, Setting, pack

SLO_MS = 50.0
CAPACITY = 100.0
PROMISED, DELAYED = Setting(PROMISE, SLO_MS), Setting(FIXED, None, 10.0, 8)


def run(setting: str, rate: float, repeat: int = 0, **changes: Any) -> MeasuredRun:
    """Ten seconds in which everybody is answered in 20 ms, unless `changes` say something else."""
    offered = round(rate * 10)
    ms: Sequence[float] = changes.pop("ms", [20.0] * offered)
    good = sum(value <= SLO_MS for value in ms)
    histogram = Histogram(value / 1e3 for value in ms)
    values: dict[str, Any] = {
        "setting": setting,
        "rate": rate,
        "repeat": repeat,
        "load": rate / CAPACITY,
        "at": "2026-11-15 12:00:00 UTC",
        "seconds": 10.0,
        "offered": offered,
        "answered": len(ms),
        "good": good,
        "refused": {"overload": offered - len(ms)} if len(ms) < offered else {},
        "failed": {},
        "timed_out": 0,
        "unanswered": 0,
        "goodput_rps": good / 10,
        "attainment": good / offered,
        "p50_ms": histogram.percentile(0.5) * 1e3,
        "p99_ms": histogram.percentile(0.99) * 1e3,
        "steal": 0.0,
        "void": (),
        "batches": {1: len(ms) - len(ms) // 2, 4: len(ms) // 2},
        "response": pack(histogram),
    }
    return MeasuredRun(**values | changes)


def runs() -> list[MeasuredRun]:
    """The promise refuses what is too much, the knobs answer it late; the last repeat of one is void."""
    found = []
    for repeat in range(2):
        for rate in (30.0, 90.0, 150.0):
            kept = min(round(rate * 10), 1000)
            found.append(run(PROMISED.name, rate, repeat, ms=[20.0 + repeat] * (kept - 5) + [45.0] * 5))
            late = [200.0] * 1500 if rate > CAPACITY else [30.0] * round(rate * 10)
            void = ("the generator sent requests late",) if repeat and rate == 90.0 else ()
            found.append(run(DELAYED.name, rate, repeat, ms=late, void=void))
    return found


def results(**changes: Any) -> Results:
    prediction = [
        Predicted(name, rate, rate, min(rate, CAPACITY), min(1.0, CAPACITY / rate), 40.0)
        for name in (PROMISED.name, DELAYED.name)
        for rate in (15.0, 30.0, 90.0, 150.0)
    ]
    values: dict[str, Any] = {
        "model": "detector",
        "target": "one server per setting",
        "requests": "3 images in turn, one in a request",
        "slo_ms": SLO_MS,
        "curve": "1:5,8:20",
        "curve_from": "measured by the server",
        "instances": 1,
        "capacity_rps": CAPACITY,
        "settings": (PROMISED, DELAYED),
        "seconds": 10.0,
        "planned_runs": 12,
        "runs": tuple(runs()),
        "prediction": tuple(prediction),
        "machine": "a computer, 2 cores",
        "date": "2026-11-15 12:05:00 UTC",
        "command": "carpool sweep detector",
        "versions": {"carpool": "0"},
    }
    return Results(**values | changes)
