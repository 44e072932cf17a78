"""What a scenario is fed with: a kind of traffic that can be played at any mean rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from carpool.errors import InvalidInput
from carpool.sim import arrivals as core
from carpool.sim.arrivals import Arrival


class Traffic(Protocol):
    """A kind of traffic."""

    @property
    def name(self) -> str: ...

    @property
    def own_rate(self) -> float | None:
        """Images per second where the traffic itself says so; otherwise somebody has to choose."""

    @property
    def even(self) -> bool:
        """Whether the mean rate says it all, so that the fluid bound of that rate is a fair yardstick."""

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent clients."""

    name: str = "poisson"
    own_rate: float | None = None
    even: bool = True

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        return core.poisson(rate, seconds, random)


@dataclass(frozen=True, slots=True)
class Bursty:
    """Poisson with regular surges; the rate is the mean over calm and surge."""

    factor: float = 3.0
    length: float = 0.5
    period: float = 2.5
    name: str = "bursty"
    own_rate: float | None = None
    even: bool = False

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        return core.bursty(rate, seconds, random, factor=self.factor, length=self.length, period=self.period)


@dataclass(frozen=True, slots=True)
class Cameras:
    """Steady frame rates. At another rate than its own it has more or fewer cameras, not another fps."""

    count: int
    fps: float
    aligned: bool = False
    per_source: bool = False
    name: str = "cameras"
    even: bool = False

    @property
    def own_rate(self) -> float:
        return self.count * self.fps

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        count = max(1, round(rate / self.fps))
        frames = core.cameras(count, self.fps, seconds, random, aligned=self.aligned)
        return frames if self.per_source else _one_source(frames)


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace; at another rate than its own it is played faster or slower."""

    recorded: list[Arrival] = field(repr=False)
    name: str = "trace"
    per_source: bool = False
    even: bool = False

    @classmethod
    def read(cls, path: Path, *, per_source: bool = False, model: str = "") -> Recording:
        try:
            recorded = core.trace(path, model)
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
        except core.TraceError as error:
            raise InvalidInput(str(error)) from None
        if recorded[-1].at == 0:
            raise InvalidInput(f"{path} spans no time: it needs arrivals at two different times at least")
        return cls(recorded if per_source else _one_source(recorded), f"trace:{path}", per_source)

    @property
    def span(self) -> float:
        return self.recorded[-1].at

    @property
    def own_rate(self) -> float:
        return sum(arrival.images for arrival in self.recorded) / self.span

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:  # noqa: ARG002
        slower = self.own_rate / rate
        played = (Arrival(a.at * slower, a.images, a.source, a.priority) for a in self.recorded)
        return [arrival for arrival in played if arrival.at < seconds]


def _one_source(arrivals: list[Arrival]) -> list[Arrival]:
    return [Arrival(a.at, a.images, "", a.priority) for a in arrivals]
