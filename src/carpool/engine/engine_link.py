"""The engine's end of its links. It believes nothing: a lie costs a front end its link, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from mmap import mmap
from time import monotonic
from typing import Any, cast

from carpool.engine.link_calls import Calls, EngineLike, Questions
from carpool.link.catalogs import write_catalog
from carpool.link.door import Catalog, ModelEntry
from carpool.link.records import (
    ASK,
    CANCEL,
    CATALOG,
    MAX_ASK_BYTES,
    MAX_TEMPLATES,
    OK,
    READY,
    RESET,
    SEEN,
    SOURCE,
    SUBMIT,
    TEMPLATE,
    TO_ENGINE,
    Fields,
    Outbox,
    ProtocolError,
    RecordReader,
    to_frontend,
)
from carpool.link.templates import ServedTemplate, read_template
from carpool.memory.arena import map_memory
from carpool.observe.logs import logger

_log = logger("link")
_HIGH_WATER = 1 << 20  # unsent bytes above which nothing more is read from that front end
_AT_ONCE = 8  # records of one front end in one turn of the loop: of eight front ends, two milliseconds


class EngineLink(asyncio.Protocol):
    """The connection: reads what it says, in turns, and passes it on to who answers."""

    def __init__(
        self, side: EngineSide, frontend: int, memory: mmap, arena: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._side = side
        self._frontend = frontend
        self.arena = arena  # its number among all that this engine ever mapped
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = RecordReader(TO_ENGINE, MAX_ASK_BYTES)
        self._outbox = Outbox(loop, self._drop)
        self._calls = Calls(side.engine, frontend, memory, arena, side.max_answer_bytes, self._outbox, loop)
        self._questions = Questions(frontend, side.answer, self._outbox, loop)
        self._templates: dict[int, ServedTemplate] = {}
        self._unheard: list[tuple[Fields, bytes]] = []  # what it said, for the next turn
        self._deaf = False  # it does not take its answers
        self.seen = 0

    @property
    def calls(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        self._outbox.close()
        if self._transport is not None:
            self._transport.abort()

    def publish(self, number: int, catalog: bytes) -> None:
        if self._outbox.full:
            self._drop("it does not listen")
        self._outbox.put(to_frontend(CATALOG, number, OK, catalog))

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._outbox.open(self._transport)
        self._side.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The front end is gone: what waits is cancelled, what runs finishes into memory nobody reads."""
        self._transport = None
        self._outbox.close()
        self._side.closed(self)
        self._templates.clear()
        _log.info("link-closed", frontend=self._frontend, calls=len(self._calls))
        self._calls.end()

    def eof_received(self) -> None:
        self.close()  # nobody is left to read what is unsent

    def pause_writing(self) -> None:
        self._deaf = True
        self._listen()

    def resume_writing(self) -> None:
        self._deaf = False
        self._listen()

    def _listen(self) -> None:
        """Unless it does not take its answers, or has said more than was heard yet."""
        if self._transport is None:
            return
        if self._deaf or self._unheard:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            records = self._reader.feed(data)
        except ProtocolError as error:
            self._drop(str(error))
        else:
            self._hear(records)

    def _go_on(self) -> None:
        records, self._unheard = self._unheard, []
        if records and self._transport is not None:
            self._hear(records)
            self._listen()

    def _hear(self, records: list[tuple[Fields, bytes]]) -> None:
        """So many in one turn: batches that end, and other front ends, are not to wait for all of a flood."""
        now, templates, take = monotonic(), self._templates, self._calls.take
        try:
            for fields, payload in records[:_AT_ONCE]:
                if fields[0] == SUBMIT:
                    take(fields, templates.get(fields[3]), now)
                else:
                    self._calls.submit()
                    self._obey(fields, payload)
            if len(records) > _AT_ONCE:
                self._unheard = records[_AT_ONCE:]
                self._listen()
                self._loop.call_soon(self._go_on)
        except ProtocolError as error:
            self._drop(str(error))
        except Exception:
            _log.exception("link-failed", frontend=self._frontend)
            self._drop("it could not be read")
        finally:
            self._calls.submit()  # also what came before a lie: all that was taken is cancelled with its link

    def _drop(self, why: str) -> None:
        _log.error("link-dropped", frontend=self._frontend, error=why)
        self.close()
        self._side.dropped(self._frontend)

    # What it asks for.

    def _obey(self, fields: Fields, payload: bytes) -> None:
        kind, number = fields[0], fields[2]
        if kind == TEMPLATE:
            if len(self._templates) >= MAX_TEMPLATES or number in self._templates:
                raise ProtocolError(f"template {number} cannot be new")
            self._templates[number] = read_template(payload, self._side.entries.get)
        elif kind == READY:
            self._calls.ready(number)
        elif kind == CANCEL:
            self._calls.cancel(number)
        elif kind == SOURCE:
            self._calls.sources.hear(number, payload)
        elif kind == SEEN:
            self.seen = max(self.seen, number)
            self._side.acknowledged()
        elif kind == ASK:
            self._questions.ask(number, payload)
        elif kind == RESET:
            self._templates.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")


_SEEN_WITHIN_S = 5.0  # a front end that takes longer is stuck; it must not hold up an operator


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
