"""Answers as bytes: status lines, fields, and the error body that every refusal shares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus

from carpool.errors import CarpoolError

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]
Fields = bytes | Iterable[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_FIELDS = b"content-type: application/json\r\n"

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
_BREAKS_OUT = re.compile(rb"[\r\n\0]")


class Fault(CarpoolError):
    """Something about a request that the server answers itself, without asking the app."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.status = status

    def fields(self) -> bytes:
        return (
            JSON_FIELDS + b"retry-after: 1\r\n"
            if self.status == HTTPStatus.SERVICE_UNAVAILABLE
            else JSON_FIELDS
        )

    def body(self) -> bytes:
        return json.dumps({"error": self.message, "reason": self.reason}).encode()


def bad_request(message: str) -> Fault:
    return Fault(400, message, "bad-request")


def render_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Fields as `name: value` lines."""
    lines = []
    for name, value in fields:
        if _BREAKS_OUT.search(name) or _BREAKS_OUT.search(value):
            raise ValueError(f"line break in response field {name!r}")
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)


def render_head(status: int, fields: bytes, length: int, date: bytes) -> bytes:
    """The head of one answer, up to and with the empty line."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
    if status == HTTPStatus.NO_CONTENT:
        return b"%b%b%b\r\n" % (line, fields, date)
    return b"%b%b%bcontent-length: %d\r\n\r\n" % (line, fields, date, length)


def date_line(now: float) -> bytes:
    """The Date field; made once per sweep, not once per answer."""
    return b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
