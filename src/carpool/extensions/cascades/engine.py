"""Names cascades to front ends, which run them."""

from __future__ import annotations

from carpool.engine.engine_parts import EnginePart, EngineServer


def engine(_server: EngineServer) -> EnginePart:
    return EnginePart(entry=lambda _: {})
