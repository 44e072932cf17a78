"""When each request of an open loop is to be sent: known beforehand, whatever the server does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from random import Random

from carpool.errors import InvalidInput
from carpool.lab.traffic import Bursty, Poisson, Traffic
from carpool.sim.arrivals import Arrival

MOST_REQUESTS = 20_000_000  # in one run: some 200 MB of times
_AT_ONCE = 500_000  # arrivals made in one piece: as objects they take ten times the memory


@dataclass(frozen=True, slots=True)
class Constant:
    """The same gap between any two."""

    name: str = "constant"
    own_rate: float | None = None
    even: bool = True

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:  # noqa: ARG002
        count = ceil(seconds * rate - 1e-6)  # a whole number of gaps, give or take a rounding
        return [Arrival(number / rate) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run with a rate of its own, in requests per second; a warm-up is sent but not counted."""

    rate: float
    seconds: float
    warmup: bool = False

    @property
    def name(self) -> str:
        return "warm-up" if self.warmup else f"{self.rate:g}/s for {self.seconds:g} s"


def check_length(phases: Sequence[Phase]) -> None:
    expected = sum(phase.rate * phase.seconds for phase in phases)
    if not expected <= MOST_REQUESTS:
        raise InvalidInput(
            f"{expected:,.0f} requests are more than the {MOST_REQUESTS:,} that one run may hold: "
            "lower the rate or the duration"
        )


class Schedule:
    """Times from the start, rising, and which phase, how many images and whose each request is."""

    def __init__(self, phases: Sequence[Phase], traffic: Traffic, seed: int = 1) -> None:
        check_length(phases)
        self.seconds = sum(phase.seconds for phase in phases)
        self.times = array("d")
        self.phases = array("H")
        self.images = array("H")
        self._sources: list[str] = []  # shorter than the rest where nobody is named
        random = Random(seed)
        start = 0.0
        for number, phase in enumerate(phases):
            for offset, seconds in _pieces(traffic, phase):
                found = traffic.arrivals(phase.rate, seconds, random)
                self._add(number, start + offset, found)
            start += phase.seconds

    def __len__(self) -> int:
        return len(self.times)

    def source(self, number: int) -> str:
        return self._sources[number] if number < len(self._sources) else ""

    def _add(self, phase: int, start: float, arrivals: Sequence[Arrival]) -> None:
        if any(arrival.source for arrival in arrivals):
            self._sources += [""] * (len(self.times) - len(self._sources))
            self._sources += [arrival.source for arrival in arrivals]
        self.times.extend(start + arrival.at for arrival in arrivals)
        self.phases.extend(phase for _ in arrivals)
        self.images.extend(min(arrival.images, 0xFFFF) for arrival in arrivals)


def _pieces(traffic: Traffic, phase: Phase) -> Iterator[tuple[float, float]]:
    """The phase in parts that can be made one after the other, or whole if it is not large."""
    unit = {Bursty: getattr(traffic, "period", 0.0), Poisson: 1.0, Constant: 1 / phase.rate}.get(
        type(traffic)
    )
    if unit is None or phase.rate * phase.seconds <= _AT_ONCE:
        yield 0.0, phase.seconds
        return
    length = max(1, floor(_AT_ONCE / phase.rate / unit)) * unit
    offset = 0.0
    while offset < phase.seconds:
        yield offset, min(length, phase.seconds - offset)
        offset += length
