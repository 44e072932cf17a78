"""Publishes the limit of each version to the front ends."""

from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.engine.models.served import Served
from carpool_limit.settings import LimitSettings


def engine(_server: EngineServer) -> EnginePart:
    def entry(served: Served) -> dict[str, int] | None:
        settings = served.config.extra.get("limit")
        return {"at_once": settings.at_once} if isinstance(settings, LimitSettings) else None

    return EnginePart(entry=entry)
