"""HTTP/1.1 as the generator speaks it: kept connections, and answers as far as it cares."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

from carpool.errors import CarpoolError
from carpool.lab.load.messages import Message
from carpool.lab.load.ticket import PLAIN_ANSWER, Answer, Clock, Kind, Tell, Ticket, Timing, failed
from carpool.wire.v2 import decode_error

REFUSALS = frozenset({408, 409, 429, 503, 504})
_MOST_HEAD = 64 * 1024
_KEPT = 4096  # of an error's body
_STATUS = re.compile(rb"http/1\.([01]) ([1-5][0-9][0-9])[ \r]")
_TIMING = re.compile(
    rb"queue;dur=([0-9.]{1,15}), infer;dur=([0-9.]{1,15})(?:, post;dur=([0-9.]{1,15}))?"
    rb'.*batch;desc="([0-9]{1,6})"'
)
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[^\r\n]{0,256}\r\n")
_MOST_CHUNK_LINE = 300
_REASON = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Malformed(CarpoolError):
    """The server does not speak HTTP, or breaks off."""

    reason = "malformed"


class AnswerReader:
    """Reads one answer after the other. `feed` returns an answer when it is complete."""

    __slots__ = ("_buffer", "_chunked", "_head", "_kept", "_left", "_status", "keep_alive", "started")

    def __init__(self) -> None:
        self._buffer = b""
        self.started = False  # whether some byte of the present answer has come
        self.keep_alive = True  # whether the connection can be used after the last answer
        self._head = b""  # lowered; empty until it is complete
        self._status = 0
        self._left: int | None = 0  # bytes of the body, or of the chunk; None is until the connection closes
        self._chunked = False
        self._kept = b""

    def feed(self, data: bytes) -> Answer | None:
        self.started = True
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        while True:
            if not self._head:
                data = self._read_head(data)
                if not self._head:
                    return None
            rest = self._read_chunks(data) if self._chunked else self._read_body(data)
            if rest is None:
                return None
            if self._status >= 200:
                return self._finish(rest)
            self._head = b""  # an interim answer, like 100 Continue
            data = rest

    def close(self) -> Answer | None:
        """The connection was closed: the end of an answer without a length, or of nothing."""
        if self._head and self._left is None and not self._chunked:
            return self._finish(b"")
        return None

    def _read_head(self, data: bytes) -> bytes:
        """What follows the head; without a complete one, everything is kept for later."""
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > _MOST_HEAD:
            if len(data) > _MOST_HEAD:
                raise Malformed(f"the head of the answer is over {_MOST_HEAD} bytes")
            if not b"http/1.".startswith(data[:7].lower()):
                raise Malformed("the answer is not HTTP/1")
            self._buffer = data
            return b""
        head = data[: end + 2].lower()
        found = _STATUS.match(head)
        if found is None:
            raise Malformed("the answer is not HTTP/1")
        self._head = head
        self._status = int(found[2])
        self._frame(found[1] == b"1")
        return data[end + 4 :]

    def _frame(self, http_1_1: bool) -> None:
        """Where the body will end."""
        head = self._head
        close = b"close" in _field(head, b"connection")
        self.keep_alive = http_1_1 and not close
        self._kept = b""
        self._chunked = b"chunked" in _field(head, b"transfer-encoding")
        length = _field(head, b"content-length")
        if self._status < 200 or self._status in (204, 304):
            self._left = 0
            self._chunked = False
        elif self._chunked:
            self._left = None
        elif length:
            if not length.isdigit() or len(length) > 15:
                raise Malformed("the answer's Content-Length is not a number")
            self._left = int(length)
        else:
            self._left = None
            self.keep_alive = False

    def _read_body(self, data: bytes) -> bytes | None:
        """What follows the body, or None if it goes on."""
        if self._status >= 300 and len(self._kept) < _KEPT:
            line_break = 2 if self._chunked else 0
            end = _KEPT if self._left is None else max(0, self._left - line_break)
            self._kept += data[: min(end, _KEPT)]
        if self._left is None:
            return None
        if len(data) < self._left:
            self._left -= len(data)
            return None
        rest = data[self._left :]
        self._left = 0
        return rest

    def _read_chunks(self, data: bytes) -> bytes | None:
        while True:
            if self._left is None:
                found = _CHUNK.match(data)
                if found is None:
                    if len(data) > _MOST_CHUNK_LINE or b"\n" in data:
                        raise Malformed("a chunk of the answer is malformed")
                    self._buffer = data
                    return None
                size = int(found[1], 16)
                if not size:
                    return self._read_trailer(data, found.end())
                self._left = size + 2  # and its line break
                data = data[found.end() :]
            rest = self._read_body(data)
            if rest is None:
                return None
            data = rest
            self._left = None

    def _read_trailer(self, data: bytes, start: int) -> bytes | None:
        """Fields after the last chunk are read past."""
        if data.startswith(b"\r\n", start):
            return data[start + 2 :]
        end = data.find(b"\r\n\r\n", start)
        if end >= 0:
            return data[end + 4 :]
        if len(data) > _MOST_HEAD:
            raise Malformed("the trailer of the answer is too long")
        self._buffer = data
        return None

    def _finish(self, rest: bytes) -> Answer:
        if rest:
            raise Malformed("more bytes came than the answer has")
        answer = outcome(self._status, _field(self._head, b"server-timing"), self._kept)
        self._head = b""
        self.started = False
        return answer


def outcome(status: int, server_timing: bytes, body: bytes) -> Answer:
    """What an answer means; `body` is the beginning of an error's."""
    timing = read_timing(server_timing)
    if 200 <= status < 300:
        return PLAIN_ANSWER if timing is None else Answer(Kind.ANSWERED, "", timing)
    reason = decode_error(body)[1]
    if not _REASON.fullmatch(reason):
        reason = f"http-{status}"
    return Answer(Kind.REFUSED if status in REFUSALS else Kind.FAILED, reason, timing)


def read_timing(value: bytes) -> Timing | None:
    found = _TIMING.search(value) if value else None
    if found is None:
        return None
    try:
        queue, infer = float(found[1]) / 1e3, float(found[2]) / 1e3
        return Timing(queue, infer, int(found[4]), None if found[3] is None else float(found[3]) / 1e3)
    except ValueError:
        return None


def _field(head: bytes, name: bytes) -> bytes:
    """The value of a field in a head that is in small letters; empty if there is none."""
    at = head.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    start = at + len(name) + 3
    return head[start : head.find(b"\r\n", start)].strip()


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
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._closing = closing  # called at the end, for what was made for this target
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
        self._closing()

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
