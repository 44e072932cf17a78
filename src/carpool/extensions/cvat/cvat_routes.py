"""Implements three routes of nuclio for CVAT: all functions, one of them, and invocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from carpool.errors import InvalidInput, NotFound
from carpool.frontend.documents import labels_of
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, with_body
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import usable, usable_tasks
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.link.catalog import ModelEntry
from carpool.wire.head import load_object

_SHAPES: Mapping[str, str] = {
    "detect": "rectangle",
    "segment": "mask",
    "pose": "points",
    "obb": "polygon",
    "classify": "tag",
}
"""CVAT's shapes by the tasks of models."""
_THRESHOLD = 0.5
_ONE_MAP = "object"  # the label of a segmentation without labels


class Asked(NamedTuple):
    picture: bytes
    threshold: float


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    return status, {"error": error["error"]}


def _list(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    found = usable(service.engine.catalog, exchange.who)
    functions = {entry.name: _function(service, entry, task) for entry, task in found if task in _SHAPES}
    answer_document(exchange, functions)


def _one(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    for entry, task in usable(service.engine.catalog, exchange.who):
        if entry.name == variables["function"] and task in _SHAPES:
            answer_document(exchange, _function(service, entry, task))
            return
    raise _unknown(variables["function"])


start_list, start_one = per_request(_list), per_request(_one)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no function '{name[:80]}': GET /api/functions lists the models")


def _function(service: HttpService, entry: ModelEntry, task: str) -> dict[str, Any]:
    names = dict.fromkeys(labels_of(entry)) or dict.fromkeys((_ONE_MAP,) if task == "segment" else ())
    spec = [{"id": number, "name": name, "type": _SHAPES[task]} for number, name in enumerate(names)]
    return {
        "metadata": {
            "name": entry.name,
            "namespace": "nuclio",
            "annotations": {
                "name": f"{entry.name} (Carpool)",
                "type": "detector",
                "spec": orjson.dumps(spec).decode(),
                "version": "1",
            },
        },
        "spec": {"description": f"Carpool's model {entry.name}, version {entry.version}, for {task}"},
        "status": {"state": "ready", "httpPort": service.settings.http_port},
    }


def start_invocation(service: HttpService, head: HttpHead, _variables: Variables) -> Start:
    name = head.headers.get(b"x-nuclio-function-name", b"").decode("utf-8", "replace")
    if not name:
        raise InvalidInput("the field x-nuclio-function-name is missing", field="x-nuclio-function-name")

    def invoke(exchange: Exchange, asked: Asked, at: float) -> None:
        if name not in usable_tasks(service.engine.catalog, exchange.who):
            raise _unknown(name)
        question = PictureQuestion(
            pictures=[asked.picture],
            model=name,
            options={"score": f"{asked.threshold:.6f}", "format": "rle", "top_k": "1"},
        )
        ask(service, exchange, question, at, shapes)

    return with_body(service, _read, invoke)


def _read(body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    image, threshold = document.get("image"), document.get("threshold", _THRESHOLD)
    if not isinstance(image, str) or not image:
        raise InvalidInput("image must be an image in base64", field="image")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise InvalidInput("threshold must be a number from 0 to 1", field="threshold")
    return Asked(from_base64(image, "image"), threshold)


# ---- answers -----------------------------------------------------------------------------------------------


def shapes(answer: Answer) -> object:
    if "classes" in answer:
        return [_shape(one, "tag", []) for one in answer["classes"][:1]]
    if "masks" in answer:
        return [_mask(one) for one in answer["masks"]]
    if "detections" not in answer:
        raise InvalidInput(f"model '{answer['model']}' annotates nothing", reason="no-task")
    return [_found(one) for one in answer["detections"]]


def _found(one: Mapping[str, Any]) -> dict[str, Any]:
    if "keypoints" in one:
        return _shape(one, "points", [side for point in one["keypoints"] for side in point[:2]])
    if "corners" in one:
        return _shape(one, "polygon", [side for point in one["corners"] for side in point])
    return _shape(one, "rectangle", one["box"])


def _shape(one: Mapping[str, Any], kind: str, points: Sequence[float]) -> dict[str, Any]:
    return {"confidence": str(one["score"]), "label": one["label"], "points": points, "type": kind}


def _mask(one: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the pixels within the smallest box around a mask, row by row, and then that box."""
    import numpy as np

    from carpool.vision.mask_regions import from_run_lengths

    pixels = from_run_lengths(one["rle"]["counts"], *one["rle"]["size"]) > 0
    rows, columns = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
    if not rows.size:
        return {**_shape(one, "mask", []), "mask": [0, 0, 0, 0, 0]}
    top, bottom, left, right = (int(side) for side in (rows[0], rows[-1], columns[0], columns[-1]))
    inside = pixels[top : bottom + 1, left : right + 1].astype(np.uint8).ravel().tolist()
    outline = [left, top, right, top, right, bottom, left, bottom]  # where CVAT wants polygons
    return {**_shape(one, "mask", outline), "mask": [*inside, left, top, right, bottom]}
