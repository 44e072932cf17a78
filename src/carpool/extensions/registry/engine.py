"""Follows registries, and repositories of other machines, in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.extensions.registry.registry_rollouts import RegistryRollouts
from carpool.extensions.registry.registry_watch import RegistryWatch
from carpool.extensions.registry.remote_repository import Remotes
from carpool.extensions.rollout.rollout_desk import RolloutDesk
from carpool.observe.logs import logger

_log = logger("engine")


def engine(server: EngineServer) -> EnginePart:
    """Returns what registries do in the engine; its state is the `RegistryWatch`."""
    desk: RolloutDesk = server.needed("rollout")
    watch = RegistryWatch(server.engine, server.settings, lambda made: RegistryRollouts(made, desk.rollouts))
    followed = FollowedRepositories(Remotes.of(server.settings))

    async def follow() -> None:
        await server.opened()
        await watch.open()

    return EnginePart(tasks=(follow,), refresh=followed.refresh, close=watch.close, state=watch)


class FollowedRepositories:
    """Brings what changed in repositories of other machines; only folders are looked at after this."""

    def __init__(self, remotes: Remotes) -> None:
        self._remotes = remotes
        self._complaints: Sequence[str] = ()

    async def refresh(self) -> None:
        if self._remotes.repositories:
            complaints = await asyncio.to_thread(self._remotes.refresh, wait=False)
            for complaint in complaints if complaints != self._complaints else ():
                _log.warning("repository-not-fetched", message=complaint)
            self._complaints = complaints
