"""Generates when requests come: Poisson, constant, bursts, cameras or a recorded trace. Plain lists,
seeded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from carpool.errors import InvalidInput

_LONGEST_LINE = 1 << 16
_MOST_LINES = 5_000_000  # as objects they take about a GB
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Arrival:
    """Describes one request: seconds from the start, how many images it holds, and who sent it."""

    at: float
    images: int = 1
    source: str = ""
    priority: int = 0


@dataclass(slots=True)
class Ride:
    """Describes what became of one request. A latency of None means that it was not answered."""

    arrival: Arrival
    latency: float | None = None
    refused: bool = False  # at the gate
    given_up: bool = False  # later
    replaced: bool = False  # by a newer frame of its source


def poisson(rate: float, seconds: float, random: Random) -> list[Arrival]:
    """Returns the arrivals of independent clients: exponential gaps."""
    return list(poisson_between(0.0, seconds, rate, random))


def trace(path: Path, model: str = "") -> list[Arrival]:
    """Reads a recording: JSON lines with `time` in seconds, and if known `model`, `images` and `source`.

    `model` is whose arrivals are wanted; it has to be said where there are several.
    """
    return _trace(path, model)[0]


def _trace(path: Path, model: str) -> tuple[list[Arrival], bool]:
    """Returns the arrivals, and whether a last line was left out because it was not written whole."""
    by_model: dict[str, list[Arrival]] = {}
    cut_off = False
    with path.open(encoding="utf-8", errors="replace") as file:
        for number in count(1):
            line = file.readline(_LONGEST_LINE)
            if not line:
                break
            if number > _MOST_LINES:
                raise InvalidInput(f"{path} has more than {_MOST_LINES:,} lines: cut it into pieces")
            if line.strip():
                try:
                    arrival, whose = _trace_line(line, f"{path} line {number}")
                except InvalidInput:
                    torn = not line.endswith("\n") and not _is_json(line)
                    cut_off = number > 1 and torn and not file.readline(1)
                    if not cut_off:
                        raise
                    break
                by_model.setdefault(whose, []).append(arrival)
    if not by_model:
        raise InvalidInput(f'{path} holds no arrivals: write one JSON object a line, like {{"time": 0.25}}')
    arrivals = _of_model(by_model, model, path)
    arrivals.sort(key=lambda arrival: arrival.at)
    first = arrivals[0].at
    return [replace(arrival, at=arrival.at - first) for arrival in arrivals], cut_off


def _of_model(by_model: dict[str, list[Arrival]], model: str, path: Path) -> list[Arrival]:
    """Returns the arrivals of one model; those that name none count for any."""
    unnamed = by_model.pop("", [])
    if not model and len(by_model) > 1:
        raise InvalidInput(
            f"{path} has arrivals for several models: say which with --model, of {_names(by_model)}"
        )
    if model and by_model and model not in by_model:
        raise InvalidInput(f"{path} has no arrivals for model {model!r}, but for {_names(by_model)}")
    named = by_model.get(model) or [arrival for arrivals in by_model.values() for arrival in arrivals]
    return named + unnamed


def _names(by_model: dict[str, list[Arrival]]) -> str:
    names = [name[:80] for name in sorted(by_model)]
    return ", ".join(names[:_MOST_SHOWN]) + (" …" if len(names) > _MOST_SHOWN else "")


def poisson_between(start: float, end: float, rate: float, random: Random) -> Iterator[Arrival]:
    at = start + random.expovariate(rate)
    while at < end:
        yield Arrival(at)
        at += random.expovariate(rate)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _trace_line(line: str, where: str) -> tuple[Arrival, str]:
    """Returns an arrival and whose it is."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidInput(f'{where} is not JSON: write one object a line, like {{"time": 0.25}}') from None
    time = entry.get("time") if isinstance(entry, dict) else None
    if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < 1e15:
        raise InvalidInput(f'{where} needs "time": a number of seconds')
    images = entry.get("images", 1)
    if isinstance(images, bool) or not isinstance(images, int) or images < 1:
        raise InvalidInput(f'{where} has "images": {images!r}; it must be a whole number from 1')
    return Arrival(float(time), images, str(entry.get("source", ""))), str(entry.get("model", ""))


