"""Implements the routes of Roboflow's inference server: the registry of models, inference, and workflows that
are one model or pipeline of this server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import orjson

from carpool import __version__
from carpool.errors import InvalidInput, NotFound
from carpool.extensions.roboflow.roboflow_format import (
    DEFAULT_SCORE,
    ROUTES,
    TASKS,
    Asked,
    read_id,
    read_inference,
    read_old,
    read_workflow,
    told,
)
from carpool.extensions.roboflow.roboflow_settings import aliases
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, results_of, with_body
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import usable

_UUID = "00000000-0000-0000-0000-000000000000"  # of no machine in particular


def key_of(head: HttpHead) -> bytes | None:
    """Returns the key in the query, where the SDK puts it by default."""
    pairs = parse_qsl(head.query, errors="replace", max_num_fields=None)
    return next((key.encode() for name, key in pairs if name == "api_key" and key), None)


def key_in(body: bytes) -> bytes | None:
    try:
        key = orjson.loads(body)["api_key"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return key.encode() if isinstance(key, str) and key else None


# ---- models ------------------------------------------------------------------------------------------------


def _info(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    name = service.settings.server_name
    answer_document(exchange, {"name": name, "version": __version__, "uuid": _UUID})


def _registry(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    answer_document(exchange, _models(service, exchange))


def _clear(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Answers the registry, and removes nothing. The SDK sends no key here: then no model is named."""
    hidden = service.asks_for_keys and exchange.who is None
    answer_document(exchange, {"models": []} if hidden else _models(service, exchange))


start_info, start_registry, start_clear = map(per_request, (_info, _registry, _clear))


def start_add(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    """Answers the registry if it has the model: the server's operator loads models."""

    def added(exchange: Exchange, model_id: str, _at: float) -> None:
        listed = _models(service, exchange)
        if model_id not in {one["model_id"] for one in listed["models"]}:
            there = ", ".join(one["model_id"] for one in listed["models"][:10]) or "none"
            raise NotFound(f"model '{model_id[:80]}' is not served here; these are: {there}")
        answer_document(exchange, listed)

    return with_body(service, read_id, added)


def start_remove(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    """Answers the registry, and removes nothing: other clients use the same models."""

    def removed(exchange: Exchange, _id: str, _at: float) -> None:
        _clear(service, exchange, {})

    return with_body(service, read_id, removed)


def _models(service: HttpService, exchange: Exchange) -> dict[str, Any]:
    listed: list[dict[str, Any]] = []
    known = aliases(service.settings)
    for entry, task in usable(service.engine.catalog, exchange.who):
        if task in TASKS:
            names = [f"{entry.name}/{entry.version}", *(one for one in known if known[one] == entry.name)]
            batch = entry.signature.max_batch or None
            listed += [{"model_id": name, "task_type": TASKS[task], "batch_size": batch} for name in names]
    return {"models": listed}


# ---- inference ---------------------------------------------------------------------------------------------


def start_infer(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    task = ROUTES.get(variables["task"])
    if task is None:
        raise NotFound(not_offered(head))

    def infer(exchange: Exchange, asked: Asked, at: float) -> None:
        question = as_question(service, asked, task)
        tell = partial(_several, asked) if asked.several else partial(told, classes=asked.classes)
        ask(service, exchange, question, at, tell)

    return with_body(service, read_inference, infer)


def start_old(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    """Answers `/{project}/{version}`, as of version 0 of this protocol."""
    model_id = f"{variables['project']}/{variables['version']}"
    if variables["project"] in _OTHERS:
        raise NotFound(not_offered(head))

    def read(body: bytes | bytearray) -> Asked:
        return read_old(body, head.query)

    def infer(exchange: Exchange, asked: Asked, at: float) -> None:
        tell = partial(told, classes=asked.classes)
        ask(service, exchange, as_question(service, replace(asked, model_id=model_id)), at, tell)

    return with_body(service, read, infer)


def start_workflow(service: HttpService, _head: HttpHead, variables: Variables) -> Start:
    """Answers a workflow by the model or pipeline of its name."""

    def run(exchange: Exchange, asked: Asked, at: float) -> None:
        question = as_question(service, replace(asked, model_id=variables["workflow"]))
        ask(service, exchange, question, at, partial(_outputs, asked))

    return with_body(service, read_workflow, run)


def as_question(service: HttpService, asked: Asked, task: str | None = None) -> PictureQuestion:
    """Describes what is asked. An id is a name and a version, or a name alone, or an alias; without one, the
    first model for the task answers."""
    name, _, version = aliases(service.settings).get(asked.model_id, asked.model_id).partition("/")
    if not (name or task) or "/" in version:
        raise InvalidInput("model_id must be a model's name and version, like nanodet/1", field="model_id")
    return PictureQuestion(
        pictures=asked.pictures,
        url=asked.url,
        several=asked.several,
        task=task,
        model=name,
        version=version,
        options=asked.options if task != "classify" else _of_classes(asked.options),
    )


def _of_classes(options: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the options without the default threshold: of classes the best one is always answered."""
    return {name: value for name, value in options.items() if (name, value) != ("score", DEFAULT_SCORE)}


def _several(asked: Asked, answer: Answer) -> object:
    return [told(one, asked.classes) for one in results_of(answer)]


def _outputs(asked: Asked, answer: Answer) -> object:
    results = results_of(answer) if asked.several else [answer]
    return {"outputs": [{"predictions": told(one)} for one in results], "profiler_trace": []}


# ---- what is not offered -----------------------------------------------------------------------------------

_OTHERS = ("sam", "sam2", "sam3", "yolo_world", "gaze", "workflows", "owlv2")


def start_other(_service: HttpService, head: HttpHead, _variables: Mapping[str, str]) -> Start:
    raise NotFound(not_offered(head))


def not_offered(head: HttpHead) -> str:
    path = head.path.removeprefix("/roboflow")
    return f"{path[:80]} is not offered here: docs/apis.md lists the calls of Roboflow's that are"
