"""Implements the two routes of DOODS: the detectors that there are, and detection in an image.

Home Assistant skips labels that the list of a detector does not have, so each detector lists the labels of
its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from carpool.errors import InvalidInput
from carpool.frontend.documents import labels_of
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, with_body
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import usable
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.wire.head import load_object

_DEFAULT = "default"  # the detector of clients that name none
_TASKS = ("detect", "pose", "obb")
_EVERY = "*"
_MOST_LABELS = 1000
_LONGEST_ID = 256


class Asked(NamedTuple):
    detector: str
    picture: bytes
    least: Mapping[str, float]  # percent, by label
    id: str


def key_of(head: HttpHead) -> bytes | None:
    """Returns the key in the field of this protocol."""
    return head.headers.get(b"doods-auth-key") or None


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    """Returns an error with the sentence alone, which is all that clients show."""
    return status, {"error": error["error"]}


def _detectors(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    listed = []
    for entry, task in usable(service.engine.catalog, exchange.who):
        if task in _TASKS:
            height, width = service.pictures.model(entry).transform.size
            about = {"name": entry.name, "type": "carpool", "model": f"{entry.name}/{entry.version}"}
            listed.append({**about, "labels": list(labels_of(entry)), "width": width, "height": height})
    if listed:
        listed.append({**listed[0], "name": _DEFAULT})
    answer_document(exchange, {"detectors": listed})


start_detectors = per_request(_detectors)


def start_detect(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    def detect(exchange: Exchange, asked: Asked, at: float) -> None:
        named = "" if asked.detector == _DEFAULT else asked.detector
        lowest = min(asked.least.values(), default=50.0) / 100
        question = PictureQuestion(
            pictures=[asked.picture],
            task=None if named else "detect",
            model=named,
            options={"score": f"{lowest:.6f}"},
        )
        ask(service, exchange, question, at, partial(told, asked))

    return with_body(service, read, detect)


def read(body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    data, name, said = (document.get(key) for key in ("data", "detector_name", "id"))
    if not isinstance(data, str) or not data:
        raise InvalidInput("data must be an image in base64", field="data")
    if not isinstance(name, str | None) or not isinstance(said, str | None):
        raise InvalidInput("detector_name and id must be strings", field="detector_name")
    if said is not None and len(said) > _LONGEST_ID:
        raise InvalidInput(f"id may have {_LONGEST_ID} characters", field="id")
    return Asked(name or _DEFAULT, from_base64(data, "data"), _least(document.get("detect")), said or "")


def _least(given: object) -> dict[str, float]:
    if not isinstance(given, dict | None) or len(given or ()) > _MOST_LABELS:
        raise InvalidInput('detect must be like {"person": 50}', field="detect")
    for label, percent in (given or {}).items():
        number = isinstance(percent, int | float) and not isinstance(percent, bool)
        if not number or not 0 <= percent <= 100:
            raise InvalidInput(f"detect: {label[:64]} must be 0 to 100 percent", field="detect")
    return dict(given or {})


def told(asked: Asked, answer: Answer) -> object:
    """Returns the boxes whose labels were asked for, in shares of the image and with percent."""
    if "detections" not in answer:
        raise InvalidInput(f"model '{answer['model']}' answers no boxes", reason="no-task")
    width, height, found = answer["image"]["width"], answer["image"]["height"], []
    for one in answer["detections"]:
        percent = round(one["score"] * 100, 4)
        least = asked.least.get(one["label"], asked.least.get(_EVERY)) if asked.least else 0.0
        if least is not None and percent >= least:
            left, top, right, bottom = one["box"]
            sides = {"top": top / height, "left": left / width}
            sides |= {"bottom": bottom / height, "right": right / width}
            found.append({**sides, "label": one["label"], "confidence": percent})
    return {"id": asked.id, "detections": found}
