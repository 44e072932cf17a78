"""Serves models that write with a runtime whose instances have slots and no batches."""

from __future__ import annotations

from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.text.text_runtime import TextRuntime

SERVING = ServingPart(runtime=lambda _: TextRuntime)


def engine(_: EngineServer) -> EnginePart:
    """Returns what marks models that write in the catalogue, so that front ends load their part."""
    return EnginePart(entry=lambda _: {})
