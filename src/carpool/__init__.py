"""Carpool: a vision-model server that keeps the latency you promise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.engine.batched import batched
    from carpool.engine.engine import Engine

__all__ = ["Engine", "__version__", "batched"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`import carpool` stays light: the engine is imported when it is first used."""
    homes = {"Engine": "carpool.engine.engine", "batched": "carpool.engine.batched"}
    if name not in homes:
        raise AttributeError(f"module 'carpool' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
