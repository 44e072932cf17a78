"""What the head of a picture's request asks for: pure functions of its fields and its query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl

from carpool.config.rules import shown
from carpool.errors import InvalidInput
from carpool.frontend.http.compression import body_encoding, choose_encoding
from carpool.frontend.http.image_body import Layout, read_layout
from carpool.frontend.http.parsing import RequestHead
from carpool.link.asked_fields import (
    DEADLINE,
    LATEST,
    SOURCE,
    Sender,
    checked,
    read_budget,
    read_latest,
    read_source,
)

_DEADLINE_FIELD = DEADLINE.lower().encode()
_SOURCE_FIELD = SOURCE.lower().encode()
_LATEST_FIELD = LATEST.lower().encode()
_FIELDS = (
    b"content-type",
    b"accept",
    b"accept-encoding",
    b"content-encoding",
    _DEADLINE_FIELD,
    _SOURCE_FIELD,
    _LATEST_FIELD,
)
_KEPT = 256
_MOST_PARAMETERS = 32
_WEIGHT = re.compile(rb"q=([01](?:\.[0-9]{0,3})?)")
_PICTURES = {b"image/jpeg": "jpeg", b"image/png": "png", b"image/webp": "webp", b"image/*": "jpeg"}
_DOCUMENTS = (b"application/json", b"application/*", b"*/*")


class ImageHead(NamedTuple):
    layout: Layout
    model: str
    version: str
    options: Mapping[str, str]  # not read yet: what they may be is for the model's task to say
    drawn: str  # the format of a drawn answer, should one be wanted
    wants_drawn: bool  # it is, by the Accept field
    budget: float  # seconds from the head to the client's deadline
    sender: Sender
    encoding: bytes | None  # how JSON may be compressed
    in_place: bool  # the body is one picture, as it is, of a known size


def read_image_head(head: RequestHead) -> ImageHead:
    """Raises `InvalidInput` that names the field at fault."""
    asked = _read(head.query, tuple(map(head.headers.get, _FIELDS)), bool(head.content_length))
    if head.who is not None and head.who.priority:
        return asked._replace(sender=asked.sender._replace(priority=head.who.priority))
    return asked


@lru_cache(maxsize=_KEPT)
def _read(query_text: str, fields: tuple[bytes | None, ...], sized: bool) -> ImageHead:
    """Kept, for every picture has a head of its own, which differs from the last one only in its length."""
    content_type, accept, accepted, content_encoding, deadline, source, latest = fields
    query = read_query(query_text)
    form, wanted = read_accept(accept or b"")
    layout = read_layout(content_type)
    compressed = body_encoding(content_encoding) is not None
    return ImageHead(
        layout,
        query.pop("model", ""),
        query.pop("version", ""),
        query,
        form,
        wanted,
        read_budget(deadline),
        checked(Sender(read_source(source), read_latest(latest))),
        None if accepted is None else choose_encoding(accepted),
        sized and not compressed and layout.kind == "raw",
    )


def read_query(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS, encoding="utf-8"
        )
    except ValueError:
        raise InvalidInput(
            f"the query is not UTF-8 text or has more than {_MOST_PARAMETERS} parameters", field="query"
        ) from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidInput(f"{shown(name)} is given twice", field=name[:64])
        found[name] = value
    return found


def read_accept(field: bytes) -> tuple[str, bool]:
    """The format of a drawn answer, and whether one is preferred to JSON."""
    best, form, document = 0.0, "jpeg", 0.0
    for entry in field.lower().split(b","):
        kind, *parameters = (part.strip(b" \t") for part in entry.split(b";"))
        weights = [found for found in map(_WEIGHT.fullmatch, parameters) if found]
        weight = float(weights[0][1]) if weights else 1.0
        if kind in _PICTURES and weight > best:
            best, form = weight, _PICTURES[kind]
        elif kind in _DOCUMENTS:
            document = max(document, weight)
    return form, best > document
