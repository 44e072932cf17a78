"""Reads `[drift]` of model.toml: what of the traffic is looked at, and from when on it is told to have
changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOURS = re.compile(r"first-([0-9]{1,4}(?:\.[0-9]{1,6})?)h")
LEAST_HOURS, MOST_HOURS = 0.01, 24 * 90.0


@dataclass(frozen=True, slots=True)
class UncertainSettings:
    """Defines which pictures are kept for somebody to label: those with a score in this range, or whose two
    best classes are no further apart than the margin. Without a folder none is."""

    folder: str = ""
    score: tuple[float, float] = (0.3, 0.5)
    margin: float = 0.1
    per_hour: int = 60
    mb: float = 512.0


@dataclass(frozen=True, slots=True)
class DriftSettings:
    sample: float = 0.05  # of the answers
    window_h: float = 1.0
    reference: str = "first-24h"  # or a file beside the settings, which `carpool drift learn --save` wrote
    psi: float = 0.2
    uncertain: UncertainSettings = UncertainSettings()

    @property
    def learn_s(self) -> float:
        """Returns for how long a reference is learned, when there is none."""
        return (hours_of(self.reference) or 24.0) * 3600.0

    @property
    def reference_file(self) -> str:
        return "" if hours_of(self.reference) else self.reference


def hours_of(text: str) -> float | None:
    """Returns the hours of `first-24h`, if it is that."""
    found = _HOURS.fullmatch(text)
    return float(found[1]) if found and LEAST_HOURS <= float(found[1]) <= MOST_HOURS else None
