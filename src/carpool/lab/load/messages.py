"""Requests as bytes, made once for each kind: what differs from one to the next is chosen, not built."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import TypeAlias

from carpool.errors import InvalidInput
from carpool.lab.load.request_data import Draw
from carpool.lab.load.ticket import Ticket
from carpool.types import InferRequest, RequestOptions, Tensor
from carpool.wire.v2 import HEADER_LENGTH, encode_request

Message: TypeAlias = tuple[bytes, bytes]
"""Head and body, to be written one after the other; a small body is in the head already, which costs less."""
Header: TypeAlias = tuple[str, str]

SOURCE = "X-Carpool-Source"
DEADLINE = "X-Carpool-Deadline-Ms"
LATEST = "X-Carpool-Latest"
_SETS = 64  # of tensors that are kept
_KINDS = 8192  # messages that are kept: sources × priorities × bodies
_SMALL = 16 * 1024
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OURS = {"host", "content-length", "transfer-encoding", "connection", HEADER_LENGTH.lower()}

Bodies = Callable[[int], Sequence[list[Tensor]]]
"""The different sets of tensors for requests of so many images."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request says beside its tensors or picture. `path` is from the root of the server."""

    host: str
    path: str
    headers: tuple[Header, ...] = ()
    deadline_ms: float | None = None


def check_headers(headers: Sequence[Header]) -> None:
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise InvalidInput(f"--header {name!r} must be 'Name: value' in printable ASCII")
        if name.lower() in _OURS:
            raise InvalidInput(f"--header {name} cannot be given: the generator sets it")


def check_source(source: str) -> None:
    if not source.isprintable() or not 1 <= len(source) <= 128:
        raise InvalidInput("--source must be printable text of 1 to 128 characters")


def asked_headers(asking: Asking, source: str) -> list[Header]:
    """Those that tell the server who asks and until when, and the user's own."""
    found = list(asking.headers)
    if source:
        found.append((SOURCE, source))
    if asking.deadline_ms is not None and isfinite(asking.deadline_ms):
        found.append((DEADLINE, f"{asking.deadline_ms:.3f}"))
    return found


def tensor_messages(asking: Asking, model: str, bodies: Bodies, draw: Draw) -> Callable[[Ticket], Message]:
    """Protocol v2 with binary tensors."""
    made = lru_cache(maxsize=_SETS)(bodies)

    @lru_cache(maxsize=_SETS)
    def tail(images: int, number: int) -> bytes:  # one for all kinds that have these tensors
        return b"".join(encode_request(InferRequest(model, made(images)[number])).buffers[1:])

    @lru_cache(maxsize=_KINDS)
    def build(images: int, number: int, source: str, priority: int) -> Message:
        options = RequestOptions(priority=priority)
        request = InferRequest(model, made(images)[number], options=options, binary_output=True)
        encoded = encode_request(request)
        fields = [*asked_headers(asking, source), ("Content-Type", "application/octet-stream")]
        if encoded.header_length is not None:
            fields.append((HEADER_LENGTH, str(encoded.header_length)))
        return _joined(_head(asking, fields, encoded.size) + encoded.buffers[0], tail(images, number))

    def message(ticket: Ticket) -> Message:
        images = ticket.images
        number = ticket.number % len(made(images))
        return build(images, number, draw.source(ticket), draw.priority(ticket))

    return message


def picture_messages(
    asking: Asking, pictures: Sequence[tuple[bytes, str]], draw: Draw
) -> Callable[[Ticket], Message]:
    """Image upload: the file is the body. `pictures` have their content types."""

    @lru_cache(maxsize=_KINDS)
    def build(number: int, source: str) -> Message:
        picture, content_type = pictures[number]
        return head_and_body(asking, source, content_type, picture)

    return lambda ticket: build(ticket.number % len(pictures), draw.source(ticket))


def head_and_body(asking: Asking, source: str, content_type: str, body: bytes) -> Message:
    fields = [*asked_headers(asking, source), ("Content-Type", content_type)]
    return _joined(_head(asking, fields, len(body)), body)


def _joined(head: bytes, body: bytes) -> Message:
    return (head + body, b"") if len(body) <= _SMALL else (head, body)


def _head(asking: Asking, fields: Sequence[Header], size: int) -> bytes:
    lines = [f"POST {asking.path} HTTP/1.1", f"Host: {asking.host}"]
    lines += [f"{name}: {value}" for name, value in fields]
    lines += [f"Content-Length: {size}", "", ""]
    return "\r\n".join(lines).encode()
