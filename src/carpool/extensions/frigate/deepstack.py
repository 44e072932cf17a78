"""Implements DeepStack's detection over HTTP, as Frigate's plugin reads it.

The plugin fails on answers that are not JSON and on the 21st box, and stops reading at the first box that is
below 0.4 or that has a label it does not know. So boxes are sorted, and at most 20; labels can be limited;
and every error is JSON with a list of predictions, which is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from carpool.errors import CarpoolError, InvalidInput
from carpool.extensions.frigate.frigate_settings import read_settings
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_reading import read_form, read_layout
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, with_body
from carpool.vision.heads import Buffer
from carpool.vision.picture_answers import fraction

MOST = 20
"""Boxes of one answer: the plugin has room for no more."""
_LEAST = "0.4"
_LONGEST_KEY = 512


class Asked(NamedTuple):
    picture: Buffer
    least: str


def start_detection(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    layout = read_layout(head.headers.get(b"content-type"))
    if layout.kind != "form":
        raise InvalidInput("send a form with the image in the field 'image'", field="content-type")
    settings = read_settings(service.settings)
    named = variables.get("model", settings.model)

    def read(body: bytes | bytearray) -> Asked:
        return _read(body, layout.boundary)

    def detect(exchange: Exchange, asked: Asked, at: float) -> None:
        question = PictureQuestion(
            pictures=[asked.picture],
            task=None if named else "detect",
            model=named,
            options={"score": asked.least},
        )
        ask(service, exchange, question, at, partial(told, settings.labels))

    return with_body(service, read, detect)


def _read(body: bytes | bytearray, boundary: bytes) -> Asked:
    picture: Buffer | None = None
    least = _LEAST
    for part in read_form(body, boundary):
        if part.name == "image" and picture is None:
            picture = part.data
        elif part.name == "min_confidence":
            least = bytes(part.data).decode("utf-8", "replace")
            fraction("min_confidence", least)
    if picture is None:
        raise InvalidInput("the form has no field 'image'", field="image")
    return Asked(picture, least)


def key_in(body: bytes) -> bytes | None:
    """Returns the key in the form; its boundary is the first line."""
    line, _, _ = body[:256].lstrip(b"\r\n").partition(b"\r\n")
    if not line.startswith(b"--"):
        return None
    try:
        parts = {part.name: part.data for part in read_form(body, line[2:].rstrip(b" \t"))}
    except CarpoolError:
        return None
    return bytes(parts.get("api_key", b"")[:_LONGEST_KEY]) or None


def told(labels: Collection[str], answer: Answer) -> object:
    if "detections" not in answer:
        raise InvalidInput(f"model '{answer['model']}' answers no boxes", reason="no-task")
    listed = sorted(answer["detections"], key=lambda one: -one["score"])
    kept = [one for one in listed if not labels or one["label"] in labels]
    return {"success": True, "predictions": [_prediction(one) for one in kept[:MOST]], "duration": 0}


def _prediction(one: Mapping[str, Any]) -> dict[str, Any]:
    left, top, right, bottom = one["box"]
    corners = {"x_min": left, "y_min": top, "x_max": right, "y_max": bottom}
    return {"label": one["label"], "confidence": one["score"], **corners}


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    said = {"success": False, "error": error["error"], "code": error.get("reason")}
    return status, {**said, "predictions": [], "duration": 0}
