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
from carpool.wire.v2 import decode_error

REFUSALS = frozenset({408, 409, 429, 503, 504})
_MOST_HEAD = 64 * 1024
_KEPT = 4096  # of an error's body
_STATUS = re.compile(rb"http/1\.([01]) ([1-5][0-9][0-9])[ \r]")
_TIMING = re.compile(
    rb"queue;dur=([0-9.]{1,15}), infer;dur=([0-9.]{1,15})(?:, post;dur=([0-9.]{1,15}))?"
    rb'.*batch;desc="([0-9]{1,6})"'
)
_CHUNK = re.compile(rb"(?:\r\n)?([0-9a-fA-F]{1,8})[^\r\n]{0,256}\r\n")  # behind the chunk before it
_MOST_CHUNK_LINE = 300
_REASON = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Malformed(CarpoolError):
    """The server does not speak HTTP, or breaks off."""

    reason = "malformed"


class AnswerReader:
    """Reads one answer after the other. `feed` returns an answer when it is complete."""

    def __init__(self, clock: Clock | None = None) -> None:
        """With a clock, answers are streams whose pieces are timed."""
        self._clock = clock
        self._tokens: TokenTimes | None = None
        self.started = False  # whether some byte of the present answer has come
        self.keep_alive = True  # whether the connection can be used after the last answer
        self._buffer = b""  # what has come and was not looked at yet
        self._head = b""  # lowered; empty until it is complete
        self._status = 0
        self._chunked = False
        self._left: int | None = 0  # bytes of the body, or of the chunk; None is until the connection closes
        self._kept = b""

    def feed(self, data: bytes) -> Answer | None:
        self.started = True
        self._buffer += data
        while self._head or self._read_head():
            if not (self._read_chunks() if self._chunked else self._read_body()):
                return None
            if self._status >= 200:
                return self._finish()
            self._head = b""  # an interim answer, like 100 Continue
        return None

    def close(self) -> Answer | None:
        """The connection was closed: the end of an answer without a length, or of nothing."""
        return self._finish() if self._head and self._left is None else None

    def _read_head(self) -> bool:
        """Whether it is complete; then it is known where the body will end."""
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > _MOST_HEAD:
            raise Malformed(f"the head of the answer is over {_MOST_HEAD} bytes")
        head = head.lower()
        if not b"http/1.".startswith(head[:7]):
            raise Malformed("the answer is not HTTP/1")
        if not end:
            return False
        head += b"\r\n"
        found = _STATUS.match(head)
        if found is None:
            raise Malformed("the answer is not HTTP/1")
        self._head, self._buffer, self._kept = head, rest, b""
        self._status = int(found[2])
        self._tokens = None
        if self._clock is not None and b"text/event-stream" in _field(head, b"content-type"):
            self._tokens = TokenTimes()
        self.keep_alive = found[1] == b"1" and b"close" not in _field(head, b"connection")
        has_body = self._status >= 200 and self._status not in (204, 304)
        self._chunked = has_body and b"chunked" in _field(head, b"transfer-encoding")
        length = _field(head, b"content-length")
        self._left = 0
        if has_body and length and not self._chunked:
            if not length.isdigit() or len(length) > 15:
                raise Malformed("the answer's Content-Length is not a number")
            self._left = int(length)
        elif has_body and not self._chunked:
            self._left = None
            self.keep_alive = False
        return True

    def _read_body(self) -> bool:
        """Whether that is all of it, or of the chunk. Of an error's, the beginning is kept."""
        part = self._buffer[: self._left]
        self._buffer = self._buffer[len(part) :]
        if self._tokens is not None and self._clock is not None and part:
            self._tokens.feed(part, self._clock())
        if self._status >= 300:
            self._kept = (self._kept + part)[:_KEPT]
        if self._left is None:
            return False
        self._left -= len(part)
        return not self._left

    def _read_chunks(self) -> bool:
        while self._read_body():
            found = _CHUNK.match(self._buffer)
            if found is None:
                if len(self._buffer) > _MOST_CHUNK_LINE or b"\n" in self._buffer[2:]:
                    raise Malformed("a chunk of the answer is malformed")
                return False
            self._left = int(found[1], 16)
            if not self._left:
                return self._read_trailer(found.end())
            self._buffer = self._buffer[found.end() :]
        return False

    def _read_trailer(self, start: int) -> bool:
        """Fields after the last chunk are read past."""
        end = self._buffer.find(b"\r\n\r\n", start - 2)
        if end < 0 and len(self._buffer) > _MOST_HEAD:
            raise Malformed("the trailer of the answer is too long")
        if end >= 0:
            self._buffer = self._buffer[end + 4 :]
        return end >= 0

    def _finish(self) -> Answer:
        if self._buffer:
            raise Malformed("more bytes came than the answer has")
        answer = outcome(self._status, _field(self._head, b"server-timing"), self._kept)
        if self._clock is not None and answer.kind is Kind.ANSWERED:
            answer = _of_stream(Streamed(fault="no-stream") if self._tokens is None else self._tokens.end())
        self._head = b""
        self.started = False
        return answer


def _of_stream(streamed: Streamed) -> Answer:
    if streamed.fault:
        return Answer(Kind.REFUSED if streamed.refused else Kind.FAILED, streamed.fault)
    return Answer(Kind.ANSWERED, stream=streamed)


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


@dataclass(eq=False)
class HttpTarget:
    """One server over at most `connections` of them: whoever finds none free waits, and that counts."""

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
        """An answer may still come on its connection, and cannot be told from the next one's: close it."""
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
        """Without one, somebody who waited is told: a server that is gone fails every request, once each."""
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
            self.drop()  # nobody asked
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
