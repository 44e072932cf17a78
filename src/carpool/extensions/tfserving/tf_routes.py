"""Implements TensorFlow Serving's REST routes: `:predict`, the status of a model, and its metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Any

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, InvalidInput, NotFound
from carpool.extensions.tfserving import tf_format
from carpool.extensions.tfserving.tf_format import Asked, read_request
from carpool.frontend.access.guard import check_model
from carpool.frontend.demands import NotLoaded
from carpool.frontend.documents import served_versions, task_of
from carpool.frontend.http.exchange import Exchange, HttpHead, Start, hand_over
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.infer_route import InferRoute
from carpool.frontend.http.picture_question import (
    Answer,
    PictureQuestion,
    ask,
    results_of,
    rewrite,
    with_body,
)
from carpool.frontend.http.small_routes import per_request
from carpool.link.catalog import ModelEntry

_PREDICT = "predict"
_LEFT_OUT = (b"inference-header-content-length", b"content-encoding", b"accept-encoding", b"accept")


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    return status, {"error": error["error"]}


def _entry(service: HttpService, exchange: Exchange, name: str, version: str) -> ModelEntry:
    check_model(exchange.who, name)
    return service.look_up(name, version)


def _status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name, version = variables["name"], variables.get("version", "")
    entry = _entry(service, exchange, name, version)
    versions = [entry.version] if version else served_versions(service.engine.catalog, name)
    answer_document(exchange, tf_format.status(versions))


def _metadata(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    entry = _entry(service, exchange, variables["name"], variables.get("version", ""))
    answer_document(exchange, tf_format.metadata(entry.name, entry.version, entry.signature))


start_status, start_metadata = per_request(_status), per_request(_metadata)


def start_call(service: HttpService, _head: HttpHead, variables: Variables) -> Start:
    """Answers what stands behind the last colon of the path."""
    named = "version" if "version" in variables else "name"
    what, _, method = variables[named].rpartition(":")
    if method != _PREDICT:
        raise NotFound(f"'{variables[named][:80]}' is not offered here: send {what[:80]}:predict")
    name, version = (variables["name"], what) if named == "version" else (what, "")

    def predict(exchange: Exchange, asked: Asked, at: float) -> None:
        try:
            _predict(service, exchange, (name, version), asked, at)
        except NotLoaded:
            waiting = service.later(_predict_when_loaded(service, exchange, (name, version), asked))
            exchange.on_disconnect = lambda: _cancel(waiting)

    return with_body(service, read_request, predict)


def _predict(
    service: HttpService, exchange: Exchange, model: tuple[str, str], asked: Asked, at: float
) -> None:
    name, version = model
    entry = _entry(service, exchange, name, version)
    if asked.images and task_of(entry) is not None:
        question = PictureQuestion(pictures=asked.images, several=True, model=name, version=version)
        ask(service, exchange, question, at, _predictions)
        return
    if asked.images:
        raise InvalidInput(f"model '{name[:80]}' takes tensors, not images", field="instances")
    _infer(service, exchange, model, asked, tf_format.tensors_of(asked, entry.signature), at)


async def _predict_when_loaded(
    service: HttpService, exchange: Exchange, model: tuple[str, str], asked: Asked
) -> None:
    """Goes on when the model is loaded, because only then its task and its tensors are known."""
    try:
        await service.demands.loaded(model[0], INFINITY, sum(map(len, asked.images)))
        exchange.on_disconnect = None
        if exchange.pending:
            _predict(service, exchange, model, asked, monotonic())
    except CarpoolError as error:
        service.fair.tell(exchange, error)
    except Exception:
        service.log.exception("request-failed", path=exchange.head.path)
        service.fair.tell(exchange, CarpoolError("the server failed on this request"))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _predictions(answer: Answer) -> object:
    return {"predictions": results_of(answer)}


def _infer(
    service: HttpService, exchange: Exchange, model: tuple[str, str], asked: Asked, body: bytes, at: float
) -> None:
    """Goes on as a request of the v2 protocol with this body."""
    head = exchange.head.copy()
    head.who = exchange.head.who
    head.headers = {name: value for name, value in head.headers.items() if name not in _LEFT_OUT}
    exchange.head = head = head.with_length(b"%d" % len(body))
    rewrite(exchange, partial(tf_format.told, asked))
    try:
        hand_over(InferRoute(service, head, *model).begin(exchange), body, at)
    except CarpoolError as error:
        service.fair.tell(exchange, error)