class Traffic:
    """Represents a kind of traffic. `even`: the mean rate says it all, so that its fluid bound is a fair
    yardstick."""

    name = ""
    even = False

    @property
    def own_rate(self) -> float | None:
        """Returns images per second where the traffic sets a rate; otherwise the caller has to choose."""
        return None

    def arrivals(self, rate: float, seconds: float, random: Random) -> Iterable[Arrival]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Poisson(Traffic):
    """Generates independent clients."""

    name = "poisson"
    even = True

    def arrivals(self, rate: float, seconds: float, random: Random) -> Iterator[Arrival]:
        return poisson_between(0.0, seconds, rate, random)


@dataclass(frozen=True, slots=True)
class Constant(Traffic):
    """Generates the same gap between any two."""

    name = "constant"
    even = True

    def arrivals(self, rate: float, seconds: float, random: Random) -> Iterator[Arrival]:  # noqa: ARG002
        count = ceil(seconds * rate - 1e-6)  # a whole number of gaps, give or take a rounding
        return (Arrival(number / rate) for number in range(count))


@dataclass(frozen=True, slots=True)
class Bursty(Traffic):
    """Poisson with regular surges; the rate is the mean over calm and surge."""

    factor: float = 3.0
    length: float = 0.5
    period: float = 2.5
    name = "bursty"

    def arrivals(self, rate: float, seconds: float, random: Random) -> Iterator[Arrival]:
        """The rate is `factor` times its base for `length` of every `period`."""
        base = rate / (1 + (self.factor - 1) * self.length / self.period)
        start = 0.0
        while start < seconds:
            surge_ends = min(start + self.length, seconds)
            yield from poisson_between(start, surge_ends, base * self.factor, random)
            yield from poisson_between(surge_ends, min(start + self.period, seconds), base, random)
            start += self.period


@dataclass(frozen=True, slots=True)
class Cameras(Traffic):
    """Generates steady frame rates. At another rate than its own it has more or fewer cameras, not another
    fps."""

    count: int
    fps: float
    aligned: bool = False
    per_source: bool = False
    name = "cameras"

    @property
    def own_rate(self) -> float:
        return self.count * self.fps

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        """Returns frames with phases at random, or all at the same moment."""
        frames = []
        for camera in range(max(1, round(rate / self.fps))):
            phase = 0.0 if self.aligned else random.random() / self.fps
            source = f"camera-{camera}" if self.per_source else ""
            count = int((seconds - phase) * self.fps) + 1
            frames += [Arrival(phase + frame / self.fps, source=source) for frame in range(count)]
        return sorted((a for a in frames if a.at < seconds), key=lambda a: a.at)


@dataclass(frozen=True, slots=True)
class Recording(Traffic):
    """Plays a trace; at another rate than its own it is played faster or slower."""

    recorded: list[Arrival] = field(repr=False)
    name: str = "trace"
    per_source: bool = False
    cut_off: bool = False  # the file ended in the middle of a line, which was left out

    @classmethod
    def read(cls, path: Path, *, per_source: bool = False, model: str = "") -> Recording:
        try:
            recorded, cut_off = _trace(path, model)
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
        if recorded[-1].at == 0:
            raise InvalidInput(f"{path} spans no time: it needs arrivals at two different times at least")
        if not per_source:
            recorded = [replace(arrival, source="") for arrival in recorded]
        return cls(recorded, f"trace:{path}", per_source, cut_off)

    @property
    def span(self) -> float:
        return self.recorded[-1].at

    @property
    def own_rate(self) -> float:
        return sum(arrival.images for arrival in self.recorded) / self.span

    def part(self, share: float, random: Random) -> Recording:
        """Returns so much of it, drawn request by request: what one cell of a fleet gets."""
        if share >= 1.0:
            return self
        drawn = [arrival for arrival in self.recorded if random.random() < share]
        return replace(self, recorded=drawn or self.recorded[:1])

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:  # noqa: ARG002
        slower = self.own_rate / rate
        played = (Arrival(a.at * slower, a.images, a.source, a.priority) for a in self.recorded)
        return [arrival for arrival in played if arrival.at < seconds]
