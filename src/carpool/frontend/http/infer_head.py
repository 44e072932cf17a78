"""What the head of an infer request asks for, besides the model: pure functions of its fields."""

from __future__ import annotations

from typing import NamedTuple

from carpool.frontend.http.compression import body_encoding, choose_encoding
from carpool.frontend.http.packing import AT_ONCE
from carpool.frontend.http.parsing import RequestHead
from carpool.link.asked_fields import (
    DEADLINE,
    LATEST,
    SOURCE,
    Sender,
    read_budget,
    read_latest,
    read_source,
)
from carpool.wire.v2 import HEADER_LENGTH, read_header_length

_LENGTH_FIELD = HEADER_LENGTH.lower().encode()
_DEADLINE_FIELD = DEADLINE.lower().encode()
_SOURCE_FIELD = SOURCE.lower().encode()
_LATEST_FIELD = LATEST.lower().encode()


class InferHead(NamedTuple):
    header_length: int | None  # of the JSON; None when the whole body is JSON, 0 for a raw request
    shortest: int  # that the body may be by this, where its length is known
    in_place: bool  # the body can be received where it will be used
    budget: float  # seconds from the head to the client's deadline
    sender: Sender
    json_encoding: bytes | None  # how an answer in JSON may be compressed
    binary_encoding: bytes | None


def read_infer_head(head: RequestHead) -> InferHead:
    """Raises `InvalidInput` that names the field at fault."""
    headers = head.headers
    encoded = body_encoding(headers.get(b"content-encoding")) is not None
    sized = head.content_length is not None and not encoded
    header_length = read_header_length(headers.get(_LENGTH_FIELD))
    json_encoding, binary_encoding = _answer_encodings(headers.get(b"accept-encoding"))
    return InferHead(
        header_length,
        header_length or 0 if sized else 0,
        sized and header_length is not None and header_length <= AT_ONCE,
        read_budget(headers.get(_DEADLINE_FIELD)),
        Sender(
            read_source(headers.get(_SOURCE_FIELD)),
            read_latest(headers.get(_LATEST_FIELD)),
            0 if head.who is None else head.who.priority,
        ),
        json_encoding,
        binary_encoding,
    )


def _answer_encodings(field: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Many HTTP libraries list every encoding they know, on every request; tensors barely shrink and cost
    milliseconds. So those are compressed only for a client that names one encoding, and so means it.
    """
    if field is None:
        return None, None
    encoding = choose_encoding(field)
    return encoding, None if b"," in field or field.startswith(b"*") else encoding
