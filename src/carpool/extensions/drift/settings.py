"""Reads `[drift]` of model.toml: which part of the traffic is measured, and when it counts as changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from carpool.config.model import ModelConfig
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable

_HOURS = re.compile(r"first-([0-9]{1,4}(?:\.[0-9]{1,6})?)h")
LEAST_HOURS, MOST_HOURS = 0.01, 24 * 90.0


@dataclass(frozen=True, slots=True)
class UncertainSettings:
    """Defines which pictures are stored for labelling: those with a score in this range, or whose two best
    classes are no further apart than the margin. Without a folder, none is stored."""

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


def drift_settings(config: ModelConfig) -> DriftSettings | None:
    """Returns a model's; None: nothing of its traffic is looked at."""
    settings = config.extra.get("drift")
    return settings if isinstance(settings, DriftSettings) else None


def _read(top: TomlTable) -> DriftSettings | None:
    table = top.table("drift")
    if table is None:
        return None
    usual = DriftSettings()
    sample = table.number("sample", 0.0, 1.0, above=True)
    window_h = table.number("window_h", LEAST_HOURS, MOST_HOURS)
    psi = table.number("psi", 0.0, 100.0, above=True)
    return DriftSettings(
        usual.sample if sample is None else sample,
        usual.window_h if window_h is None else window_h,
        _drift_reference(table) or usual.reference,
        usual.psi if psi is None else psi,
        _uncertain(table.table("uncertain")),
    )


def _drift_reference(table: TomlTable) -> str | None:
    text = table.text("reference")
    if text is None or hours_of(text):
        return text
    if not text.endswith(".json"):
        raise table.error(
            "reference",
            f'must be like "first-24h", with {LEAST_HOURS:g} to {MOST_HOURS:g} hours, or a .json file, '
            f'not "{text[:64]}"',
        )
    return table.inside("reference")


def _uncertain(table: TomlTable | None) -> UncertainSettings:
    usual = UncertainSettings()
    if table is None:
        return usual
    folder = table.text("folder") or ""
    if folder and not folder.startswith("/"):
        table.inside("folder")
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


PART = SettingsPart(
    kind=DriftSettings,
    tables={
        "drift": ("sample", "window_h", "reference", "psi", "uncertain"),
        "drift.uncertain": ("folder", "score", "margin", "per_hour", "mb"),
    },
    read=_read,
)
