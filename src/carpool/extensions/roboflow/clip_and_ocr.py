"""Implements Roboflow's calls for vectors of images (CLIP), and for the text in images (OCR).

Models for vectors take images here, and no texts: calls with those are answered with a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from carpool.errors import InvalidInput, NotFound
from carpool.extensions.roboflow.roboflow_format import Asked, read_images
from carpool.extensions.roboflow.roboflow_routes import as_question, not_offered
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.http.picture_question import Answer, ask, results_of, with_body
from carpool.wire.head import load_object

_HEAD: Mapping[str, Any] = {"frame_id": None, "time": 0.0, "parent_id": None}
_NO_TEXT = "texts have no vectors here: models for them take images. Compare an image with images"
_ENGINES = ("doctr", "easy_ocr", "trocr", "pp-ocr")


class Comparison(NamedTuple):
    asked: Asked  # the first image is compared with the others
    names: Sequence[str]  # of the others, if they were named


def start_clip(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    if variables["call"] == "embed_image":
        return with_body(service, _read_embedding, partial(_embed, service))
    if variables["call"] == "compare":
        return with_body(service, _read_comparison, partial(_compare, service))
    if variables["call"] == "embed_text":
        raise NotFound(_NO_TEXT, reason="no-task")
    raise NotFound(not_offered(head))


def start_ocr(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    engine = variables["engine"]
    if engine not in _ENGINES:
        raise NotFound(not_offered(head))
    return with_body(service, partial(_read_ocr, engine.replace("-", "_")), partial(_read_out, service))


# ---- vectors -----------------------------------------------------------------------------------------------


def _read_embedding(body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    asked = read_images(document.get("image"), "image")
    return _in_base64(asked, "image", _model(document, "clip"))


def _embed(service: HttpService, exchange: Exchange, asked: Asked, at: float) -> None:
    ask(service, exchange, as_question(service, asked, "embed"), at, _embedded)


def _embedded(answer: Answer) -> object:
    return {**_HEAD, "embeddings": _vectors(answer)}


def _read_comparison(body: bytes | bytearray) -> Comparison:
    """Reads a subject and what it is compared with: an image, a list, or an object with images by name."""
    document = load_object(body, "request", tensors=False)
    if (document.get("subject_type", "image"), document.get("prompt_type", "text")) != ("image", "image"):
        raise NotFound(_NO_TEXT, reason="no-task")
    given, names = document.get("prompt"), ()
    if isinstance(given, dict) and "type" not in given:
        names, given = tuple(given), list(given.values())
    model_id = _model(document, "clip")
    subject = _in_base64(read_images(document.get("subject"), "subject"), "subject", model_id)
    prompts = _in_base64(read_images(given, "prompt"), "prompt", model_id)
    if len(subject.pictures) != 1:
        raise InvalidInput("subject must be one image", field="subject")
    if len(prompts.pictures) >= MAX_PICTURES:
        raise InvalidInput(f"prompt must have at most {MAX_PICTURES - 1} images", field="prompt")
    return Comparison(Asked(model_id, [*subject.pictures, *prompts.pictures], several=True), names)


def _compare(service: HttpService, exchange: Exchange, asked: Comparison, at: float) -> None:
    ask(service, exchange, as_question(service, asked.asked, "embed"), at, partial(_compared, asked.names))


def _compared(names: Sequence[str], answer: Answer) -> object:
    subject, *prompts = _vectors(answer)
    found = [_cosine(subject, one) for one in prompts]
    return {**_HEAD, "similarity": dict(zip(names, found, strict=True)) if names else found}


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def _vectors(answer: Answer) -> list[list[float]]:
    return [one["embedding"] for one in results_of(answer)]


# ---- text --------------------------------------------------------------------------------------------------


def _read_ocr(engine: str, body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    if document.get("generate_bounding_boxes"):
        field = "generate_bounding_boxes"
        raise InvalidInput(f"{field}: the text alone is answered here; leave it out", field=field)
    asked = read_images(document.get("image"), "image")
    return Asked(_model(document, engine), asked.pictures, asked.url, asked.several)


def _read_out(service: HttpService, exchange: Exchange, asked: Asked, at: float) -> None:
    ask(service, exchange, as_question(service, asked, "read"), at, partial(_texts, asked))


def _texts(asked: Asked, answer: Answer) -> object:
    return [_text(one) for one in results_of(answer)] if asked.several else _text(answer)


def _text(answer: Answer) -> dict[str, Any]:
    return {"result": answer["text"], "time": 0.0, "parent_id": None}


# ---- requests ----------------------------------------------------------------------------------------------


def _in_base64(asked: Asked, where: str, model_id: str) -> Asked:
    if asked.url:
        raise InvalidInput(f"{where} must be in base64", field=where)
    return Asked(model_id, asked.pictures, several=True)


def _model(document: Mapping[str, Any], engine: str) -> str:
    """Returns the id of the model that the client names, or nothing: then the first for the task answers."""
    field = f"{engine}_version_id"
    given = document.get(field)
    if given is not None and not isinstance(given, str):
        raise InvalidInput(f"{field} must be the name of a model", field=field)
    return given or ""
