"""Reads what a request with pictures asks for: its fields, its query, and the pictures in its body.

Pure functions. A body is one picture as it is, a form with files, or base64 in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput, TooLarge
from carpool.frontend.http.body import body_encoding
from carpool.frontend.http.exchange import (
    HttpHead,
    choose_encoding,
)
from carpool.frontend.http.infer_route import ATTEMPT_FIELD, DEADLINE_FIELD, LATEST_FIELD, SOURCE_FIELD
from carpool.frontend.http.query_text import read_query
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.link.senders import (
    Sender,
    checked,
    read_attempt,
    read_budget,
    read_latest,
    read_source,
)
from carpool.vision.heads import Buffer
from carpool.wire.head import load_object

MAX_PICTURES = 64
"""In one request."""

_MAX_FIELD_BYTES = 256
_SENT_AS = ("image", "images", "url")  # in JSON
_FORM = b"multipart/form-data"
_JSON = b"application/json"
_FIELDS = (
    b"content-type",
    b"accept",
    b"accept-encoding",
    b"content-encoding",
    DEADLINE_FIELD,
    SOURCE_FIELD,
    LATEST_FIELD,
    ATTEMPT_FIELD,
)
_KEPT = 256
_WEIGHT = re.compile(rb"q=([01](?:\.[0-9]{0,3})?)")
_PICTURES = {b"image/jpeg": "jpeg", b"image/png": "png", b"image/webp": "webp", b"image/*": "jpeg"}
_DOCUMENTS = (b"application/json", b"application/*", b"*/*")
MAX_PARTS = 128
_MAX_HEAD_BYTES = 4096
_MAX_PADDING = 256  # spaces that a relay may leave behind a boundary

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\\r\n]|\\[^\r\n])*)")')
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class BodyLayout(NamedTuple):
    """How the pictures lie in a body, as its Content-Type says. What they are, their own bytes say."""

    kind: str  # raw, form or json
    boundary: bytes = b""


class ImageHead(NamedTuple):
    layout: BodyLayout
    model: str
    version: str
    options: Mapping[str, str]  # not read yet: what they may be is for the model's task to say
    drawn: str  # the format of a drawn answer, should one be wanted
    wants_drawn: bool  # it is, by the Accept field
    budget: float  # seconds from the head to the client's deadline
    sender: Sender
    encoding: bytes | None  # how JSON may be compressed
    in_place: bool  # the body is one picture, as it is, of a known size
    events: bool = False  # text is wanted as it is written


def read_image_head(head: HttpHead, version: str = "") -> ImageHead:
    """Reads the head with the version that the path names, if any. Raises `InvalidInput` that names the field
    at fault."""
    who = head.who
    asked = _read(head.query, tuple(map(head.headers.get, _FIELDS)), bool(head.content_length), who is None)
    if version and asked.version:
        raise InvalidInput("the path has a version already", field="version")
    if version:
        asked = asked._replace(version=version)
    return asked if who is None else asked._replace(sender=asked.sender.with_key(who))


def read_head_alone(head: HttpHead, version: str, options: Mapping[str, str]) -> ImageHead:
    """Reads who asks, and with which deadline, of a request whose images and options stand elsewhere."""
    fields = (None, None, None, None, *map(head.headers.get, _FIELDS[4:]))
    asked = _read("", fields, False, head.who is None)
    asked = asked._replace(layout=BodyLayout("raw"), version=version, options=options)
    return asked if head.who is None else asked._replace(sender=asked.sender.with_key(head.who))


@lru_cache(maxsize=_KEPT)
def _read(query_text: str, fields: tuple[bytes | None, ...], sized: bool, keyless: bool) -> ImageHead:
    """Kept, for every picture has a head of its own, which differs from the last one only in its length."""
    content_type, accept, accepted, content_encoding, deadline, source, latest, attempt = fields
    query = read_query(query_text)
    form, wanted = read_accept(accept or b"")
    events = _flag(query.pop("stream", "0")) or wants_events(accept or b"")
    layout = read_layout(content_type)
    compressed = body_encoding(content_encoding) is not None
    sender = Sender(read_source(source), read_latest(latest), again=read_attempt(attempt))
    return ImageHead(
        layout,
        query.pop("model", ""),
        query.pop("version", ""),
        query,
        form,
        wanted,
        read_budget(deadline),
        checked(sender) if keyless else sender,  # a key's holder is a source
        None if accepted is None else choose_encoding(accepted),
        sized and not compressed and layout.kind == "raw",
        events,
    )


def wants_events(field: bytes) -> bool:
    """Returns whether events are wanted rather than a document."""
    best = {b"events": 0.0, b"documents": 0.0}
    for entry in field.lower().split(b","):
        kind, *parameters = (part.strip(b" \t") for part in entry.split(b";"))
        weights = [found for found in map(_WEIGHT.fullmatch, parameters) if found]
        side = b"events" if kind == b"text/event-stream" else b"documents"
        best[side] = max(best[side], float(weights[0][1]) if weights else 1.0)
    return best[b"events"] > best[b"documents"]


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidInput(f"stream must be 1 or 0, not {shown(text)}", field="stream")
    return text == "1"


def read_accept(field: bytes) -> tuple[str, bool]:
    """Returns the format of a drawn answer, and whether one is preferred to JSON."""
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


# ── the pictures ──


@dataclass(slots=True)
class Sent:
    """`several` is answered as a list, even if it is of one."""

    pictures: Sequence[Buffer]
    several: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # options in a form
    url: str = ""  # the picture is to be fetched from there


def read_layout(content_type: bytes | None) -> BodyLayout:
    kind, _, _ = (content_type or b"").partition(b";")
    kind = kind.strip(b" \t").lower()
    if kind == _FORM:
        return BodyLayout("form", read_boundary((content_type or b"").strip(b" \t")))
    return BodyLayout("json" if kind == _JSON else "raw")


def read_pictures(body: bytes | bytearray, layout: BodyLayout) -> Sent:
    """Returns those in a form or in JSON. Long bodies take their time: safe in any thread."""
    return _from_form(body, layout.boundary) if layout.kind == "form" else _from_json(body)


def _from_form(body: bytes | bytearray, boundary: bytes) -> Sent:
    pictures: list[Buffer] = []
    fields: dict[str, str] = {}
    for part in read_form(body, boundary):
        if part.name == "file":
            _check_count(len(pictures) + 1)
            pictures.append(part.data)
        elif part.file_name is not None:
            raise InvalidInput(
                f"images belong in the field 'file', not in {shown(part.name)}", field=part.name[:64]
            )
        elif part.name in fields or len(part.data) > _MAX_FIELD_BYTES:
            raise InvalidInput(f"{shown(part.name)} is given twice, or too long", field=part.name[:64])
        else:
            fields[part.name] = bytes(part.data).decode("utf-8", "replace")
    if not pictures:
        raise InvalidInput("the form has no field 'file' with an image", field="file")
    return Sent(pictures, len(pictures) > 1, fields)


def _from_json(body: bytes | bytearray) -> Sent:
    document = load_object(body, "request", tensors=False)
    for name in document:
        if name not in _SENT_AS:
            raise InvalidInput(
                f"unknown {shown(name)}; {nearest(name, _SENT_AS)}; options belong in the query",
                field=name[:64],
            )
    if len(document) != 1:
        raise InvalidInput('give one of "image" and "images", in base64, or "url"', field="image")
    if "url" in document:
        url = document["url"]
        if type(url) is not str or not url:
            raise InvalidInput('"url" must be a string: the address of an image', field="url")
        return Sent((), url=url)
    if "image" in document:
        return Sent([_decoded(document["image"], "image")])
    listed = document["images"]
    if type(listed) is not list or not listed:
        raise InvalidInput('"images" must be a list of images in base64', field="images")
    _check_count(len(listed))
    return Sent([_decoded(text, f"images[{number}]") for number, text in enumerate(listed)], True)


def _decoded(text: Any, where: str) -> bytes:
    if type(text) is not str:
        raise InvalidInput(f"{where} must be a string: the image in base64", field=where)
    return from_base64(text, where)


def _check_count(count: int) -> None:
    if count > MAX_PICTURES:
        raise TooLarge(f"a request may have at most {MAX_PICTURES} images", field="file")


class FormPart(NamedTuple):
    """`data` is a view of the body. A field that is no file has no file name."""

    name: str
    file_name: str | None
    data: memoryview


def read_boundary(content_type: bytes) -> bytes:
    """Returns the boundary that a multipart/form-data field gives."""
    text = content_type.decode("latin-1")
    parameters = _parameters(text[len("multipart/form-data") :], "the Content-Type field")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidInput("the Content-Type field names no valid boundary", field="Content-Type")
    return boundary.encode("latin-1")


def read_form(body: bytes | bytearray, boundary: bytes) -> Iterator[FormPart]:
    """The parts in order; raises `InvalidInput` for whatever could be read in two ways."""
    view = memoryview(body)
    between = b"\r\n--" + boundary
    position = _after_opening(body, boundary)
    for _ in range(MAX_PARTS):
        end_of_head = body.find(b"\r\n\r\n", position - 2, position + _MAX_HEAD_BYTES)
        if end_of_head < 0:
            raise _broken("the head of a part does not end")
        start = end_of_head + 4
        end = body.find(between, start)
        if end < 0:
            raise _broken("a part does not end with the boundary")
        name, file_name = _read_head(bytes(view[position : end_of_head + 2]))
        yield FormPart(name, file_name, view[start:end])
        position, last = _after_boundary(body, end + len(between))
        if last:
            return
    raise TooLarge(f"the form has more than {MAX_PARTS} parts", field="body")


def _after_opening(body: bytes | bytearray, boundary: bytes) -> int:
    opening = b"--" + boundary
    start = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(opening, start):
        raise _broken("it does not begin with the boundary")
    position, last = _after_boundary(body, start + len(opening))
    if last:
        raise InvalidInput("the form is empty; send an image as 'file'", field="file")
    return position


def _after_boundary(body: bytes | bytearray, position: int) -> tuple[int, bool]:
    """Returns where the next part begins, or that there is none."""
    if body.startswith(b"--", position):
        if bytes(body[position + 2 : position + 6]).strip(b" \t\r\n"):
            raise _broken("something follows the last boundary")
        return position, True
    padding = bytes(body[position : position + _MAX_PADDING + 2])
    spaces = len(padding) - len(padding.lstrip(b" \t"))
    if not padding.startswith(b"\r\n", spaces):
        raise _broken("a boundary does not end its line")
    return position + spaces + 2, False


def _read_head(head: bytes) -> tuple[str, str | None]:
    """Returns the name of a field and of its file, from lines that each end with CR LF."""
    found: tuple[str, str | None] | None = None
    for line in head.split(b"\r\n")[:-1]:
        key, colon, value = line.decode("utf-8", "replace").partition(":")
        if not colon or not re.fullmatch(_TOKEN, key):
            raise _broken("a part has a malformed head")
        key, value = key.lower(), value.strip(" \t")
        if key == "content-disposition":
            if found is not None:
                raise _broken("a part has two Content-Disposition lines")
            found = _disposition(value)
        elif key == "content-transfer-encoding" and value.lower() not in _PLAIN_ENCODINGS:
            raise InvalidInput("parts of a form have to be binary, not base64 or quoted", field="body")
    if found is None:
        raise _broken("a part has no Content-Disposition")
    return found


def _disposition(value: str) -> tuple[str, str | None]:
    kind, _, _ = value.partition(";")
    parameters = _parameters(value[len(kind) :], "a part's Content-Disposition")
    if kind.strip(" \t").lower() != "form-data" or "name" not in parameters:
        raise _broken("a part is not named form-data")
    return parameters["name"], parameters.get("filename", parameters.get("filename*"))


def _parameters(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    position, text = 0, text.rstrip(" \t")
    while position < len(text):
        match = _PARAMETER.match(text, position)
        if match is None or match[1].lower() in found:
            raise _broken(f"{where} is malformed")
        quoted = match[3]
        found[match[1].lower()] = match[2] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        position = match.end()
    return found


def _broken(what: str) -> InvalidInput:
    return InvalidInput(f"the form cannot be read: {what}", field="body")
