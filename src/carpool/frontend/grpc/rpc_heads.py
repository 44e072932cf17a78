"""Reads heads of calls: what a client says before its message, read once for all calls that say the same; and
writes what stands before and behind an answer."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from enum import IntEnum
from time import monotonic
from typing import Any, Final
from urllib.parse import quote

from carpool.core.job import INFINITY
from carpool.frontend.grpc.h2_frames import BlockReader, Fields, field

Metadata = tuple[tuple[str, str | bytes], ...]


class Status(IntEnum):
    """Names how a call ended, by gRPC's numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


PRINTABLE: Final = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""What is not escaped in gRPC's messages: printable ASCII without the percent sign."""

ENCODINGS = ("identity", "deflate", "gzip")

_KNOWN_BYTES: Final = 32 * 1024  # of heads that a connection remembers, as their fields count
_LONGEST_KNOWN: Final = 2048  # bytes of a block
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_NOT_IN_A_VALUE = re.compile(rb"[\x00\r\n]")
_PARENT = re.compile(rb"\x00\x0btraceparent\x37([0-9a-f-]{55})")  # a literal that no table keeps
_PSEUDO = (b":method", b":scheme", b":path", b":authority")
_OF_ONE_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NOT_SHOWN = frozenset((b"te", b"content-type"))

_CONTENT_TYPE: Final = b"\x0f\x10\x10application/grpc"
HEAD = b"\x88" + _CONTENT_TYPE + field(b"grpc-accept-encoding", b", ".join(map(str.encode, ENCODINGS)))
"""Before an answer: 200, and what it is."""
HEADS = {name: HEAD + field(b"grpc-encoding", name.encode()) for name in ENCODINGS[1:]}
FINE = field(b"grpc-status", b"0")


_OF_A_HEAD = (
    *("accepts", "asked", "encoding", "fault", "http_status", "length", "metadata", "path", "size"),
    *("timeout", "timeout_fault"),
)


class CallHead:
    """Holds what the head of a call says. `fault`: it is no request of HTTP; `http_status`: it is none of
    gRPC."""

    __slots__ = _OF_A_HEAD

    def __init__(self, fields: Fields, size: int) -> None:
        self.size = size  # as it counts against the limit
        self.asked: Any = None  # what its metadata ask for, once they have been read
        self.path = ""
        self.metadata: Metadata = ()
        self.timeout = INFINITY  # seconds
        self.timeout_fault = False
        self.encoding = "identity"  # of the messages that are marked as compressed
        self.accepts: tuple[str, ...] = ()  # encodings of answers
        self.length: int | None = None  # of all its data, if it says so
        self.http_status = 200
        self.fault = self._read(fields)

    def _read(self, fields: Fields) -> str:
        special: dict[bytes, bytes] = {}
        found: dict[bytes, bytes] = {}
        metadata: list[tuple[str, str | bytes]] = []
        for name, value in fields:
            if name.startswith(b":"):
                if found or name in special or name not in _PSEUDO:
                    return "a pseudo-header that cannot be here"
                special[name] = value
                continue
            fault = wrong_field(name, value)
            if fault:
                return fault
            found[name] = value
            if name not in _NOT_SHOWN and not name.startswith(b"grpc-"):
                metadata.append((name.decode(), _shown(name, value)))
        if not special.get(b":path") or b":method" not in special or b":scheme" not in special:
            return "a pseudo-header is missing"
        self.path = special[b":path"].decode(errors="replace")
        self.metadata = tuple(metadata)
        if special[b":method"] != b"POST":
            self.http_status = 405
        elif not _is_grpc(found.get(b"content-type", b"")):
            self.http_status = 415
        return self._read_grpc(found)

    def _read_grpc(self, found: dict[bytes, bytes]) -> str:
        timeout = found.get(b"grpc-timeout")
        if timeout is not None:
            parts = _TIMEOUT.fullmatch(timeout)
            self.timeout_fault = parts is None
            if parts is not None:
                self.timeout = int(parts[1]) * _UNITS[parts[2]]
        self.encoding = found.get(b"grpc-encoding", b"identity").decode(errors="replace")
        accepted = found.get(b"grpc-accept-encoding", b"").decode(errors="replace")
        self.accepts = tuple(part.strip() for part in accepted.split(","))
        length = found.get(b"content-length")
        if length is not None:
            if not length.isdigit() or len(length) > 18:
                return "a content-length that is not a number"
            self.length = int(length)
        return ""

    def parents(self) -> list[str | bytes]:
        return [value for name, value in self.metadata if name == "traceparent"]

    def with_parent(self, parent: str) -> CallHead:
        """Returns the same head with another `traceparent`."""
        head = CallHead([], self.size)
        for name in _OF_A_HEAD:
            setattr(head, name, getattr(self, name))
        head.metadata = tuple(
            (name, parent if name == "traceparent" else value) for name, value in self.metadata
        )
        if self.asked is not None:
            head.asked = self.asked._replace(metadata=head.metadata)
        return head


