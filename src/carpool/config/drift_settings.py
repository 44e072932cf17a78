"""`[drift]` of model.toml: what of the traffic is looked at, and from when on it is told to have changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from carpool.config.table import Table  # which knows these settings

Inside: TypeAlias = "Callable[[Table, str], str | None]"
"""Reads the name of a file inside the model's folder."""

_HOURS = re.compile(r"first-([0-9]{1,4}(?:\.[0-9]{1,6})?)h")
LEAST_HOURS, MOST_HOURS = 0.01, 24 * 90.0


@dataclass(frozen=True, slots=True)
class UncertainSettings:
    """Which pictures are kept for somebody to label: those with a score in this range, or whose two best
    classes are no further apart than the margin. Without a folder none is."""

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
        """For how long a reference is learned, when there is none."""
        return (_hours(self.reference) or 24.0) * 3600.0

    @property
    def reference_file(self) -> str:
        return "" if _hours(self.reference) else self.reference


def _hours(text: str) -> float | None:
    """Of `first-24h`, if it is that."""
    found = _HOURS.fullmatch(text)
    return float(found[1]) if found and LEAST_HOURS <= float(found[1]) <= MOST_HOURS else None


def read_drift(table: Table, inside: Inside) -> DriftSettings:
    usual = DriftSettings()
    sample = table.number("sample", 0.0, 1.0, above=True)
    window_h = table.number("window_h", LEAST_HOURS, MOST_HOURS)
    psi = table.number("psi", 0.0, 100.0, above=True)
    return DriftSettings(
        usual.sample if sample is None else sample,
        usual.window_h if window_h is None else window_h,
        _reference(table, inside) or usual.reference,
        usual.psi if psi is None else psi,
        _uncertain(table.table("uncertain"), inside),
    )


def _reference(table: Table, inside: Inside) -> str | None:
    text = table.text("reference")
    if text is None or _hours(text):
        return text
    if not text.endswith(".json"):
        raise table.error(
            "reference",
            f'must be like "first-24h", with {LEAST_HOURS:g} to {MOST_HOURS:g} hours, or a .json file, '
            f'not "{text[:64]}"',
        )
    return inside(table, "reference")


def _uncertain(table: Table | None, inside: Inside) -> UncertainSettings:
    usual = UncertainSettings()
    if table is None:
        return usual
    folder = table.text("folder") or ""
    if folder and not folder.startswith("/"):
        inside(table, "folder")
    score = table.numbers("score", 0.0) or usual.score
    if len(score) != 2 or not score[0] <= score[1] <= 1.0:
        raise table.error("score", "must be the lowest and the highest score, like [0.3, 0.5]")
    margin = table.number("margin", 0.0, 1.0)
    mb = table.number("mb", 0.0, 1e6, above=True)
    return UncertainSettings(
        folder,
        (score[0], score[1]),
        usual.margin if margin is None else margin,
        table.integer("per_hour", 1, 100_000) or usual.per_hour,
        usual.mb if mb is None else mb,
    )
