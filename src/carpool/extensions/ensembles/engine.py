"""Serves ensembles with a runtime that has no instances of its own."""

from __future__ import annotations

from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.ensembles.ensemble_runtime import EnsembleRuntime

SERVING = ServingPart(runtime=lambda _: EnsembleRuntime)
