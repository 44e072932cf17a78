"""When requests come: Poisson, bursts, cameras, or a recorded trace. Plain lists of arrivals, seeded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


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


def trace(path: Path) -> list[Arrival]:
    """A recording: JSON lines with `time` in seconds, and if known `images` and `source`."""
    arrivals = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if line.strip():
            arrivals.append(_trace_line(line, f"{path} line {number}"))
    if not arrivals:
        raise TraceError(f'{path} holds no arrivals: write one JSON object a line, like {{"time": 0.25}}')
    arrivals.sort(key=lambda arrival: arrival.at)
    first = arrivals[0].at
    return [Arrival(a.at - first, a.images, a.source, a.priority) for a in arrivals]


def _poisson(rate: float, start: float, end: float, random: Random) -> Iterator[Arrival]:
    at = start + random.expovariate(rate)
    while at < end:
        yield Arrival(at)
        at += random.expovariate(rate)


def _trace_line(line: str, where: str) -> Arrival:
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
    return Arrival(float(time), images, str(entry.get("source", "")))
