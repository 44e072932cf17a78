"""Where the body of a request goes: straight into a buffer, into memory, or nowhere."""

from __future__ import annotations

import re
import socket
from typing import Protocol, cast

from carpool.frontend.http.exchange import BodyPlan, Collect, More, Receive, bad_request
from carpool.frontend.http.gathering import Gather, GatherCompressed, Ledger, body_encoding, too_large
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import RequestHead

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*\r\n")

_nowhere = bytearray(1024 * 1024)

_LINES_AT_ONCE = 64
_NOTHING = bytearray()


class Sink(Protocol):
    """Takes a body's bytes as they come; raises `Fault` when it is too much."""

    def take(self, piece: memoryview) -> None: ...


class Discard:
    """Reads past a body that nobody wants, up to a limit."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, piece: memoryview) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise too_large(self._limit)


class LengthReader:
    """A body whose length the head gave."""

    __slots__ = ("left", "received", "sink")

    def __init__(self, length: int, sink: Sink) -> None:
        self.left = length
        self.received = 0
        self.sink = sink

    @property
    def finished(self) -> bool:
        return self.left == 0

    def feed(self, data: memoryview) -> int:
        """Take what belongs to the body; returns how much that was."""
        count = min(len(data), self.left)
        self.sink.take(data[:count])
        self.left -= count
        self.received += count
        return count


class ChunkedReader:
    """A chunked body. Extensions and trailers are checked, bounded and dropped."""

    __slots__ = (
        "_chunks",
        "_decoded",
        "_left",
        "_limits",
        "_line",
        "_overhead",
        "_step",
        "finished",
        "received",
        "sink",
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
            raise bad_request(f"the chunked body has more than {self._limits.max_chunks} chunks")
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


BodyReader = LengthReader | ChunkedReader


def skip_received(connection: socket.socket, count: int) -> int:
    """Throw away up to `count` bytes that a TCP socket has received, without copying; returns how many."""
    skipped = 0
    try:
        while skipped < count:
            wanted = min(count - skipped, len(_nowhere))
            got = connection.recv_into(_nowhere, wanted, socket.MSG_TRUNC)
            skipped += got
            if got < wanted:
                break
    except OSError:
        pass  # nothing there for now, or an error that the transport will find by itself
    return skipped


class Intake:
    """One per connection, used again for every request. The hot path uses `into`, `got`, `room` and `size`.

    `into` may be a byte longer than the body. A read that leaves room is known to have taken all there was;
    one that fills its buffer is followed by another, most often for nothing.
    """

    __slots__ = ("_gather", "_ledger", "_limits", "_more", "_reader", "got", "into", "room", "size")

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self._limits = limits
        self._ledger = ledger
        self._reader: BodyReader | None = None
        self._gather: Gather | None = None
        self.into: memoryview | None = None
        self._more: More | None = None
        self.got = 0
        self.size = 0  # of the body that goes into `into`
        self.room = 0  # how much of it `into` can hold

    def start(self, head: RequestHead, plan: BodyPlan) -> None:
        """Follow the app's plan; raises `Fault` for a body that will not do."""
        self.got = 0
        if isinstance(plan, Receive):
            size = head.content_length
            if size is None or (plan.buffer.nbytes < size and plan.more is None):
                raise ValueError("a body can only be received into a buffer that is long enough for it")
            self._more = plan.more
            self.size = size
            self.into = plan.buffer[: size + 1]
            self.room = min(size, plan.buffer.nbytes)
        elif isinstance(plan, Collect):
            self._gather = self._gathering(head, plan)
            self._read_into(self._gather, head)
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

    def skip(self, head: RequestHead) -> None:
        """Read past what is left of the body."""
        discard = Discard(self._limits.drain_bytes)
        if self.into is not None:
            self._reader = LengthReader(self.size - self.got, discard)
            self.into = None
        elif self._reader is not None:
            self._reader.sink = discard
        else:
            self._read_into(discard, head)
        self._gather = None

    def forget(self) -> None:
        """Let go of every buffer: the body ends here, complete or not."""
        self.into = None
        self._more = None
        self._reader = None
        self.got = 0
        self._gather = None

    def finish(self) -> bytearray:
        """As `forget`, for a complete body: returns what was gathered of it."""
        body = _NOTHING if self._gather is None else self._gather.body
        self.forget()
        return body

    @property
    def started(self) -> bool:
        return self.into is not None or self._reader is not None

    @property
    def chunked(self) -> bool:
        return isinstance(self._reader, ChunkedReader)

    @property
    def finished(self) -> bool:
        if self.into is not None:
            return self.got >= self.size
        return self._reader is not None and self._reader.finished

    @property
    def received(self) -> int:
        return self.got if self._reader is None else self._reader.received

    def take(self, data: bytes | bytearray, position: int, end: int) -> int:
        """Use what belongs to the body; returns where the rest begins."""
        if self._reader is not None:
            return position + self._reader.feed(memoryview(data)[position:end])
        into = cast(memoryview, self.into)
        count = min(end - position, self.room - self.got)
        into[self.got : self.got + count] = memoryview(data)[position : position + count]
        self.got += count
        if self.got == self.room < self.size:
            self.grow()
        return position + count

    def beyond(self) -> bytes:
        """What was received behind the body: at most the first byte of the next request."""
        return b"" if self.into is None else bytes(self.into[self.size : self.got])

    def skip_in_kernel(self, connection: socket.socket) -> None:
        """Throw away what the socket already holds of a body that is being skipped, without copying it."""
        if isinstance(self._reader, LengthReader) and isinstance(self._reader.sink, Discard):
            count = skip_received(connection, self._reader.left)
            self._reader.left -= count
            self._reader.received += count

    def _gathering(self, head: RequestHead, plan: Collect) -> Gather:
        encoding = body_encoding(head.headers.get(b"content-encoding")) if plan.inflate else None
        if encoding is not None:
            return GatherCompressed(encoding, self._limits.max_body_bytes, plan.limit, self._ledger)
        if head.content_length is not None and head.content_length > plan.limit:
            raise too_large(plan.limit)
        return Gather(plan.limit, self._ledger)

    def _read_into(self, sink: Sink, head: RequestHead) -> None:
        if head.content_length is None:
            self._reader = ChunkedReader(self._limits, sink)
        else:
            self._reader = LengthReader(head.content_length, sink)
