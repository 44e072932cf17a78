"""Models that run in a process of their own: what the engine asks of whoever keeps that process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from carpool.backends.backend import Backend
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.batch_run import BatchResult
from carpool.engine.executor import Executes

if TYPE_CHECKING:
    from carpool.engine.models.loading import Ready, Tell


class HearsInstances(Protocol):
    """Who is told what became of batches, on the loop's thread: the driver."""

    def ended(self, executor: Executes, result: BatchResult) -> None: ...

    def lost(self, executor: Executes) -> None: ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """An instance in another process, before it has a driver and after."""

    def serve(self, piece: int, hearer: HearsInstances) -> Executes:
        """From here on it takes batches, and runs one that is larger than `piece` in pieces."""

    def close(self) -> None:
        """Free it; from any thread."""


class Loads(Protocol):
    """Loads one version: all of its instances, and later one that replaces a lost one. Not for the loop."""

    def prepare(self, tell: Tell) -> Ready: ...

    def backend(self, config: ModelConfig, index: int, count: int) -> Backend | RunsElsewhere: ...


class Elsewhere(Protocol):
    """Keeps the process."""

    def loading(self, config: ModelConfig, version: ModelVersion) -> Loads | None:
        """None for a model that runs in the engine's own process."""
