"""An engine with its rollouts and nothing in front of it, as often as a test likes: cheap enough to die in
every state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.errors import CarpoolError
from carpool.extensions.rollout.rollout_desk import RolloutDesk
from carpool.link.catalog import Catalog
from engine.scripted import weights
from extensions.rollout import staged
from waiting import until_in_loop as until

PATIENCE_S = 30.0


@dataclass
class Loader:
    """Loads as `staged` does, and version 2 only while `gate` is open."""

    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)  # version 2 is at the gate

    def load(self, config: ModelConfig, version: ModelVersion, *more: object) -> staged.Behaving:
        if version.number == 2 and not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(PATIENCE_S)
        return staged.load(config, version, *more)


@dataclass
class Life:
    host: EngineHost
    desk: RolloutDesk
    catalogs: list[Catalog]
    failed: Mapping[str, CarpoolError]

    def status(self) -> dict[str, Any]:
        return self.desk.status("m")

    @property
    def serves(self) -> str:
        """Who answers what names no version."""
        return self.host.catalog.newest["m"].version

    @property
    def loaded(self) -> set[str]:
        return {version for _, version in self.host.catalog.entries}

    async def act(self, action: str, **more: Any) -> dict[str, Any]:
        found = await self.host.ask("rollout/act", {"model": "m", "action": action, **more})
        return dict(found)

    async def until(self, *states: str) -> dict[str, Any]:
        await until(lambda: self.status()["state"] in states)
        return self.status()


@contextlib.asynccontextmanager
async def life(
    folder: Path, state: str = "state", shared: str = "", models: str = "models"
) -> AsyncIterator[Life]:
    """`shared` is where replicas, each with a `state` of its own, share rollouts."""
    given: dict[str, Any] = {"rollout_state": shared, "cache_secret": "sixteen characters"}
    settings = ServerSettings(state_dir=folder / state, allow_rollouts=True, **given)
    host = EngineHost(partial(Engine, folder / models), settings=settings)
    host.start_parts()
    desk = host.parts.needed("rollout")
    assert isinstance(desk, RolloutDesk)
    catalogs: list[Catalog] = []
    host.listen(catalogs.append)
    try:
        failed = await host.engine.start(patient=True)
        host.set_ready(True)
        yield Life(host, desk, catalogs, failed)
    finally:
        await host.drain(1.0)


def models(folder: Path, plan: str, versions: Mapping[int, str] | None = None) -> None:
    staged.settings(folder / "models", plan)
    for version, value in (versions or {1: "1", 2: "1"}).items():
        weights(folder / "models", "m", version, value)
