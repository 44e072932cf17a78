"""What a run is to do, apart from whom it asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from carpool.lab.load.schedule import Phase
from carpool.lab.traffic import Poisson, Traffic


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come when the schedule says, whether the server keeps up or not."""

    phases: tuple[Phase, ...]
    traffic: Traffic = field(default_factory=Poisson)
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients that each wait for an answer, think, and ask again; until one of the limits."""

    concurrency: int
    seconds: float | None = None
    requests: int | None = None
    think: float = 0.0
    warmup: float = 0.0  # seconds before the counted ones

    @property
    def phases(self) -> tuple[Phase, ...]:
        counted = Phase(0.0, self.seconds or 0.0)
        return (Phase(0.0, self.warmup, warmup=True), counted) if self.warmup else (counted,)


@dataclass(frozen=True, slots=True)
class Plan:
    """Times in seconds. `timeout` runs from the intended time; `drain` is for what is open at the end."""

    load: Open | Closed
    slo: float | None = None
    timeout: float = 10.0
    drain: float = 10.0
    batch: int = 1  # images in a request, where the schedule does not say otherwise
