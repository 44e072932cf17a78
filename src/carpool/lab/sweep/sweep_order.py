"""What is asked of a sweep: every setting at every rate, as often as asked, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from carpool import __version__
from carpool.config.repository import ModelSource, take_fingerprint
from carpool.lab.load.facts import TRUSTING, Trust

PROMISE, KNOBS, AS_IS = "promise", "knobs", "as it is"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server batches. One that runs already is taken as it is, and then the rest may be unknown."""

    kind: str
    slo_ms: float | None = None
    max_delay_ms: float | None = None
    max_batch: int | None = None

    @property
    def name(self) -> str:
        """For people, and different for any two settings of a sweep."""
        if self.kind == PROMISE:
            return f"promise {self.slo_ms:g} ms"
        if self.kind == KNOBS:
            batch = "" if self.max_batch is None else f", batch {self.max_batch}"
            return f"knobs {self.max_delay_ms:g} ms{batch}"
        return self.kind


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a setting at a rate, in requests per second. `load` is the rate over the planned capacity."""

    setting: str
    rate: float
    repeat: int
    load: float | None = None

    @property
    def key(self) -> tuple[str, float, int]:
        return self.setting, self.rate, self.repeat

    @property
    def seed(self) -> int:
        """The same arrivals for every setting, so that only the setting differs; others in every repeat."""
        return self.repeat + 1


def settings_of(
    mode: str, slo_ms: float, delays_ms: Sequence[float], max_batches: Sequence[int]
) -> list[Setting]:
    """The promise, the knobs (every delay with every largest batch), or both."""
    found = [Setting(PROMISE, slo_ms=slo_ms)] if mode in (PROMISE, "both") else []
    if mode in (KNOBS, "both"):
        batches: Sequence[int | None] = max_batches or (None,)
        found += [Setting(KNOBS, None, delay, batch) for delay, batch in product(delays_ms, batches)]
    return found


def points(
    settings: Sequence[str], rates: Sequence[tuple[float, float | None]], repeats: int, seed: int
) -> Iterator[Point]:
    """Rates in a shuffled order, and at each rate the settings right after one another, beginning with
    another one every time: a noisy minute then hits all settings alike, and no rate always comes last."""
    random = Random(seed)
    turn = 0
    for repeat in range(repeats):
        for rate, load in random.sample(list(rates), len(rates)):
            for number in range(len(settings)):
                yield Point(settings[(number + turn) % len(settings)], rate, repeat, load)
            turn += 1


SLO_MS = 100.0  # where neither the command nor the model promises anything


@dataclass(frozen=True, slots=True)
class SweepOrder:
    """`url` is of a server that runs; without it, `place` is the model to serve. No `rates`: by `loads`."""

    settings: tuple[Setting, ...]
    model: str
    url: str = ""
    place: Path | None = None
    source: ModelSource | None = None
    slo_ms: float | None = None
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    seconds: float = 6.0
    warmup: float = 1.0
    repeats: int = 2
    seed: int = 1
    pictures: tuple[Path, ...] = ()  # none: the demo's, if the model takes pictures
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    curve: str = ""
    instances: int = 1
    command: str = "carpool sweep"
    trust: Trust = TRUSTING

    def identity(self) -> dict[str, Any]:
        """What must be equal for runs to belong together, in plain values."""
        return {
            "target": self.url or str(self.place),
            "model": self.model,
            "model files": _stamp(self.place),
            "settings": [asdict(setting) for setting in self.settings],
            "slo_ms": self.slo_ms,
            "rates": list(self.rates),
            "loads": list(self.loads),
            "seconds": self.seconds,
            "warmup": self.warmup,
            "repeats": self.repeats,
            "seed": self.seed,
            "images": [str(path) for path in self.pictures],
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "curve": self.curve,
            "instances": self.instances,
            "carpool": __version__,
        }


def _stamp(place: Path | None) -> str:
    """Changes with the model's files."""
    if place is None:
        return ""
    return blake2b(repr(take_fingerprint(place)).encode(), digest_size=8).hexdigest()
