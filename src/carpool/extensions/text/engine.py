"""Serves models that write with a runtime whose instances have slots and no batches."""

from __future__ import annotations

from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.text.text_runtime import TextRuntime

SERVING = ServingPart(runtime=lambda _: TextRuntime)
