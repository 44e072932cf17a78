"""Pictures of live sources on their way to the engine: of each, the newest goes on.

The engine knows a picture when it is decoded. Until then it waits here, and a newer one of the same source
takes its place here; once the engine has it, there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from carpool.engine.refusals import replaced
from carpool.errors import Replaced
from carpool.servers.asked_fields import Sender
from carpool.servers.door import ModelEntry

End: TypeAlias = Callable[[Replaced], None]
"""Answers for one that was on its way."""


class Frames:
    """Those of one front end. Bounded by the pictures that are under way."""

    def __init__(self) -> None:
        self._coming: dict[tuple[int, str], End] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def enter(self, entry: ModelEntry, sender: Sender, end: End) -> Callable[[], None]:
        """One begins, and ends whoever came before it. Call what this returns when it is decoded, or gone."""
        if not sender.latest:
            return _nothing
        key = entry.key, sender.source
        older = self._coming.pop(key, None)
        self._coming[key] = end
        if older is not None:
            older(replaced(entry.name, sender.source))

        def leave() -> None:
            if self._coming.get(key) is end:
                del self._coming[key]

        return leave


def _nothing() -> None:
    """Nobody is replaced by it, and it by nobody."""
