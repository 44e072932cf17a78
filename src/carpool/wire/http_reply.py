"""What an HTTP server replies, read from a stream within bounds: for those who ask others over asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_NO_BODY = (204, 304)
_MOST_FIELDS = 128
_MOST_INTERIM = 8  # replies of status 1xx before the one that counts
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class NotHttp(ValueError):
    """What came is no HTTP/1.1 reply, or ended too early."""


class TooLong(ValueError):
    """The body is longer than wanted."""


class Reply(NamedTuple):
    status: int
    fields: Mapping[str, str]  # names in small letters
    body: bytes
    keep: bool  # the connection can carry another request


async def read_reply(reader: asyncio.StreamReader, most_bytes: int) -> Reply:
    """To a request that was no HEAD. Raises `NotHttp` and `TooLong`; how long it may take is the caller's."""
    try:
        for _ in range(_MOST_INTERIM):
            status, minor, fields = _read_head(await reader.readuntil(b"\r\n\r\n"))
            if status >= 200:
                body, ended = await _read_body(reader, status, fields, most_bytes)
                keep = ended and minor == 1 and fields.get("connection", "").lower() != "close"
                return Reply(status, fields, body, keep)
    except asyncio.IncompleteReadError:
        raise NotHttp("the connection ended before the reply did") from None
    except asyncio.LimitOverrunError:
        raise NotHttp("the reply's head has no end") from None
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
    reader: asyncio.StreamReader, status: int, fields: Mapping[str, str], most: int
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


async def _read_chunks(reader: asyncio.StreamReader, most: int) -> bytes:
    body = bytearray()
    while True:
        found = _CHUNK_SIZE.fullmatch(await reader.readuntil(b"\r\n"))
        if found is None:
            raise NotHttp("a chunk has no length")
        length = int(found[1], 16)
        if not length:
            break
        if len(body) + length > most:
            raise TooLong(f"longer than {most} bytes")
        body += await reader.readexactly(length)
        if await reader.readexactly(2) != b"\r\n":
            raise NotHttp("a chunk is longer than it says")
    for _ in range(_MOST_FIELDS):  # trailers, which nobody here wants
        if await reader.readuntil(b"\r\n") == b"\r\n":
            return bytes(body)
    raise NotHttp("too many trailers")
