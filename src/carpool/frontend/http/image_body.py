"""The pictures in a body: one as it is, a form with files, or base64 in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput, TooLarge
from carpool.frontend.http.multipart import read_boundary, read_form
from carpool.frontend.pictures.picture_text import from_base64
from carpool.vision.heads import Buffer
from carpool.wire.head import load_object

MAX_PICTURES = 64
"""In one request."""

_MAX_FIELD_BYTES = 256
_FORM = b"multipart/form-data"
_JSON = b"application/json"


class Layout(NamedTuple):
    """How the pictures lie in a body, as its Content-Type says. What they are, their own bytes say."""

    kind: str  # raw, form or json
    boundary: bytes = b""


@dataclass(slots=True)
class Sent:
    """`several` is answered as a list, even if it is of one."""

    pictures: Sequence[Buffer]
    several: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # options in a form


def read_layout(content_type: bytes | None) -> Layout:
    kind, _, _ = (content_type or b"").partition(b";")
    kind = kind.strip(b" \t").lower()
    if kind == _FORM:
        return Layout("form", read_boundary((content_type or b"").strip(b" \t")))
    return Layout("json" if kind == _JSON else "raw")


def read_pictures(body: bytes | bytearray, layout: Layout) -> Sent:
    """Long bodies take their time: safe in any thread."""
    if layout.kind == "form":
        return _from_form(body, layout.boundary)
    return _from_json(body) if layout.kind == "json" else Sent([body])


def _from_form(body: bytes | bytearray, boundary: bytes) -> Sent:
    pictures: list[Buffer] = []
    fields: dict[str, str] = {}
    for part in read_form(body, boundary):
        if part.name == "file":
            _check_count(len(pictures) + 1)
            pictures.append(part.data)
        elif part.file_name is not None:
            raise InvalidInput(
                f"pictures go into the field 'file', not into {shown(part.name)}", field=part.name[:64]
            )
        elif part.name in fields or len(part.data) > _MAX_FIELD_BYTES:
            raise InvalidInput(f"{shown(part.name)} is given twice, or too long", field=part.name[:64])
        else:
            fields[part.name] = bytes(part.data).decode("utf-8", "replace")
    if not pictures:
        raise InvalidInput("the form has no field 'file' with a picture", field="file")
    return Sent(pictures, len(pictures) > 1, fields)


def _from_json(body: bytes | bytearray) -> Sent:
    document = load_object(body, "request")
    for name in document:
        if name not in ("image", "images"):
            raise InvalidInput(
                f"unknown {shown(name)}; {nearest(name, ('image', 'images'))}; options go into the query",
                field=name[:64],
            )
    if len(document) != 1:
        raise InvalidInput('give one of "image" and "images", in base64', field="image")
    if "image" in document:
        return Sent([_decoded(document["image"], "image")])
    listed = document["images"]
    if type(listed) is not list or not listed:
        raise InvalidInput('"images" must be a list of pictures in base64', field="images")
    _check_count(len(listed))
    return Sent([_decoded(text, f"images[{number}]") for number, text in enumerate(listed)], True)


def _decoded(text: Any, where: str) -> bytes:
    if type(text) is not str:
        raise InvalidInput(f"{where} must be a string: the picture in base64", field=where)
    return from_base64(text, where)


def _check_count(count: int) -> None:
    if count > MAX_PICTURES:
        raise TooLarge(f"a request may hold {MAX_PICTURES} pictures", field="file")
