"""Holds what `ensemble_scheduling` of a config.pbtxt says, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """Represents one model of an ensemble. `inputs` and `outputs` are pairs: the model's own name, and the
    tensor of the ensemble that it is read from or written to."""

    model: str
    version: int  # -1: the newest
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class EnsembleSettings:
    steps: tuple[EnsembleStep, ...]
    max_inflight: int = 0  # requests at the same time; 0 is no limit


def ensemble_settings(config: ModelConfig) -> EnsembleSettings | None:
    """Returns a model's; None: it is no ensemble."""
    settings = config.extra.get("ensembles")
    return settings if isinstance(settings, EnsembleSettings) else None
