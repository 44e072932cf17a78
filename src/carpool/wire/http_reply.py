"""Reads what an HTTP server replies, within bounds, for those who ask other servers. `ReplyReader` is given
the bytes as they come and knows no socket; `read_reply` and `begin_reply` read from a stream with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_NO_BODY = (204, 304)
_MOST_HEAD = 64 * 1024
_MOST_FIELDS = 128
_MOST_INTERIM = 8  # replies of status 1xx before the one that counts
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_MOST_CHUNK_LINE = 300
_AT_ONCE = 256 * 1024
FEW_CHUNKS = 256
"""Of any length, where a body is wanted as a whole: servers of files send chunks of some KB."""
_BYTES_OF_A_CHUNK = 1024  # on average, of those beyond the first few


class NotHttp(ValueError):
    """What came is no HTTP/1.1 reply, or ended too early."""


class TooLong(ValueError):
    """The body is longer than wanted."""


class ReplyReader:
    """Reads one reply to a request that was no HEAD. Raises `NotHttp` and `TooLong`.

    Each chunk is work, however short it is. With `few_chunks`, a body may have so many of any length, and
    beyond those one for each 1,024 bytes; a reply that is written as it is made may have any number.
    """

    def __init__(self, most_bytes: int, few_chunks: int | None = None) -> None:
        self.status = 0  # until the head is complete
        self.fields: Mapping[str, str] = {}  # names in small letters
        self.over = False  # all of the reply has come
        self.keep = False  # the connection can carry another request: known at the end
        self.extra = False  # more bytes came than the reply has
        self._most = most_bytes  # of the body that may still come
        self._buffer = b""  # what came last, behind what was left of the bytes before
        self._at = 0  # up to here it was read
        self._chunks_left: float | None = few_chunks
        self._interim = 0
        self._may_keep = False
        self._chunked = False
        self._left: int | None = 0  # bytes of the body, or of the chunk; None is until the connection closes
        self._behind = False  # behind the data of a chunk

    def feed(self, data: bytes) -> bytes:
        """Returns the part of the body that came with this."""
        left = self._buffer[self._at :]
        self._buffer, self._at = left + data if left else data, 0
        if not self.status and not self._read_head():
            return b""
        part = self._read_chunks() if self._chunked else self._read_body()
        if self.over:
            self.extra = self._at < len(self._buffer)
            self.keep = self._may_keep and not self.extra
        return part

    def end(self) -> None:
        """Notes that the connection was closed, which ends a body whose length was not given."""
        if not self.over and (not self.status or self._left is not None):
            raise NotHttp("the connection ended before the reply did")
        self.over = True
        self.keep = False

    def _read_head(self) -> bool:
        """Returns whether it is complete; then it is known where the body will end."""
        while True:
            start = self._at
            end = self._buffer.find(b"\r\n\r\n", start)
            if (len(self._buffer) if end < 0 else end) - start > _MOST_HEAD:
                raise NotHttp("the reply's head has no end")
            if not b"HTTP/1.".startswith(self._buffer[start : start + 7]):
                raise NotHttp("the reply does not begin as HTTP/1.1 does")
            if end < 0:
                return False
            self._at = end + 4
            status, minor, fields = _fields_of(self._buffer[start:end])
            if status >= 200:
                break
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise NotHttp("too many interim replies")
        self.status, self.fields = status, fields
        self._may_keep = minor == 1 and "close" not in fields.get("connection", "").lower()
        self._chunked = status not in _NO_BODY and "transfer-encoding" in fields
        if self._chunked:
            if fields["transfer-encoding"].lower() != "chunked":
                raise NotHttp("the reply has an unknown encoding")
        elif status not in _NO_BODY:
            self._left = self._length(fields.get("content-length"))
        return True

    def _length(self, length: str | None) -> int | None:
        if length is None:
            return None
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise NotHttp("the reply's length is not a number")
        self._expect(int(length))
        return int(length)

    def _expect(self, length: int) -> None:
        if length > self._most:
            raise TooLong(f"{length - self._most} bytes longer than it may be")
        self._most -= length

    def _read_body(self) -> bytes:
        part = self._take()
        if self._left is None:
            self._expect(len(part))
        self.over = self._left == 0
        return part

    def _take(self) -> bytes:
        start, left = self._at, self._left
        part = self._buffer[start:] if left is None else self._buffer[start : start + left]
        self._at = start + len(part)
        if left is not None:
            self._left = left - len(part)
        return part

    def _read_chunks(self) -> bytes:
        parts = []
        while not self.over:
            if self._left:
                parts.append(self._take())
                self._behind = True
            if self._left or not self._read_size():
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_size(self) -> bool:
        """Returns the line before the next chunk, behind the end of the one before; after the last one, the
        rest."""
        buffer, start = self._buffer, self._at
        if self._behind:
            if not b"\r\n".startswith(buffer[start : start + 2]):
                raise NotHttp("a chunk is longer than it says")
            start += 2
        found = _CHUNK_SIZE.match(buffer, start)
        if found is None:
            if len(buffer) - start > _MOST_CHUNK_LINE or buffer.find(b"\n", start) >= 0:
                raise NotHttp("a chunk has no length")
            return False
        length = int(found[1], 16)
        if length:
            self._count_chunk(length)
            self._expect(length)
            self._left, self._at = length, found.end()
            return True
        end = buffer.find(b"\r\n\r\n", found.end() - 2)  # behind fields that are not used
        if end < 0 and len(buffer) - start > _MOST_HEAD:
            raise NotHttp("too many trailers")
        if end >= 0:
            self.over, self._at = True, end + 4
        return end >= 0

    def _count_chunk(self, length: int) -> None:
        if self._chunks_left is not None:
            self._chunks_left += length / _BYTES_OF_A_CHUNK - 1
            if self._chunks_left < 0:
                raise NotHttp("the reply is cut into too many short chunks")


def _fields_of(head: bytes) -> tuple[int, int, dict[str, str]]:
    """Returns the status, the minor version and the fields."""
    first, *lines = head.decode("latin-1").split("\r\n")
    found = _STATUS.fullmatch(first)
    if found is None or len(lines) > _MOST_FIELDS:
        raise NotHttp("the reply does not begin as HTTP/1.1 does")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise NotHttp("the reply has a malformed head")
        name, value = name.lower(), value.strip(" \t")
        if name == "content-length" and fields.get(name, value) != value:
            raise NotHttp("the reply has two lengths")
        fields[name] = value
    return int(found[2]), int(found[1]), fields


# ---- from a stream


class ByteReader(Protocol):
    """Defines the part of `asyncio.StreamReader` that is used."""

    async def read(self, n: int, /) -> bytes:
        """What comes next, up to this; nothing is the end."""


class Reply(NamedTuple):
    status: int
    fields: Mapping[str, str]
    body: bytes
    keep: bool  # the connection can carry another request


class ReplyBody:
    """Represents a reply whose body is read as it comes."""

    def __init__(self, stream: ByteReader, reader: ReplyReader, part: bytes) -> None:
        self.status = reader.status
        self.fields = reader.fields
        self._stream = stream
        self._reader = reader
        self._part = part

    @property
    def keep(self) -> bool:
        """Returns whether the connection can carry another request: known at the end."""
        return self._reader.keep

    async def next(self) -> bytes:
        """Returns what came next; nothing at the end."""
        while not self._part and not self._reader.over:
            self._part = await _feed(self._stream, self._reader)
        part, self._part = self._part, b""
        return part

    async def whole(self) -> bytes:
        parts = []
        while part := await self.next():
            parts.append(part)
        return b"".join(parts)


async def begin_reply(stream: ByteReader, most_bytes: int, few_chunks: int | None = None) -> ReplyBody:
    """Reads the head of a reply whose body is still to come. How long it may take is for the caller to
    bound."""
    reader = ReplyReader(most_bytes, few_chunks)
    part = b""
    while not reader.status:
        part = await _feed(stream, reader)
    return ReplyBody(stream, reader, part)


async def read_reply(stream: ByteReader, most_bytes: int) -> Reply:
    reply = await begin_reply(stream, most_bytes)
    body = await reply.whole()
    return Reply(reply.status, reply.fields, body, reply.keep)


async def _feed(stream: ByteReader, reader: ReplyReader) -> bytes:
    data = await stream.read(_AT_ONCE)
    if data:
        return reader.feed(data)
    reader.end()
    return b""
