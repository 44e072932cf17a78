"""Clients that come and go: most keep their connection, some come for one request, and some do not wait."""

import asyncio
from collections.abc import Mapping
from random import Random
from typing import cast

from carpool.lab.load.http_client import AnswerReader, HttpTarget, Malformed
from carpool.lab.load.messages import Message
from carpool.lab.load.tally import Answer, Clock, Tell, Ticket, failed

LEFT = "left"  # the reason that is told of who did not wait
ONCE = 0.25  # share of requests that come on a connection of their own
LEAVERS = 0.05  # share whose client hangs up, half of them before the request is whole
_CONNECTIONS = 4096
_HOST = "127.0.0.1"


class Visitors:
    """A target of `carpool.lab.load.generator`; `longest_stay` is how late a leaver leaves, in seconds."""

    def __init__(
        self,
        port: int,
        message: bytes,
        *,
        longest_stay: float,
        name: str,
        once: float = ONCE,
        leavers: float = LEAVERS,
    ) -> None:
        self.name = name
        self._once, self._leavers = once, leavers
        self.message = message
        self._port = port
        self._stay = longest_stay
        self._random = Random(1)
        self._regulars = HttpTarget(_HOST, port, self._whole, connections=_CONNECTIONS, name=name)
        self._visits: set[_Visit] = set()
        self._coming: set[asyncio.Task[None]] = set()

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        self.tell, self.clock = tell, clock
        await self._regulars.open(tell, clock, expected)

    def send(self, ticket: Ticket) -> None:
        drawn = self._random.random()
        if drawn >= self._leavers + self._once:
            self._regulars.send(ticket)
            return
        part = 1.0 if drawn >= self._leavers / 2 else 0.5
        stay = self._random.uniform(0, self._stay) if drawn < self._leavers else None
        task = asyncio.ensure_future(self._visit(_Visit(self, ticket, part, stay)))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    def let_go(self, ticket: Ticket) -> None:
        if isinstance(ticket.handle, _Visit):
            ticket.handle.drop()
        else:
            self._regulars.let_go(ticket)

    async def close(self) -> None:
        for task in self._coming:
            task.cancel()
        for visit in list(self._visits):
            visit.drop()
        await self._regulars.close()

    def facts(self) -> dict[str, int]:
        return self._regulars.facts()

    async def _visit(self, visit: "_Visit") -> None:
        self._visits.add(visit)
        try:
            await asyncio.get_running_loop().create_connection(lambda: visit, _HOST, self._port)
        except OSError:
            visit.end(failed("cannot-connect"))

    def gone(self, visit: "_Visit") -> None:
        self._visits.discard(visit)

    def _whole(self, _ticket: Ticket) -> Message:
        return self.message, b""


class _Visit(asyncio.Protocol):
    """One connection for one request. Who leaves is never counted as answered."""

    def __init__(self, visitors: Visitors, ticket: Ticket, part: float, stay: float | None) -> None:
        self._visitors = visitors
        self._ticket = ticket
        self._part = part
        self._stay = stay
        self._reader = AnswerReader()
        self._transport: asyncio.WriteTransport | None = None
        self._over = False
        ticket.handle = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        if self._over:
            self._transport.abort()
            return
        self._ticket.sent = self._visitors.clock()
        message = self._visitors.message
        self._transport.write(message[: int(self._part * len(message))])
        if self._stay is not None:
            asyncio.get_running_loop().call_later(self._stay, self.end, failed(LEFT))

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except Malformed as error:
            answer = failed(error.reason)
        if answer is not None and self._stay is None:
            self.end(answer)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        answer = self._reader.close() if self._stay is None else failed(LEFT)
        self.end(answer or failed("broken-off"))

    def end(self, answer: Answer) -> None:
        if not self._over:
            self.drop()
            self._visitors.tell(self._ticket, answer)

    def drop(self) -> None:
        self._over = True
        self._ticket.handle = None
        self._visitors.gone(self)
        if self._transport is not None:
            self._transport.abort()


def http_message(port: int, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A whole request, as it is written to a connection."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {_HOST}:{port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body
