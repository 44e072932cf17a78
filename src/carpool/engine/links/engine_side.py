"""The engine's end of every link: records become work, outcomes become records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from carpool.engine.links.engine_link import EngineLink
from carpool.engine.work import Work
from carpool.link.catalogs import write_catalog
from carpool.link.door import Catalog, ModelEntry
from carpool.memory.arena import map_memory

_SEEN_WITHIN_S = 5.0  # a front end that takes longer is stuck; it must not hold up an operator


class EngineLike(Protocol):
    """What an engine must do to be reached over links. Everything is called on its loop's thread."""

    def submit(self, key: int, works: Sequence[Work]) -> None:
        """Run what came at once, or call each `work.done` with the reason why not: also for a key that is not
        served any more."""

    def ready(self, work: Work) -> None:
        """The inputs of one that was submitted before them are there. Nothing, if it has ended meanwhile."""

    def cancel(self, work: Work) -> None:
        """Nobody waits for it. `work.done` is still called once, when its memory is touched no more."""

    def share(self, arena: int, file: int) -> None:
        """A front end's memory, for models in another process: the number is new, the file stays ours."""

    def unshare(self, arena: int) -> None:
        """Nobody reads answers there any more."""

    @property
    def catalog(self) -> Catalog: ...

    def listen(
        self, listener: Callable[[Catalog], None], seen: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        """Call it with every new catalogue, whose number is higher than the last one's.

        `seen` waits until every front end has the catalogue of this number: only then is it certain that no
        request for something that it does not offer is still on its way.
        """

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Any question that is not an inference; errors are `CarpoolError`s."""

    async def drain(self, timeout: float) -> None:
        """Finish what was accepted, take nothing new, close the models."""


class EngineSide:
    """All links of one engine. `dropped` is told the number of a front end that broke the protocol."""

    def __init__(
        self, engine: EngineLike, *, max_answer_bytes: int, dropped: Callable[[int], None] = lambda _: None
    ) -> None:
        self.engine = engine
        self.max_answer_bytes = max_answer_bytes
        self.dropped = dropped
        self.entries: Mapping[int, ModelEntry] = {}
        self._links: set[EngineLink] = set()
        self._arenas = 0
        self._seen = asyncio.Event()
        self._catalog = (0, b"")
        engine.listen(self._publish, self.everyone_saw)
        self._publish(engine.catalog)

    async def attach(self, frontend: int, sock: socket.socket, arena: int) -> EngineLink:
        """A new front end: our end of a socket pair, and its arena's file, which is closed once mapped."""
        self._arenas += 1
        try:
            memory = map_memory(arena)
            self.engine.share(self._arenas, arena)
        finally:
            os.close(arena)
        loop = asyncio.get_running_loop()
        link = EngineLink(self, frontend, memory, self._arenas, loop)
        await loop.create_unix_connection(lambda: link, sock=sock)
        return link

    def close(self) -> None:
        """End every link; a loop that is closed with one still open can hang."""
        for link in list(self._links):
            link.close()

    @property
    def links(self) -> int:
        return len(self._links)

    @property
    def calls(self) -> int:
        """Those that have not been answered yet."""
        return sum(link.calls for link in self._links)

    def opened(self, link: EngineLink) -> None:
        self._links.add(link)
        link.publish(*self._catalog)

    def closed(self, link: EngineLink) -> None:
        self._links.discard(link)
        self.engine.unshare(link.arena)
        self._seen.set()

    def acknowledged(self) -> None:
        self._seen.set()

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Ask the engine. If that changes the catalogue, every front end has it before the answer leaves."""
        before = self._catalog[0]
        answer = await self.engine.ask(what, arguments)
        if self._catalog[0] != before:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.everyone_saw(self._catalog[0]), _SEEN_WITHIN_S)
        return answer

    async def everyone_saw(self, number: int) -> None:
        """Returns when this catalogue, or a later one, is in force at every front end that is connected."""
        while any(link.seen < number for link in self._links):
            self._seen.clear()
            await self._seen.wait()

    def _publish(self, catalog: Catalog) -> None:
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        self.entries = {entry.key: entry for entry in entries}
        self._catalog = (catalog.number, write_catalog(catalog))
        for link in list(self._links):
            link.publish(*self._catalog)
