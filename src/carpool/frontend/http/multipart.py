"""Forms with files, as browsers and curl send them: read strictly, from a body that is all here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from carpool.errors import InvalidInput, TooLarge

MAX_PARTS = 128
_MAX_HEAD_BYTES = 4096
_MAX_PADDING = 256  # spaces that a relay may leave behind a boundary

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\\r\n]|\\[^\r\n])*)")')
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class Part(NamedTuple):
    """`data` is a view of the body. A field that is no file has no file name."""

    name: str
    file_name: str | None
    data: memoryview


def read_boundary(content_type: bytes) -> bytes:
    """The boundary that a multipart/form-data field gives."""
    text = content_type.decode("latin-1")
    parameters = _parameters(text[len("multipart/form-data") :], "the Content-Type field")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidInput("the Content-Type field names no valid boundary", field="Content-Type")
    return boundary.encode("latin-1")


def read_form(body: bytes | bytearray, boundary: bytes) -> Iterator[Part]:
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
        yield Part(name, file_name, view[start:end])
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
        raise InvalidInput("the form is empty; send a picture as 'file'", field="file")
    return position


def _after_boundary(body: bytes | bytearray, position: int) -> tuple[int, bool]:
    """Where the next part begins, or that there is none."""
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
    """The name of a field and of its file, from lines that each end with CR LF."""
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
        raise _broken("a part is no named form-data")
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
