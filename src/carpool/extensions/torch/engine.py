"""Compiles models while they serve."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from carpool.engine.models.batch_runtime import BatchRuntime
from carpool.engine.models.served import Served
from carpool.engine.models.serving_part import ServingPart
from carpool.extensions.torch.compile_behind import CompileBehind, compiles_behind


def _work_beside(served: Served) -> Coroutine[Any, Any, None] | None:
    if not compiles_behind(served):
        return None
    assert isinstance(served.runtime, BatchRuntime)
    return CompileBehind(served.runtime).run()


SERVING = ServingPart(work_beside=_work_beside)
