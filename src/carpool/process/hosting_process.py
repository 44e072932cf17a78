"""Makes the process beside the engine for the first model that runs there, and not before.

A server whose models all run in the engine's process imports nothing of the extension that has the other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.models.runtime import Loads, ModelProcess

ROLE = "runner"
"""The word for such a process in the `process` of a kind of backend."""


class HostingProcess:
    """Implements `ModelProcess`: remembers what the process has to know until there is one."""

    def __init__(self, make: Callable[[], ModelProcess], max_answer_bytes: int) -> None:
        self.max_answer_bytes = max_answer_bytes
        self._make = make
        self._made: ModelProcess | None = None
        self._arenas: dict[int, int] = {}  # files, by number, until it is made
        self._logging: Mapping[str, Any] | None = None

    def loading(self, config: ModelConfig, version: ModelVersion) -> Loads | None:
        if kind_of(config.backend).process != ROLE:
            return None
        return self._process().loading(config, version)

    def _process(self) -> ModelProcess:
        if self._made is None:
            self._made = self._make()
            if self._logging is not None:
                self._made.follow_logging(self._logging)
            for arena, file in self._arenas.items():
                self._made.share(arena, file)
            self._forget_arenas()
        return self._made

    def share(self, arena: int, file: int) -> None:
        if self._made is not None:
            self._made.share(arena, file)
        else:
            self._arenas[arena] = os.dup(file)

    def unshare(self, arena: int) -> None:
        if self._made is not None:
            self._made.unshare(arena)
        elif (file := self._arenas.pop(arena, None)) is not None:
            os.close(file)

    def follow_logging(self, settings: Mapping[str, Any]) -> None:
        self._logging = settings
        if self._made is not None:
            self._made.follow_logging(settings)

    async def close(self) -> None:
        self._forget_arenas()
        if self._made is not None:
            await self._made.close()

    def _forget_arenas(self) -> None:
        for file in self._arenas.values():
            os.close(file)
        self._arenas.clear()
