"""Serves pipelines over pictures with a runtime that lets front ends ask their steps."""

from __future__ import annotations

from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.pipelines.pipeline_runtime import PipelineRuntime

SERVING = ServingPart(runtime=lambda _: PipelineRuntime)