def wrong_field(name: bytes, value: bytes) -> str:
    """Returns what is wrong with a header field that is not special; nothing, mostly."""
    if not _NAME.fullmatch(name) or name in _OF_ONE_HOP:
        return "a header field that HTTP/2 does not have"
    if name == b"te" and value != b"trailers":
        return "a transfer encoding"
    if _NOT_IN_A_VALUE.search(value):
        return "a header field that breaks off"
    return ""


def _is_grpc(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/grpc" or kind.startswith(b"application/grpc+")


def _shown(name: bytes, value: bytes) -> str | bytes:
    if name.endswith(b"-bin"):
        try:
            return b64decode(value + b"=" * (-len(value) % 4))
        except binascii.Error:
            return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class HeadReader:
    """Reads the heads of one connection. A client says the same again and again: a block is found by its
    bytes, while the table that it may refer to stays as it is. One that traces sends another parent each
    time, which is left out of them."""

    __slots__ = ("_blocks", "_known", "_known_bytes", "_limit", "_traced", "spent")

    def __init__(self, limit: int) -> None:
        self._blocks = BlockReader(limit)
        self._limit = limit
        self._known: dict[bytes, CallHead] = {}
        self._traced: dict[bytes, CallHead] = {}  # by a block without the parent
        self._known_bytes = 0  # of both
        self.spent = 0.0  # seconds that unknown blocks took, until they are charged to the client

    def read(self, block: bytes) -> CallHead:
        """Raises `Breach`."""
        known = self._known.get(block)
        if known is not None:
            return known
        short = len(block) <= _LONGEST_KNOWN
        found = _PARENT.search(block) if short else None
        if found is not None:
            others, parent = block[: found.start(1)] + block[found.end(1) :], found[1].decode()
            known = self._traced.get(others)
            if known is not None:
                return known.with_parent(parent)
        began = monotonic()
        before = self._blocks.changes
        head = self._decoded(block)
        if self._blocks.changes != before:
            self._forget()
        elif head.size > self._limit:
            pass  # too large: it is not cached
        elif found is not None and not head.fault and head.parents() == [parent]:
            # Inside another field it would not be text: its first byte is none. And it is the only one.
            self._keep(self._traced, others, head)
        elif short:
            self._keep(self._known, block, head)
        self.spent += monotonic() - began
        return head

    def _decoded(self, block: bytes) -> CallHead:
        fields, size = self._blocks.read(block)
        head = CallHead(fields, size)
        if size > self._limit:
            head.fault = ""  # what is wrong with it is its size
        return head

    def _keep(self, known: dict[bytes, CallHead], key: bytes, head: CallHead) -> None:
        size = len(key) + head.size
        if self._known_bytes + size > _KNOWN_BYTES:
            self._forget()
        self._known_bytes += size
        known[key] = head

    def _forget(self) -> None:
        self._known.clear()
        self._traced.clear()
        self._known_bytes = 0

    def read_trailers(self, block: bytes) -> str:
        """Returns what is wrong with them: else they say nothing to us. Raises `Breach`."""
        began = monotonic()
        before = self._blocks.changes
        fields, size = self._blocks.read(block)
        if self._blocks.changes != before:
            self._forget()
        self.spent += monotonic() - began
        if size > self._limit:
            return "trailers over the limit of heads"
        if any(name.startswith(b":") for name, _ in fields):
            return "a pseudo-header in trailers"
        return next(filter(None, (wrong_field(*one) for one in fields)), "")


def trailers(status: Status, details: str, metadata: Metadata = ()) -> bytes:
    """Returns the last block of a call."""
    if status is Status.OK and not details and not metadata:
        return FINE
    out = [FINE if status is Status.OK else field(b"grpc-status", b"%d" % status)]
    if details:
        out.append(field(b"grpc-message", quote(details, PRINTABLE, errors="replace").encode()))
    for name, value in metadata:
        out.append(field(name.encode(), value.encode() if isinstance(value, str) else value))
    return b"".join(out)


def refused_head(http_status: int) -> bytes:
    """Returns the head of an answer to what is no call of gRPC: all of it."""
    return field(b":status", b"%d" % http_status)
