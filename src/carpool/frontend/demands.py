"""Holds requests for models that are not in memory, where models are loaded on demand. A request waits for
the load as long as its deadline allows; if that is too short, it is rejected with a time to retry after."""

from __future__ import annotations

import asyncio
from time import monotonic

from carpool.core.numerals import numeral
from carpool.errors import Unavailable
from carpool.link.engine_client import EngineClient

MOST_WAITING = 256
"""Requests of one front end, for all models together."""
MOST_BYTES = 128 << 20
"""Of their bodies."""
LONGEST_S = 60.0
"""For those that name no deadline."""
_UNKNOWN_S = 2.0  # a guess, where a model was never loaded


class NotLoaded(Unavailable):
    """Reports a model that is not in memory, and will be loaded on request."""

    def __init__(self, message: str, model: str) -> None:
        super().__init__(message, reason="model-not-ready")
        self.model = model


class Demands:
    """Asks the engine to load models for one front end, in its loop's thread only. The engine is asked once
    for all who wait."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._under_way: dict[str, tuple[float, asyncio.Task[object]]] = {}  # and since when
        self._took: dict[str, float] = {}
        self._waiting = 0
        self._bytes = 0

    async def loaded(self, model: str, deadline: float, size: int) -> None:
        """Returns when the model may be looked up again; a body of so many bytes waits for that. Raises why
        it is not loaded, or when to come back."""
        now = monotonic()
        since, task = self._begin(model, now)
        left = self._took.get(model, 0.0) - (now - since)
        patience = min(deadline - now, LONGEST_S)
        if left > patience:
            raise self._come_back(model, left)
        if self._waiting >= MOST_WAITING or self._bytes + size > MOST_BYTES:
            raise self._come_back(model, left)
        self._waiting += 1
        self._bytes += size
        try:
            done, _ = await asyncio.wait([task], timeout=max(0.0, patience))
        finally:
            self._waiting -= 1
            self._bytes -= size
        if not done:
            raise self._come_back(model, self._took.get(model, 0.0) - (monotonic() - since))
        await asyncio.shield(task)  # raises what the engine said

    def close(self) -> None:
        for _, task in self._under_way.values():
            task.cancel()

    def _begin(self, model: str, now: float) -> tuple[float, asyncio.Task[object]]:
        found = self._under_way.get(model)
        if found is None:
            task = asyncio.get_running_loop().create_task(self._ask(model, now))
            found = self._under_way[model] = now, task
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return found

    async def _ask(self, model: str, began: float) -> None:
        try:
            await self._engine.ask("demand", {"model": model})
            self._took[model] = monotonic() - began
        finally:
            del self._under_way[model]

    def _come_back(self, model: str, left: float) -> Unavailable:
        left = left if left > 0.0 else _UNKNOWN_S
        error = Unavailable(f"{model} is being loaded; retry in {numeral(left)} s", reason="loading")
        error.retry_after_s = left
        return error
