"""What the head of an infer request asks for, besides the model: pure functions of its fields."""

from __future__ import annotations

import re
from typing import NamedTuple

from carpool.core.job import INFINITY
from carpool.errors import InvalidInput
from carpool.servers.http.compression import body_encoding, choose_encoding
from carpool.servers.http.packing import AT_ONCE
from carpool.servers.http.parsing import RequestHead
from carpool.wire.v2 import HEADER_LENGTH, read_header_length

DEADLINE = "X-Carpool-Deadline-Ms"
SOURCE = "X-Carpool-Source"
MAX_SOURCE_CHARS = 128

_LENGTH_FIELD = HEADER_LENGTH.lower().encode()
_DEADLINE_FIELD = DEADLINE.lower().encode()
_SOURCE_FIELD = SOURCE.lower().encode()
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class InferHead(NamedTuple):
    header_length: int | None  # of the JSON; None when the whole body is JSON, 0 for a raw request
    in_place: bool  # the body can be received where it will be used
    budget: float  # seconds from the head to the client's deadline
    source: str
    json_encoding: bytes | None  # how an answer in JSON may be compressed
    binary_encoding: bytes | None


def read_infer_head(head: RequestHead) -> InferHead:
    """Raises `InvalidInput` that names the field at fault."""
    headers = head.headers
    encoded = body_encoding(headers.get(b"content-encoding")) is not None
    known_size = None if encoded else head.content_length
    header_length = read_header_length(headers.get(_LENGTH_FIELD), known_size)
    json_encoding, binary_encoding = _answer_encodings(headers.get(b"accept-encoding"))
    return InferHead(
        header_length,
        known_size is not None and header_length is not None and header_length <= AT_ONCE,
        _budget(headers.get(_DEADLINE_FIELD)),
        _source(headers.get(_SOURCE_FIELD)),
        json_encoding,
        binary_encoding,
    )


def _budget(field: bytes | None) -> float:
    if field is None:
        return INFINITY
    budget = float(field) / 1e3 if _MILLISECONDS.fullmatch(field) else 0.0
    if not budget:
        raise InvalidInput(f"{DEADLINE} must be a number of milliseconds above 0", field=DEADLINE)
    return budget


def _source(field: bytes | None) -> str:
    if field is None:
        return ""
    try:
        source = field.decode()
    except UnicodeDecodeError:
        source = "\0"
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable():
        raise InvalidInput(
            f"{SOURCE} must be printable text of at most {MAX_SOURCE_CHARS} characters", field=SOURCE
        )
    return source


def _answer_encodings(field: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Many HTTP libraries list every encoding they know, on every request; tensors barely shrink and cost
    milliseconds. So those are compressed only for a client that names one encoding, and so means it.
    """
    if field is None:
        return None, None
    encoding = choose_encoding(field)
    return encoding, None if b"," in field or field.startswith(b"*") else encoding
