"""Implements the routes that Label Studio asks of a machine-learning backend."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from carpool.errors import CarpoolError, InvalidInput, NotFound
from carpool.extensions.label_studio.label_access import ACCESS, SETUP
from carpool.extensions.label_studio.label_config import TASKS, Control, image_of, read_config
from carpool.extensions.label_studio.label_results import prediction
from carpool.frontend.http.exchange import BodyPlan, Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.http.picture_question import (
    Answer,
    PictureQuestion,
    WebImage,
    ask,
    results_of,
    with_body,
)
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import usable, usable_tasks
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.wire.head import load_object

_NAME = "Carpool"
_LONGEST = 2048
_BAD_IMAGE = 400


class Predict(NamedTuple):
    project: str
    tasks: Sequence[object]
    controls: Sequence[Control]


def key_of(head: HttpHead) -> bytes | None:
    """Returns the password of basic authentication, which is what Label Studio can send."""
    kind, _, text = head.headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() != b"basic":
        return None
    try:
        return binascii.a2b_base64(text.strip(), strict_mode=True).partition(b":")[2] or None
    except ValueError:
        return None


def words(_status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    return _status, {"error": error["error"], "reason": error.get("reason")}


# ---- small routes ------------------------------------------------------------------------------------------


def start_health(_service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    """Answers at once, whatever else is asked: Label Studio waits for a second."""

    def start(exchange: Exchange) -> BodyPlan:
        answer_document(exchange, {"status": "UP", "model_class": _NAME})
        return None

    return start


def _versions(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    found = usable(service.engine.catalog, exchange.who)
    model = variables.get("model", "")
    names = [f"{entry.name}/{entry.version}" for entry, _ in found if model in ("", entry.name)]
    answer_document(exchange, {"versions": names})


start_versions = per_request(_versions)


def start_validate(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    def read(body: bytes | bytearray) -> list[Control]:
        return read_config(load_object(body, "request", tensors=False).get("config"))

    def valid(exchange: Exchange, _controls: list[Control], _at: float) -> None:
        answer_document(exchange, {"status": "ok"})

    return with_body(service, read, valid)


def start_setup(service: HttpService, _head: HttpHead, variables: Variables) -> Start:
    """Keeps where a project's images are, and the token for them, in the engine's memory."""

    def setup(exchange: Exchange, asked: Mapping[str, str], _at: float) -> None:
        kept = {**asked, "holder": _holder(exchange)}
        model = variables.get("model", "")
        service.answer_later(exchange, _setup(service, kept, f"{model or _NAME}".lower()))

    return with_body(service, _read_setup, setup)


async def _setup(service: HttpService, asked: Mapping[str, str], version: str) -> object:
    await service.engine.ask(SETUP, asked)
    return {"model_version": version}


def _read_setup(body: bytes | bytearray) -> Mapping[str, str]:
    document = load_object(body, "request", tensors=False)
    names = {"project": "project", "hostname": "hostname", "access_token": "token"}
    found = {to: document.get(name) or "" for name, to in names.items()}
    for name, value in found.items():
        plain = isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()
        if not plain or not value.isascii():
            raise InvalidInput(f"{name} must be plain text", field=name)
    return found


def _holder(exchange: Exchange) -> str:
    return "" if exchange.who is None else exchange.who.name


# ---- predictions -------------------------------------------------------------------------------------------


def start_predict(service: HttpService, _head: HttpHead, variables: Variables) -> Start:
    model = variables.get("model", "")

    def predict(exchange: Exchange, asked: Predict, at: float) -> None:
        if not asked.tasks:
            answer_document(exchange, {"results": []})
            return
        control, task, name = _chosen(service, exchange, asked, model)

        async def later() -> None:
            try:
                known = await service.engine.ask(
                    ACCESS, {"holder": _holder(exchange), "project": asked.project}
                )
                images = [_image(one, control, known["hostname"], known["token"]) for one in asked.tasks]
            except CarpoolError as error:
                service.fair.tell(exchange, error)
                return
            except Exception:
                service.log.exception("request-failed", path=exchange.head.path)
                service.fair.tell(exchange, CarpoolError("the server failed on this request"))
                return
            question = PictureQuestion(
                pictures=images, several=True, task=task, model=name, options={"format": "rle"}
            )
            ask(service, exchange, question, at, partial(_told, control))

        if exchange.pending:
            service.later(later())

    return with_body(service, _read, predict)


def _read(body: bytes | bytearray) -> Predict:
    document = load_object(body, "request", tensors=False)
    tasks, project = document.get("tasks"), document.get("project") or ""
    if not isinstance(tasks, list) or len(tasks) > MAX_PICTURES:
        raise InvalidInput(f"tasks must be a list of at most {MAX_PICTURES}", field="tasks")
    if not isinstance(project, str) or len(project) > _LONGEST:
        raise InvalidInput("project must be text", field="project")
    return Predict(project, tasks, read_config(document.get("label_config")))


def _chosen(service: HttpService, exchange: Exchange, asked: Predict, model: str) -> tuple[Control, str, str]:
    """Returns the first tag that a model answers, with the task and the model: the one in the path, or the
    first."""
    found = usable_tasks(service.engine.catalog, exchange.who)
    for control in asked.controls:
        for name, task in found.items():
            if model in ("", name) and task in TASKS[control.tag]:
                return control, task, name
    tags = ", ".join(control.tag for control in asked.controls)
    what = f"model '{model[:80]}' does not answer" if model else "no model answers"
    raise NotFound(f"{what} {tags}", reason="no-task")


def _image(task: object, control: Control, hostname: str, token: str) -> bytes | WebImage:
    where, own = image_of(task, control, hostname)
    if where[:5].lower() == "data:":
        return from_base64(where, "tasks")
    return WebImage(where, f"Token {token}" if own and token else "")


def _told(control: Control, answer: Answer) -> object:
    """Returns a prediction for each task, in their order. A broken image has an empty one; a rejection of
    one is an error of all, after which Label Studio asks for them anew."""
    broken = [one for one in answer["results"] if one.get("status") != _BAD_IMAGE]
    results_of({"results": broken})
    return {"results": [prediction(control, one) for one in answer["results"]]}
