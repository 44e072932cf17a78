"""The profiles that somebody looks at, asked of the engine rarely however many pages are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from carpool.errors import CarpoolError
from carpool.frontend.documents import Document
from carpool.link.door import Door, ModelEntry

_FRESH_S = 1.5
_PATIENCE_S = 5.0
_MOST_KEPT = 64  # models that pages looked at last

_Known: TypeAlias = tuple[int, str, str]
"""A model's key, name and version: an engine that was restarted gives the same keys to others."""


@dataclass(slots=True)
class _Watched:
    document: Document | None = None
    asked_at: float = float("-inf")
    asking: asyncio.Task[None] | None = None


class ProfileWatch:
    """One per front end, in its loop's thread. Nobody waits here: the next look finds what came meanwhile."""

    def __init__(self, door: Door, clock: Callable[[], float] = monotonic) -> None:
        self._door = door
        self._clock = clock
        self._watched: dict[_Known, _Watched] = {}  # those that were looked at last are last

    def look(self, name: str, version: str) -> Document | None:
        """What the engine last said of a model that serves; None before it said anything, and of others."""
        catalog = self._door.catalog
        entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
        if entry is None or not self._door.serving:
            return None
        known = (entry.key, entry.name, entry.version)
        found = self._watched[known] = self._watched.pop(known, _Watched())
        if found.asking is None and self._clock() - found.asked_at >= _FRESH_S:
            found.asked_at = self._clock()
            found.asking = asyncio.get_running_loop().create_task(self._ask(entry, found))
        while len(self._watched) > _MOST_KEPT:
            self._forget(next(iter(self._watched)))
        return found.document

    async def _ask(self, entry: ModelEntry, found: _Watched) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                asked = {"name": entry.name, "version": entry.version}
                found.document = await self._door.ask("profile", asked)
        except (CarpoolError, TimeoutError):
            found.document = None  # it left meanwhile, or the engine did: better nothing than what was
        finally:
            found.asking = None

    def _forget(self, known: _Known) -> None:
        task = self._watched.pop(known).asking
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for known in list(self._watched):
            self._forget(known)
