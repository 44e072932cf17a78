"""What an HTTP server replies, read from a stream within bounds: for those who ask other servers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_NO_BODY = (204, 304)
_MOST_FIELDS = 128
_MOST_INTERIM = 8  # replies of status 1xx before the one that counts
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class ByteReader(Protocol):
    """The part of `asyncio.StreamReader` that is used: a blocking socket can be read so, too."""

    async def read(self, n: int = -1, /) -> bytes: ...
    async def readuntil(self, separator: bytes = b"\n", /) -> bytes: ...
    async def readexactly(self, n: int, /) -> bytes: ...


class NotHttp(ValueError):
    """What came is no HTTP/1.1 reply, or ended too early."""


class TooLong(ValueError):
    """The body is longer than wanted."""


class Reply(NamedTuple):
    status: int
    fields: Mapping[str, str]  # names in small letters
    body: bytes
    keep: bool  # the connection can carry another request


async def read_reply(reader: ByteReader, most_bytes: int) -> Reply:
    """To a request that was no HEAD. Raises `NotHttp` and `TooLong`; how long it may take is the caller's."""
    with _told_as_no_http():
        status, fields, may_keep = await _begin(reader)
        body, ended = await _read_body(reader, status, fields, most_bytes)
        return Reply(status, fields, body, ended and may_keep)


class ReplyBody:
    """A reply whose body is read as it comes."""

    def __init__(self, reader: ByteReader, status: int, fields: Mapping[str, str], *, may_keep: bool) -> None:
        self.reader = reader
        self.status = status
        self.fields = fields
        self.keep = False  # the connection can carry another request: known at the end
        self._may_keep = may_keep
        self._over = False

    async def next(self, most_bytes: int) -> bytes:
        """What came next; nothing at the end. What is not chunked comes whole."""
        if self._over:
            return b""
        with _told_as_no_http():
            if self.fields.get("transfer-encoding", "").lower() == "chunked":
                piece, ended = await _read_chunk(self.reader, most_bytes), True
                self._over = not piece
            else:
                piece, ended = await _read_body(self.reader, self.status, self.fields, most_bytes)
                self._over = True
        self.keep = self._over and ended and self._may_keep
        return piece


async def begin_reply(reader: ByteReader) -> ReplyBody:
    """The head of a reply to a request that was no HEAD."""
    with _told_as_no_http():
        status, fields, may_keep = await _begin(reader)
    return ReplyBody(reader, status, fields, may_keep=may_keep)


@contextmanager
def _told_as_no_http() -> Iterator[None]:
    try:
        yield
    except asyncio.IncompleteReadError:
        raise NotHttp("the connection ended before the reply did") from None
    except asyncio.LimitOverrunError:
        raise NotHttp("the reply's head has no end") from None


async def _begin(reader: ByteReader) -> tuple[int, dict[str, str], bool]:
    """Status, fields, and whether the connection may be used again if the body's end is told."""
    for _ in range(_MOST_INTERIM):
        status, minor, fields = _read_head(await reader.readuntil(b"\r\n\r\n"))
        if status >= 200:
            return status, fields, minor == 1 and fields.get("connection", "").lower() != "close"
    raise NotHttp("too many interim replies")


def _read_head(head: bytes) -> tuple[int, int, dict[str, str]]:
    first, *lines = head[:-4].split(b"\r\n")
    found = _STATUS.fullmatch(first)
    if found is None or len(lines) > _MOST_FIELDS:
        raise NotHttp("the reply does not begin as HTTP/1.1 does")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise NotHttp("the reply has a malformed head")
        name, value = name.lower(), value.strip(" \t")
        if name == "content-length" and fields.get(name, value) != value:
            raise NotHttp("the reply has two lengths")
        fields[name] = value
    return int(found[2]), int(found[1]), fields


async def _read_body(
    reader: ByteReader, status: int, fields: Mapping[str, str], most: int
) -> tuple[bytes, bool]:
    """And whether its end was told, not only that of the connection."""
    if status in _NO_BODY:
        return b"", True
    if "transfer-encoding" in fields:
        if fields["transfer-encoding"].lower() != "chunked":
            raise NotHttp("the reply comes in an unknown encoding")
        return await _read_chunks(reader, most), True
    length = fields.get("content-length")
    if length is not None:
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise NotHttp("the reply's length is no number")
        if int(length) > most:
            raise TooLong(f"longer than {most} bytes")
        return await reader.readexactly(int(length)), True
    body = bytearray()
    while piece := await reader.read(1 << 16):
        body += piece
        if len(body) > most:
            raise TooLong(f"longer than {most} bytes")
    return bytes(body), False


async def _read_chunks(reader: ByteReader, most: int) -> bytes:
    body = bytearray()
    while piece := await _read_chunk(reader, most - len(body)):
        body += piece
    return bytes(body)


async def _read_chunk(reader: ByteReader, most: int) -> bytes:
    """The next one; nothing is the end of all."""
    found = _CHUNK_SIZE.fullmatch(await reader.readuntil(b"\r\n"))
    if found is None:
        raise NotHttp("a chunk has no length")
    length = int(found[1], 16)
    if length > most:
        raise TooLong(f"{length - most} bytes longer than it may be")
    if length:
        chunk = await reader.readexactly(length)
        if await reader.readexactly(2) != b"\r\n":
            raise NotHttp("a chunk is longer than it says")
        return chunk
    for _ in range(_MOST_FIELDS):  # trailers, which nobody here wants
        if await reader.readuntil(b"\r\n") == b"\r\n":
            return b""
    raise NotHttp("too many trailers")
