"""Reads the settings of this protocol: the model, and the labels that Frigate knows."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.api_settings import api_table, wrong
from carpool.config.server import ServerSettings

_NAME = "frigate"
_MOST_LABELS = 10_000


@dataclass(frozen=True, slots=True)
class FrigateSettings:
    model: str = ""  # empty: the first that detects
    labels: frozenset[str] = frozenset()  # that are answered; empty: all


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    read_settings(settings)
    return settings, ""


def read_settings(settings: ServerSettings) -> FrigateSettings:
    table = api_table(settings.api_settings, _NAME, ("model", "labels"))
    model, labels = table.get("model", ""), table.get("labels", [])
    if not isinstance(model, str):
        raise wrong(settings.api_settings, _NAME, "model must be the name of a model")
    listed = isinstance(labels, list) and len(labels) <= _MOST_LABELS
    if not listed or not all(isinstance(one, str) and one for one in labels):
        raise wrong(settings.api_settings, _NAME, 'labels must be a list like ["person", "car"]')
    return FrigateSettings(model, frozenset(labels))
