"""HTTP/1.1 as the generator speaks it: connections that are kept, and more of them when all are busy."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

from carpool.lab.load.http_answer import AnswerReader, Malformed
from carpool.lab.load.messages import Message
from carpool.lab.load.target import Clock, Tell
from carpool.lab.load.ticket import Answer, Ticket, failed

_CONNECT_S = 10.0


class HttpTarget:
    """One server over at most `connections` of them: whoever finds none free waits, and that counts."""

    def __init__(
        self,
        host: str,
        port: int,
        message: Callable[[Ticket], Message],
        *,
        connections: int,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self._address = (host, port)
        self._tls = tls
        self._message = message
        self._most = connections
        self._free: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._coming = 0  # connections that are neither there nor refused yet
        self._waiting: deque[Ticket] = deque()
        self._facts = {"connections": 0, "connection_limit": connections, "reconnects": 0, "resent": 0}

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        self._tell = tell
        self.clock = clock
        for _ in range(min(expected, self._most)):
            self._connect()
        await asyncio.gather(*self._opening)

    def send(self, ticket: Ticket) -> None:
        while self._free:
            connection = self._free.popleft()
            if connection.usable:
                connection.send(ticket, self._message(ticket))
                return
        self._waiting.append(ticket)
        self._connect_if_needed()

    def let_go(self, ticket: Ticket) -> None:
        """An answer may still come on its connection, and cannot be told from the next one's: close it."""
        if isinstance(ticket.handle, _Connection):
            ticket.handle.drop()

    async def close(self) -> None:
        self._waiting.clear()
        self._most = 0  # what is closed now is not opened again
        for task in self._opening:
            task.cancel()
        closing = [connection.gone for connection in self._all]
        for connection in list(self._all):
            connection.drop()
        if closing:
            await asyncio.wait(closing, timeout=1.0)

    def facts(self) -> dict[str, int]:
        return dict(self._facts)

    # ---- connections

    def _connect_if_needed(self) -> None:
        if self._coming < len(self._waiting) and len(self._all) + self._coming < self._most:
            self._connect()

    def _connect(self) -> None:
        self._coming += 1
        task = asyncio.ensure_future(self._open_one())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_one(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_connection(lambda: _Connection(self), *self._address, ssl=self._tls)
        except TimeoutError:
            self._no_connection("connect-timeout")
        except OSError:
            self._no_connection("cannot-connect")

    def _no_connection(self, reason: str) -> None:
        """One who waited is told, so that a server that is gone fails every request, and only once each."""
        self._coming -= 1
        ticket = self._next_waiting()
        if ticket is not None:
            self._tell(ticket, failed(reason))
        asyncio.get_running_loop().call_soon(self._connect_if_needed)

    def _next_waiting(self) -> Ticket | None:
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done:
                return ticket
        return None

    # ---- told by the connections

    def opened(self, connection: _Connection) -> None:
        self._coming -= 1
        self._all.add(connection)
        self._facts["connections"] = max(self._facts["connections"], len(self._all))
        self.freed(connection)

    def freed(self, connection: _Connection) -> None:
        ticket = self._next_waiting()
        if ticket is None:
            self._free.append(connection)
        else:
            connection.send(ticket, self._message(ticket))

    def ended(self, ticket: Ticket, answer: Answer) -> None:
        ticket.handle = None
        self._tell(ticket, answer)

    def closed(self, connection: _Connection, ticket: Ticket | None, answer: Answer | None) -> None:
        """Without an `answer`, the server closed a kept connection before it took notice: ask again."""
        self._all.discard(connection)
        if connection.answers:
            self._facts["reconnects"] += 1
        if ticket is not None and not ticket.done:
            if answer is not None:
                self.ended(ticket, answer)
            else:
                self._facts["resent"] += 1
                self.send(ticket)
        self._connect_if_needed()


class _Connection(asyncio.Protocol):
    __slots__ = ("_pool", "_reader", "_ticket", "_transport", "answers", "gone", "usable")

    def __init__(self, pool: HttpTarget) -> None:
        self._pool = pool
        self._reader = AnswerReader()
        self._ticket: Ticket | None = None
        self.answers = 0
        self.usable = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self.usable = True
        self._pool.opened(self)

    def send(self, ticket: Ticket, message: Message) -> None:
        self._ticket = ticket
        ticket.handle = self
        ticket.sent = self._pool.clock()
        head, body = message
        if body:
            self._transport.writelines(message)
        else:
            self._transport.write(head)

    def drop(self) -> None:
        """Close it without looking at what may still come."""
        self._ticket = None
        self.usable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        ticket = self._ticket
        if ticket is None:
            self.drop()  # nobody asked
            return
        try:
            answer = self._reader.feed(data)
        except Malformed as error:
            self.drop()
            self._pool.ended(ticket, failed(error.reason))
            return
        if answer is not None:
            self._finish(ticket, answer)

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        self._ticket = None
        self.answers += 1
        if not self._reader.keep_alive:
            self.drop()
        self._pool.ended(ticket, answer)
        if self.usable:
            self._pool.freed(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.usable = False
        ticket, self._ticket = self._ticket, None
        answer: Answer | None = None
        if ticket is not None and self._reader.started:
            answer = self._reader.close() or failed("broken-off")
        elif not self.answers:
            answer = failed("closed")
        if not self.gone.done():
            self.gone.set_result(None)
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self._pool.closed(self, ticket, answer)
