"""An HTTP answer as far as a load generator cares: its status, its reason, its timing, and where it ends.

Bytes in, outcome out, no sockets. Bodies are counted and thrown away; of an error, the beginning is kept.
"""

from __future__ import annotations

import re

from carpool.errors import CarpoolError
from carpool.lab.load.ticket import PLAIN_ANSWER, Answer, Kind, Timing
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
