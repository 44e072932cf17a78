"""Names the models whose images are cut into tiles to front ends, which do it."""

from __future__ import annotations

from dataclasses import asdict

from carpool.engine.engine_parts import EnginePart, EngineServer, Json
from carpool.engine.models.served import Served
from carpool.extensions.tiles.settings import tile_settings


def engine(_server: EngineServer) -> EnginePart:
    return EnginePart(entry=_entry)


def _entry(served: Served) -> Json | None:
    settings = tile_settings(served.config)
    return None if settings is None else asdict(settings)
