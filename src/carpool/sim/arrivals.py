"""When requests come: Poisson, bursts, cameras, or a recorded trace. Plain lists of arrivals, seeded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

_LONGEST_LINE = 1 << 16
_MOST_LINES = 5_000_000  # as objects they take about a GB
_MOST_SHOWN = 10


class TraceError(ValueError):
    """A trace file that cannot be replayed; the message names the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds from the start, how many images it holds, and who sent it."""

    at: float
    images: int = 1
    source: str = ""
    priority: int = 0


def poisson(rate: float, seconds: float, random: Random) -> list[Arrival]:
    """Independent clients: exponential gaps."""
    return list(_poisson(rate, 0.0, seconds, random))


def bursty(
    rate: float,
    seconds: float,
    random: Random,
    *,
    factor: float = 3.0,
    length: float = 0.5,
    period: float = 2.5,
) -> list[Arrival]:
    """Poisson whose rate is `factor` times its base for `length` of every `period`; `rate` is the mean."""
    base = rate / (1 + (factor - 1) * length / period)
    arrivals: list[Arrival] = []
    start = 0.0
    while start < seconds:
        surge_ends = min(start + length, seconds)
        arrivals += _poisson(base * factor, start, surge_ends, random)
        arrivals += _poisson(base, surge_ends, min(start + period, seconds), random)
        start += period
    return arrivals


def cameras(
    count: int, fps: float, seconds: float, random: Random, *, aligned: bool = False
) -> list[Arrival]:
    """`count` cameras with a steady frame rate: phases at random, or all at the same moment."""
    arrivals = []
    for camera in range(count):
        phase = 0.0 if aligned else random.random() / fps
        source = f"camera-{camera}"
        frames = range(int((seconds - phase) * fps) + 1)
        arrivals += [Arrival(phase + frame / fps, source=source) for frame in frames]
    return sorted((a for a in arrivals if a.at < seconds), key=lambda a: a.at)


def trace(path: Path, model: str = "") -> list[Arrival]:
    """A recording: JSON lines with `time` in seconds, and if known `model`, `images` and `source`.

    `model` is whose arrivals are wanted; it has to be said where there are several.
    """
    by_model: dict[str, list[Arrival]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number in count(1):
            line = file.readline(_LONGEST_LINE)
            if not line:
                break
            if number > _MOST_LINES:
                raise TraceError(f"{path} has more than {_MOST_LINES:,} lines: cut it into pieces")
            if line.strip():
                arrival, whose = _trace_line(line, f"{path} line {number}")
                by_model.setdefault(whose, []).append(arrival)
    if not by_model:
        raise TraceError(f'{path} holds no arrivals: write one JSON object a line, like {{"time": 0.25}}')
    arrivals = _of_model(by_model, model, path)
    arrivals.sort(key=lambda arrival: arrival.at)
    first = arrivals[0].at
    return [Arrival(a.at - first, a.images, a.source, a.priority) for a in arrivals]


def _of_model(by_model: dict[str, list[Arrival]], model: str, path: Path) -> list[Arrival]:
    """Those of one model; what names none is anybody's."""
    unnamed = by_model.pop("", [])
    if not model and len(by_model) > 1:
        raise TraceError(
            f"{path} has arrivals for several models: say which with --model, of {_names(by_model)}"
        )
    if model and by_model and model not in by_model:
        raise TraceError(f"{path} has no arrivals for model {model!r}, but for {_names(by_model)}")
    named = by_model.get(model) or [arrival for arrivals in by_model.values() for arrival in arrivals]
    return named + unnamed


def _names(by_model: dict[str, list[Arrival]]) -> str:
    names = [name[:80] for name in sorted(by_model)]
    return ", ".join(names[:_MOST_SHOWN]) + (" …" if len(names) > _MOST_SHOWN else "")


def _poisson(rate: float, start: float, end: float, random: Random) -> Iterator[Arrival]:
    at = start + random.expovariate(rate)
    while at < end:
        yield Arrival(at)
        at += random.expovariate(rate)


def _trace_line(line: str, where: str) -> tuple[Arrival, str]:
    """And whose it is."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f'{where} is not JSON: write one object a line, like {{"time": 0.25}}') from None
    time = entry.get("time") if isinstance(entry, dict) else None
    if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < 1e15:
        raise TraceError(f'{where} needs "time": a number of seconds')
    images = entry.get("images", 1)
    if isinstance(images, bool) or not isinstance(images, int) or images < 1:
        raise TraceError(f'{where} has "images": {images!r}; it must be a whole number from 1')
    return Arrival(float(time), images, str(entry.get("source", ""))), str(entry.get("model", ""))
