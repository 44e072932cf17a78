"""Serves pipelines over pictures with a runtime that lets front ends ask their steps, which it describes to
them."""

from __future__ import annotations

from dataclasses import asdict

from carpool.engine.engine_parts import EnginePart, EngineServer, Json
from carpool.engine.models.served import Served
from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.pipelines.pipeline_runtime import PipelineRuntime
from carpool.extensions.pipelines.settings import pipeline_settings

SERVING = ServingPart(runtime=lambda _: PipelineRuntime)


def engine(_server: EngineServer) -> EnginePart:
    return EnginePart(entry=_entry)


def _entry(served: Served) -> Json | None:
    """Returns the steps, without the path of their file."""
    settings = pipeline_settings(served.config)
    return None if settings is None else {**asdict(settings), "file": ""}
