"""What a request for embeddings may say, and its answer.

OpenAI's `input` is text. Here each input is an image: a `data:` URL or the address of an image, as Infinity
has it; or messages with images, as vLLM has them. Text is rejected by name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.http.picture_question import WebImage
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.wire.head import load_object

_KNOWN = (
    *("model", "input", "messages", "modality", "encoding_format", "dimensions", "user"),
    *("truncate_prompt_tokens", "add_special_tokens", "continue_final_message", "add_generation_prompt"),
)
_MOST_DIMENSIONS = 1 << 20
_TEXT = "it must be an image, as a data: URL or its address: this server embeds images, not text"


class Asked(NamedTuple):
    model: str
    images: Sequence[bytes | WebImage]
    as_base64: bool
    dimensions: int  # 0: as many as the model has


def read_embeddings(body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    for name in document:
        if name not in _KNOWN:
            raise _wrong(name[:64], f"unknown {shown(name)}; {nearest(name, _KNOWN)}")
    model, form = document.get("model"), document.get("encoding_format", "float")
    if not isinstance(model, str) or not model:
        raise _wrong("model", "model must be the name of a model: GET /v1/models lists them")
    if form not in ("float", "base64"):
        raise _wrong("encoding_format", "encoding_format must be float or base64")
    if document.get("modality") not in (None, "image"):
        raise _wrong("modality", "modality must be image: this server embeds images")
    return Asked(model, _images(document), form == "base64", _dimensions(document.get("dimensions")))


def _wrong(field: str, message: str) -> InvalidInput:
    return InvalidInput(message, field=field)


def _dimensions(given: object) -> int:
    if given is None:
        return 0
    if type(given) is not int or not 1 <= given <= _MOST_DIMENSIONS:
        raise _wrong("dimensions", f"dimensions must be a whole number from 1 to {_MOST_DIMENSIONS}")
    return given


def _images(document: Mapping[str, Any]) -> list[bytes | WebImage]:
    given, messages = document.get("input"), document.get("messages")
    if (given is None) == (messages is None):
        raise _wrong("input", "give either input or messages")
    if messages is not None:
        return [_of_messages(messages)]
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= MAX_PICTURES:
        raise _wrong("input", f"input must have 1 to {MAX_PICTURES} images")
    one = len(listed) == 1
    return [_image(text, "input" if one else f"input[{number}]") for number, text in enumerate(listed)]


def _image(given: object, where: str) -> bytes | WebImage:
    if isinstance(given, dict):  # as some clients of Infinity have it
        given = given.get("image", given.get("url"))
    if not isinstance(given, str):
        raise _wrong(where, f"{where}: {_TEXT}")
    start = given[:8].lower()
    if start.startswith("data:"):
        return from_base64(given, where)
    if start.startswith(("http://", "https://")):
        return WebImage(given)
    raise _wrong(where, f"{where}: {_TEXT}")


def _of_messages(messages: object) -> bytes | WebImage:
    """Returns the one image of vLLM's messages. Text beside it is for models that embed both."""
    parts = [
        part
        for message in (messages if isinstance(messages, list) else [])
        for part in _content(message)
        if not (isinstance(part, dict) and part.get("type") == "text" and not str(part.get("text")).strip())
    ]
    part = parts[0] if len(parts) == 1 else None
    if not isinstance(part, dict):
        raise _wrong("messages", "messages must have one part: an image_url")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if part.get("type") != "image_url" or not isinstance(url, str):
        raise _wrong("messages", f"messages: {_TEXT}")
    return _image(url, "messages")


def _content(message: object) -> Sequence[object]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else [content]


def told(asked: Asked, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    data = []
    for index, one in enumerate(results):
        vector = one.get("embedding")
        if vector is None:
            raise InvalidInput(f"model '{asked.model}' embeds nothing", reason="no-task", field="model")
        if asked.dimensions not in (0, len(vector)):
            what = f"{asked.model} has {len(vector)} dimensions, not {asked.dimensions}: leave it out"
            raise _wrong("dimensions", f"dimensions: {what}")
        packed = base64.b64encode(np.array(vector, "<f4").tobytes()).decode() if asked.as_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": packed})
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}
