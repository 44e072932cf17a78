"""What is asked of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from carpool import __version__
from carpool.config.fingerprint import take_fingerprint
from carpool.config.repository import ModelSource
from carpool.lab.load.trust import TRUSTING, Trust
from carpool.lab.sweep.grid import Setting

SLO_MS = 100.0  # where neither the command nor the model promises anything


@dataclass(frozen=True, slots=True)
class Order:
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

    def asked(self) -> dict[str, Any]:
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
