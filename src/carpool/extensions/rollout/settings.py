"""Describes how a version takes over from another, as its settings say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from carpool.vision.compare_settings import CompareSettings

if TYPE_CHECKING:
    from carpool.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Limits; None is a guard that is switched off. All but the first: so many times as often as stable, or
    as long."""

    disagreement: float | None = 0.05  # share of the answers that were compared
    late: float | None = 2.0
    errors: float | None = 2.0
    feedback: float | None = 1.5
    slower: float | None = None  # times as long as stable usually takes, also within the SLO
    memory_gb: float | None = None  # that loading the candidate may take
    confidence: float = 0.99
    on_breach: str = "rollback"  # or "pause"


@dataclass(frozen=True, slots=True)
class KeepSettings:
    """Describes where pictures that were answered differently are kept; without a folder, none is."""

    folder: str = ""
    pictures: int = 500
    mb: float = 512.0


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    candidate: int | None = None  # None: the newest
    shadow: float = 0.05  # of the requests; free capacity decides
    canary: tuple[float, ...] = (0.10, 0.50)
    shadow_h: float = 24.0
    canary_h: float = 48.0  # each step
    standby_h: float = 24.0
    least: int = 500  # comparisons, or answers, before a step may end
    sticky: str = "source"  # or "header:NAME", "request"
    promote: str = "proven"  # or "by-hand"
    fallback: bool = True
    evaluate: str = ""
    tolerate: float = 0.005
    guards: GuardSettings = field(default_factory=GuardSettings)
    compare: CompareSettings = field(default_factory=CompareSettings)
    keep: KeepSettings = field(default_factory=KeepSettings)

    @property
    def shadows(self) -> bool:
        return self.shadow > 0.0 and self.shadow_h > 0.0


def rollout_settings(config: ModelConfig) -> RolloutSettings | None:
    """Returns a model's; None: its versions take over at once."""
    settings = config.extra.get("rollout")
    return settings if isinstance(settings, RolloutSettings) else None
