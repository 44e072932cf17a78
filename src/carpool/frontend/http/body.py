"""Decides where the body of a request goes: into a buffer, into memory (and there decompressed), or
nowhere."""

from __future__ import annotations

import asyncio
import re
import socket
import zlib
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from carpool.compiling import mypyc_attr
from carpool.errors import without_stack
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.http.borrowed_socket import skip_received
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    Fault,
    HttpHead,
    More,
    Receive,
    bad_request,
)
from carpool.frontend.http.limits import Limits

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*\r\n")
_LINES_AT_ONCE: Final = 64
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# bytes of output, of input
_STEP: Final = 256 * 1024
_WINDOW: Final = 16 * 1024
_STEPS_PER_TURN: Final = 16
_AT_ONCE = 8 * 1024  # bytes, in or out
# each is some work; where there are more, of so many bytes on average
_SHORT_MEMBERS: Final = 64
_MEMBER: Final = 1024

MOST_MEMBERS: Final = 2048
"""Of one gzip body. Tools that write blocks of 64 KiB need half as many for 64 MiB."""


class Sink(Protocol):
    """Takes a body's bytes as they come; raises `Fault` when it is too much."""

    def take(self, piece: memoryview) -> None: ...


class Discard:
    """Reads past a body that is not needed, up to a limit."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, piece: memoryview) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise too_large(self._limit)


class Payer(NamedTuple):
    """Defines whose account bodies are charged to."""

    accounts: Accounts
    name: str


@mypyc_attr(native_class=False)
class GatheredBody(bytearray):
    """Holds a body in memory, up to a limit of its own and what its client's account has room for. It counts
    for as long as anything refers to it: a queue, a thread, a view."""

    def __init__(self, limit: int, payer: Payer) -> None:
        super().__init__()
        self.payer = payer
        self._limit = limit
        self._stake = payer.accounts.body(payer.name, monotonic())

    def take(self, piece: bytes | memoryview) -> None:
        if len(self) + len(piece) > self._limit:
            raise too_large(self._limit)
        if not self.payer.accounts.take(self._stake, len(piece)):
            raise Fault(503, "this client has too many concurrent bodies; retry", "busy")
        self += piece

    def __del__(self) -> None:
        self.payer.accounts.close(self._stake)


def too_large(limit: int) -> Fault:
    return Fault(413, f"the body is over {limit} bytes", "too-large")


def body_encoding(field: bytes | None) -> bytes | None:
    """Returns what a Content-Encoding field asks to undo: gzip, deflate or None; raises 415 for anything
    else."""
    if field is None:
        return None
    encoding = field.strip(b" \t").lower()
    if encoding in (b"", b"identity"):
        return None
    if encoding in (b"gzip", b"x-gzip"):
        return b"gzip"
    if encoding == b"deflate":
        return b"deflate"
    raise Fault(415, "the Content-Encoding has to be gzip, deflate or identity", "unsupported-encoding")


class BodyInflater:
    """Decompresses one body in steps, and stops at the step that takes it over `limit`.

    Each step looks at a window of the compressed bytes: what zlib leaves of its input comes back as a copy,
    and so a copy is never of more than the window, however long the body is.
    """

    def __init__(
        self, encoding: bytes, data: bytes | bytearray, limit: int, payer: Payer, *, whole: bool = True
    ) -> None:
        """Of `data` that is not `whole`, there may be more."""
        self._wbits = _GZIP if encoding == b"gzip" else _deflate_kind(data)
        self._data = memoryview(data)
        self._whole = whole
        self._at = 0
        self._members = 1
        self.left = False  # its client has gone
        self._stream = zlib.decompressobj(self._wbits)
        self.body = GatheredBody(limit, payer)

    def step(self) -> bool:
        """Makes one more piece; True when the body is complete."""
        window = self._data[self._at : self._at + _WINDOW]
        try:
            piece = self._stream.decompress(window, _STEP)
        except zlib.error:
            raise bad_request("the compressed body is damaged") from None
        self.body.take(piece)
        if not self._stream.eof:
            self._at += len(window) - len(self._stream.unconsumed_tail)
            if not piece and self._at == len(self._data) and self._whole:
                raise bad_request("the compressed body ends too early")
            return False
        self._at += len(window) - len(self._stream.unused_data)
        if self._at == len(self._data):
            return True
        self._next_member()
        return False

    def _next_member(self) -> None:
        """gzip may be several members in a row."""
        if self._wbits != _GZIP:
            raise bad_request("something follows the compressed body")
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise bad_request(f"the compressed body has more than {MOST_MEMBERS} members")
        if self._members > _SHORT_MEMBERS and len(self.body) < _MEMBER * (self._members - 1):
            raise bad_request(
                f"the compressed body has more than {_SHORT_MEMBERS} members of under {_MEMBER} bytes"
            )
        self._stream = zlib.decompressobj(self._wbits)

    def begin(self) -> bool:
        """What takes no longer than a thread would to begin: short bodies and members, and what is wrong
        with them. True when the body is complete."""
        while self._at < _AT_ONCE and len(self.body) < _AT_ONCE:
            if self.step():
                return True
        return False

    def turn(self) -> bool:
        """Takes a few milliseconds of steps; True when the body is complete."""
        return any(not self.left and self.step() for _ in range(_STEPS_PER_TURN))


def _deflate_kind(data: bytes | bytearray) -> int:
    """`deflate` means zlib, but some senders leave out its two-byte header."""
    is_zlib = len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] * 256 + data[1]) % 31 == 0
    return _ZLIB if is_zlib else _RAW


@mypyc_attr(native_class=False)
class CompressedBody(GatheredBody):
    """Looks at the start of a body before the rest is kept: what is wrong with it is often wrong there."""

    def __init__(self, encoding: bytes, limit: int, most: int, payer: Payer) -> None:
        """`limit` is of the body as it comes, `most` of what may become of it."""
        super().__init__(limit, payer)
        self.encoding = encoding
        self._most = most
        self._looked = False

    def take(self, piece: bytes | memoryview) -> None:
        super().take(piece)
        if not self._looked and len(self) >= _WINDOW:
            self._looked = True
            BodyInflater(self.encoding, bytes(self[:_WINDOW]), self._most, self.payer, whole=False).begin()


def inflate(
    plan: Collect,
    body: CompressedBody,
    received_at: float,
    exchange: Exchange,
    shared: Shared,
    failed: Callable[[Exception], None],
) -> None:
    """Hands the app a body that is complete. Raises errors, or passes later ones to `failed`."""
    inflater = BodyInflater(body.encoding, body, plan.limit, body.payer)
    if inflater.begin():
        plan.done(inflater.body, received_at)
        return
    if not shared.inflating.take(body.payer.name, 1):
        raise Fault(503, "this client has too many concurrent compressed bodies; retry", "busy")
    Inflation(plan, inflater, received_at, exchange, shared, failed).go_on()


class Inflation:
    """A few KB can hold many MB: what is not done in one step is done in a thread, not in the loop.

    There it gets one turn after the other, with those of other clients' bodies in between, and no more of
    them once its client has left.
    """

    __slots__ = ("_complete", "_exchange", "_failed", "_inflater", "_plan", "_received_at", "_shared")

    def __init__(
        self,
        plan: Collect,
        inflater: BodyInflater,
        received_at: float,
        exchange: Exchange,
        shared: Shared,
        failed: Callable[[Exception], None],
    ) -> None:
        self._plan = plan
        self._inflater = inflater
        self._received_at = received_at
        self._exchange = exchange
        self._shared = shared
        self._failed = failed
        self._complete = False

    def go_on(self) -> None:
        name = self._inflater.body.payer.name
        work = self._shared.fair_inflaters.submit(name, self._turn, self._received_at)
        self._exchange.work = work
        work.add_done_callback(self._turned)

    def _turn(self) -> None:
        self._complete = self._inflater.turn()

    def _turned(self, work: asyncio.Future[None]) -> None:
        self._exchange.work = None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None and self._exchange.pending and not self._complete:
            self.go_on()
            return
        self._shared.inflating.give(self._inflater.body.payer.name, 1)
        if isinstance(error, asyncio.CancelledError) or not self._exchange.pending:
            self._inflater.left = True  # a thread may be at it
            return
        if isinstance(error, Exception):
            self._failed(error)
            without_stack(error)
            return
        try:
            self._plan.done(self._inflater.body, self._received_at)
        except Exception as raised:
            self._failed(raised)


class ChunkedReader:
    """Reads a chunked body. Extensions and trailers are checked, bounded and dropped."""

    __slots__ = (
        *("_chunks", "_decoded", "_left", "_limits", "_line", "_overhead", "_step"),
        *("finished", "received", "sink"),
    )

    def __init__(self, limits: Limits, sink: Sink) -> None:
        self._limits = limits
        self.sink = sink
        self.finished = False
        self.received = 0
        self._decoded = 0
        self._left = 0
        self._overhead = 0
        self._line = b""
        self._chunks = 0
        self._step = ChunkedReader._size_line  # not bound: the reader would refer to itself, with its body

    def feed(self, data: memoryview) -> int:
        """Take what belongs to the body; returns how much that was. Many small chunks are taken a few at a
        time: each is work, whatever it carries."""
        position = lines = 0
        while position < len(data) and not self.finished:
            if self._left:
                piece = data[position : position + self._left]
                self._left -= len(piece)
                self.sink.take(piece)
                position += len(piece)
            elif lines == _LINES_AT_ONCE:
                break
            else:
                lines += 1
                position = self._line_from(data, position)
        self.received += position
        return position

    def _line_from(self, data: memoryview, position: int) -> int:
        room = self._limits.max_header_bytes - len(self._line)
        piece = bytes(data[position : position + room])
        feed = piece.find(b"\n")
        if feed < 0:
            if len(piece) == room:
                raise bad_request("a line of the chunked body is too long")
            self._line += piece
            return position + len(piece)
        line, self._line = self._line + piece[: feed + 1], b""
        self._step(self, line)
        return position + feed + 1

    def _size_line(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise bad_request("a chunk of the body does not start with its size")
        self._count(len(line) - match.end(1) - 2)
        size = int(match[1], 16)
        if size == 0:
            self._step = ChunkedReader._trailer_line
            return
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise bad_request(
                f"Chunked request body exceeds maximum of {self._limits.max_chunks} non-empty chunks."
                " Send fewer or larger HTTP chunks."
            )
        self._decoded += size
        if self._decoded > self._limits.max_body_bytes:
            raise too_large(self._limits.max_body_bytes)
        self._left = size
        self._step = ChunkedReader._end_of_chunk

    def _end_of_chunk(self, line: bytes) -> None:
        if line != b"\r\n":
            raise bad_request("a chunk of the body is longer than its size")
        self._step = ChunkedReader._size_line

    def _trailer_line(self, line: bytes) -> None:
        if line == b"\r\n":
            self.finished = True
            return
        if not _TRAILER_LINE.fullmatch(line):
            raise bad_request("a trailer of the chunked body is malformed")
        self._count(len(line))

    def _count(self, overhead: int) -> None:
        self._overhead += overhead
        if self._overhead > self._limits.max_header_bytes:
            raise bad_request("the chunked body has too many extensions or trailers")


class BodyIntake:
    """Takes the bodies of one connection, and is used again for every request. The hot path uses `into`,
    `got`, `room` and `size`.

    `into` may be a byte longer than the body. A read that leaves room is known to have taken all there was;
    one that fills its buffer is followed by another, most often for nothing.
    """

    __slots__ = (
        *("_accounts", "_limits", "_more", "_sink"),
        *("chunks", "gathered", "got", "into", "room", "size"),
    )

    def __init__(self, limits: Limits, accounts: Accounts) -> None:
        self._limits = limits
        self._accounts = accounts
        self.into: memoryview | None = None
        self._more: More | None = None
        self._sink: Sink | None = None  # takes a body of known length that goes elsewhere
        self.chunks: ChunkedReader | None = None  # reads one of unknown length
        self.gathered: GatheredBody | None = None  # what came of one that is kept in memory
        self.got = 0
        self.size = 0  # of a body of known length
        self.room = 0  # how much of it `into` can hold

    def start(self, head: HttpHead, plan: BodyPlan, exchange: Exchange) -> None:
        """Follow the app's plan; raises `Fault` for a body that will not do."""
        self.got = 0
        size = head.content_length
        if type(plan) is Receive:
            if size is None or (plan.buffer.nbytes < size and plan.more is None):
                raise ValueError("a body can only be received into a buffer that is long enough for it")
            self._more = plan.more
            self.size = size
            self.into = plan.buffer[: size + 1]
            self.room = min(size, plan.buffer.nbytes)
        elif isinstance(plan, Collect):
            payer = Payer(self._accounts, exchange.payer)
            field = head.headers.get(b"content-encoding")
            encoding = body_encoding(field) if field is not None and plan.inflate else None
            if encoding is not None:
                limit = self._limits.max_body_bytes
                self.gathered = CompressedBody(encoding, limit, plan.limit, payer)
            elif size is not None and size > plan.limit:
                raise too_large(plan.limit)
            else:
                self.gathered = GatheredBody(plan.limit, payer)
            if size is None:
                self.chunks = ChunkedReader(self._limits, self.gathered)
            else:
                self._sink, self.size = self.gathered, size
        else:
            self.skip(head)

    def grow(self) -> None:
        """The room is used up and the body is not complete: go on in a longer buffer, if there is one."""
        more = self._more
        assert more is not None
        longer = more(self.got)
        if longer is not None:
            self.into = longer[: self.size + 1]
            self.room = min(self.size, longer.nbytes)

    def skip(self, head: HttpHead) -> None:
        discard = Discard(self._limits.drain_bytes)
        if self.chunks is not None:
            self.chunks.sink = discard
        elif self.started:
            self._sink, self.into = discard, None
        elif head.content_length is None:
            self.chunks = ChunkedReader(self._limits, discard)
        else:
            self._sink, self.size = discard, head.content_length
        self.gathered = None

    def forget(self) -> None:
        """Let go of every buffer: the body ends here, complete or not."""
        self.into = self._more = self._sink = self.chunks = self.gathered = None
        self.got = 0

    @property
    def started(self) -> bool:
        return self.into is not None or self._sink is not None or self.chunks is not None

    @property
    def received(self) -> int:
        return self.got if self.chunks is None else self.chunks.received

    def take(self, data: bytes | bytearray, position: int, end: int) -> int:
        """Use what belongs to the body; returns where the rest begins."""
        if self.chunks is not None:
            return position + self.chunks.feed(memoryview(data)[position:end])
        if self._sink is not None:
            count = min(end - position, self.size - self.got)
            self._sink.take(memoryview(data)[position : position + count])
            self.got += count
            return position + count
        into = cast(memoryview, self.into)
        count = min(end - position, self.room - self.got)
        into[self.got : self.got + count] = memoryview(data)[position : position + count]
        self.got += count
        if self.got == self.room < self.size:
            self.grow()
        return position + count

    def beyond(self) -> bytes:
        """Returns what was received behind the body: at most the first byte of the next request."""
        return b"" if self.into is None else bytes(self.into[self.size : self.got])

    def skip_in_kernel(self, connection: socket.socket) -> None:
        """Drops what the socket already holds of a body that is being skipped, without copying it."""
        if isinstance(self._sink, Discard):
            self.got += skip_received(connection, self.size - self.got)
