"""HTTP/1.1 as the generator speaks it: kept connections, and answers as far as it cares."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from carpool.errors import CarpoolError
from carpool.lab.load.messages import Message
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Clock, Kind, Tell, Ticket, Timing, failed
from carpool.lab.load.token_times import Streamed, TokenTimes
from carpool.wire.http_reply import NotHttp, ReplyReader, TooLong
from carpool.wire.v2 import decode_error

REFUSALS = frozenset({408, 409, 429, 503, 504})
_MOST_BODY = 1 << 40
_KEPT = 4096  # of an error's body
_TIMING = re.compile(
    r"queue;dur=([0-9.]{1,15}), infer;dur=([0-9.]{1,15})(?:, post;dur=([0-9.]{1,15}))?"
    r'.*batch;desc="([0-9]{1,6})"'
)
_REASON = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Malformed(CarpoolError):
    """The server does not speak HTTP, or breaks off."""

    reason = "malformed"


class AnswerReader:
    """Reads one answer after the other. `feed` returns an answer when it is complete."""

    def __init__(self, clock: Clock | None = None) -> None:
        """With a clock, answers are streams whose pieces are timed."""
        self._clock = clock
        self.keep_alive = True  # whether the connection can be used after the last answer
        self._start()

    def _start(self) -> None:
        self.started = False  # whether some byte of the present answer has come
        self._reply = ReplyReader(_MOST_BODY)
        self._tokens: TokenTimes | None = None
        self._kept = b""

    def feed(self, data: bytes) -> Answer | None:
        self.started = True
        reply = self._reply
        try:
            part = reply.feed(data)
        except (NotHttp, TooLong) as error:
            raise Malformed(str(error)) from None
        if reply.extra:
            raise Malformed("more bytes were received than the response has")
        if self._clock is not None and reply.status:
            if self._tokens is None and "event-stream" in reply.fields.get("content-type", "").lower():
                self._tokens = TokenTimes()
            if self._tokens is not None and part:
                self._tokens.feed(part, self._clock())
        if reply.status >= 300:
            self._kept = (self._kept + part)[:_KEPT]
        return self._finish() if reply.over else None

    def close(self) -> Answer | None:
        """The connection was closed: the end of an answer without a length, or of nothing."""
        try:
            self._reply.end()
        except NotHttp:
            return None
        return self._finish()

    def _finish(self) -> Answer:
        reply = self._reply
        self.keep_alive = reply.keep
        answer = outcome(reply.status, reply.fields.get("server-timing", ""), self._kept)
        if self._clock is not None and answer.kind is Kind.ANSWERED:
            answer = _of_stream(Streamed(fault="no-stream") if self._tokens is None else self._tokens.end())
        self._start()
        return answer


def _of_stream(streamed: Streamed) -> Answer:
    if streamed.fault:
        return Answer(Kind.REFUSED if streamed.refused else Kind.FAILED, streamed.fault)
    return Answer(Kind.ANSWERED, stream=streamed)


def outcome(status: int, server_timing: str, body: bytes) -> Answer:
    """Returns what an answer means; `body` is the beginning of an error's."""
    timing = read_timing(server_timing)
    if 200 <= status < 300:
        return PLAIN_ANSWER if timing is None else Answer(Kind.ANSWERED, "", timing)
    reason = decode_error(body)[1]
    if not _REASON.fullmatch(reason):
        reason = f"http-{status}"
    return Answer(Kind.REFUSED if status in REFUSALS else Kind.FAILED, reason, timing)


def read_timing(value: str) -> Timing | None:
    found = _TIMING.search(value) if value else None
    if found is None:
        return None
    try:
        queue, infer = float(found[1]) / 1e3, float(found[2]) / 1e3
        return Timing(queue, infer, int(found[4]), None if found[3] is None else float(found[3]) / 1e3)
    except ValueError:
        return None


_CONNECT_S = 10.0


@dataclass(eq=False)
class HttpTarget:
    """Sends to one server over at most `connections`: a request that finds none free waits, which counts."""

    host: str
    port: int
    message: Callable[[Ticket], Message]
    connections: int
    name: str
    tls: ssl.SSLContext | None = None
    closing: Callable[[], None] = lambda: None  # called at the end, for what was made for this target
    streams: bool = False  # answers come in pieces, whose times are taken

    def __post_init__(self) -> None:
        self._free: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._coming = 0  # connections that are neither there nor refused yet
        self._waiting: deque[Ticket] = deque()
        limit = self.connections
        self._facts = {"connections": 0, "connection_limit": limit, "reconnects": 0, "resent": 0}

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        self._tell = tell
        self.clock = clock
        for _ in range(min(expected, self.connections)):
            self._connect()
        await asyncio.gather(*self._opening)

    def send(self, ticket: Ticket) -> None:
        while self._free:
            connection = self._free.popleft()
            if connection.usable:
                connection.send(ticket, self.message(ticket))
                return
        self._waiting.append(ticket)
        self._connect_if_needed()

    def let_go(self, ticket: Ticket) -> None:
        """Closes its connection: a late answer could not be distinguished from that to the next request."""
        if isinstance(ticket.handle, _Connection):
            ticket.handle.drop()

    async def close(self) -> None:
        self._waiting.clear()
        self.connections = 0  # what is closed now is not opened again
        for task in self._opening:
            task.cancel()
        closing = [connection.gone for connection in self._all]
        for connection in list(self._all):
            connection.drop()
        if closing:
            await asyncio.wait(closing, timeout=1.0)
        self.closing()

    def facts(self) -> dict[str, int]:
        return dict(self._facts)

    # ---- connections

    def _connect_if_needed(self) -> None:
        if self._coming < len(self._waiting) and len(self._all) + self._coming < self.connections:
            self._connect()

    def _connect(self) -> None:
        self._coming += 1
        task = asyncio.ensure_future(self._open_one())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_one(self) -> None:
        """Opens a connection, or fails one waiting request: a server that is gone fails each request once."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_connection(lambda: _Connection(self), self.host, self.port, ssl=self.tls)
        except OSError as error:  # a timeout is one
            self._coming -= 1
            ticket = self._next_waiting()
            if ticket is not None:
                late = isinstance(error, TimeoutError)
                self._tell(ticket, failed("connect-timeout" if late else "cannot-connect"))
            loop.call_soon(self._connect_if_needed)

    def _next_waiting(self) -> Ticket | None:
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done:
                return ticket
        return None

    # ---- called by the connections

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
            connection.send(ticket, self.message(ticket))

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
        self._reader = AnswerReader(pool.clock if pool.streams else None)
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
            self.drop()  # an answer without a request
            return
        try:
            answer = self._reader.feed(data)
        except Malformed as error:
            self.drop()
            self._pool.ended(ticket, failed(error.reason))
            return
        if answer is None:
            return
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
