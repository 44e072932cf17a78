"""Carpool is a vision-model server that keeps the latency you promise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.client.async_client import AsyncClient
    from carpool.client.client import Client
    from carpool.engine.engine import Engine
    from carpool.engine.run.batched import batched

__all__ = ["AsyncClient", "Client", "Engine", "__version__", "batched"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`import carpool` stays light: the engine and the clients are imported when they are first used."""
    homes = {
        "AsyncClient": "carpool.client.async_client",
        "Client": "carpool.client.client",
        "Engine": "carpool.engine.engine",
        "batched": "carpool.engine.run.batched",
    }
    if name not in homes:
        raise AttributeError(f"module 'carpool' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
