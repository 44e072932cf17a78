"""Bodies on the plain path: gathered or not wanted, of known length or chunked."""

from __future__ import annotations

import re
import socket
import threading
from typing import Protocol

from carpool.frontend.http.limits import Limits
from carpool.frontend.http.responses import Fault, bad_request

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t -~\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*\r\n")

_nowhere = bytearray(1024 * 1024)

_LINES_AT_ONCE = 64


class Sink(Protocol):
    """Takes a body's bytes as they come; raises `Fault` when it is too much."""

    def take(self, piece: memoryview) -> None: ...


class Ledger:
    """How many bytes of gathered bodies there are, of all connections together, wherever they are.

    Loop and threads count in it. The lock can be taken twice by one thread: a body may be freed, and so give
    its bytes back, at any point of any thread.
    """

    __slots__ = ("_lock", "held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.RLock()

    def take(self, size: int) -> bool:
        with self._lock:
            if self.held + size > self.limit:
                return False
            self.held += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.held -= size


class GatheredBody(bytearray):
    """A body in memory. It counts for as long as anybody holds it: a queue, a thread, a view."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self._counted = 0

    def grow(self, piece: bytes | memoryview) -> None:
        if not self.ledger.take(len(piece)):
            raise Fault(503, "too many bodies are here at once; try again", "busy")
        self._counted += len(piece)
        self += piece

    def __del__(self) -> None:
        self.ledger.give_back(self._counted)


class Gather:
    """Keeps a body in memory, up to a limit of its own and one shared by all connections."""

    __slots__ = ("_limit", "body")

    def __init__(self, limit: int, ledger: Ledger) -> None:
        self._limit = limit
        self.body = GatheredBody(ledger)

    def take(self, piece: memoryview) -> None:
        if len(self.body) + len(piece) > self._limit:
            raise too_large(self._limit)
        self.body.grow(piece)


class Discard:
    """Reads past a body that nobody wants, up to a limit."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, piece: memoryview) -> None:
        self.skip(len(piece))

    def skip(self, count: int) -> None:
        self._left -= count
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


def too_large(limit: int) -> Fault:
    return Fault(413, f"the body is over {limit} bytes", "too-large")


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
