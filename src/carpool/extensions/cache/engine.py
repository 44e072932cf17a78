"""Publishes which models' answers are cached, and how often each cache was cleared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.engine.models.served import Served
from carpool.extensions.cache.settings import cache_settings
from carpool.observe.logs import logger

_LONGEST_SHOWN = 80

_log = logger("engine")


def engine(server: EngineServer) -> EnginePart:
    """Returns what caches do in the engine."""
    cleared: dict[str, int] = {}

    async def clear(arguments: Mapping[str, Any]) -> Any:
        """Has all front ends drop what they cached of a model's answers."""
        name = str(arguments.get("name", ""))
        cleared[name] = cleared.get(name, 0) + 1
        server.publish({"cleared": dict(cleared)})
        _log.info("cache-cleared", model=name[:_LONGEST_SHOWN])
        return {}

    return EnginePart(entry=_entry, questions={"clear": clear})


def _entry(served: Served) -> dict[str, Any] | None:
    """Returns the settings, and the digest of what the version is made of: the same one answers the same. It
    changes with a step of an ensemble, too."""
    settings = cache_settings(served.config)
    return None if settings is None else {"settings": asdict(settings), "digest": served.answers_digest()}
