"""How a front end finds the model that a client names, and what it says when there is none."""

from __future__ import annotations

import difflib

from carpool.engine.model_index import UNLOADED
from carpool.errors import CarpoolError, NotFound, Unavailable
from carpool.servers.documents import served_versions
from carpool.servers.door import Catalog, Door, ModelEntry

_LONGEST_SHOWN = 80


def look_up(door: Door, name: str, version: str = "") -> ModelEntry:
    """The version asked for or the newest; raises `NotFound`, or `Unavailable` when it may come."""
    catalog = door.catalog
    entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
    if entry is None:
        raise not_serving() if not door.serving else _absent(catalog, name, version)
    return entry


def is_model_ready(door: Door, entry: ModelEntry) -> bool:
    """Whether it could run a request now."""
    return door.serving and entry.key not in door.catalog.down


def not_serving() -> Unavailable:
    return Unavailable(
        "the server is starting, draining or restarting its engine, or the engine does not respond",
        reason="not-serving",
    )


def _absent(catalog: Catalog, name: str, version: str) -> CarpoolError:
    shown = name if len(name) <= _LONGEST_SHOWN else name[:_LONGEST_SHOWN] + "…"
    lines = [line for line in catalog.index if line.name == name and version in ("", line.version)]
    for line in lines:
        if line.state in ("LOADING", "UNAVAILABLE") and line.reason != UNLOADED:
            why = f": {line.reason}" if line.reason else ""
            return Unavailable(f"model '{shown}' is {line.state.lower()}{why}", reason="model-not-ready")
    if name in catalog.newest:
        served = ", ".join(served_versions(catalog, name))
        return NotFound(
            f"model '{shown}' has no version '{version[:_LONGEST_SHOWN]}'; it serves {served}",
            reason="unknown-version",
        )
    if lines and not version:
        return NotFound(f"model '{shown}' is not loaded", reason="model-not-loaded")
    near = difflib.get_close_matches(shown, catalog.newest, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return NotFound(f"unknown model '{shown}'{hint}", reason="unknown-model")
