"""Implements TorchServe's inference routes, for clients that were written for it: `/ping` and
`/predictions/{model}`.

A picture goes the way of all pictures; its answer has the form of TorchServe's own handlers: a classifier's
is `{label: probability}`, a detector's a list of `{label: box, "score": …}`. Other tasks answer as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from carpool.errors import NotFound
from carpool.frontend.documents import task_of
from carpool.frontend.http.exchange import (
    Exchange,
    HttpHead,
    Start,
)
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.image_route import ImageRequest, ImageRoute
from carpool.frontend.http.small_routes import per_request
from carpool.link.catalog import Catalog, ModelEntry


def _ping(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    is_ready = service.ready
    answer_document(exchange, {"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 503)


start_ping = per_request(_ping)


def start_prediction(service: HttpService, head: HttpHead, variables: Mapping[str, str]) -> Start:
    # TorchServe's versions have two parts, ours are whole numbers: those of its archives were cut alike.
    version = variables.get("version", "").partition(".")[0]
    route = PredictionRoute(service, head, None, variables["model"], version)
    route.makes = PredictionRequest
    return route.begin


class PredictionRequest(ImageRequest):
    __slots__ = ()

    def _send(self, fields: bytes, body: bytes, *, compressible: bool = True) -> None:
        if compressible:  # as JSON is, and a drawing is not
            body = as_handlers_did(body)
        super()._send(fields, body, compressible=compressible)


class PredictionRoute(ImageRoute):
    def _find(self, catalog: Catalog) -> ModelEntry:
        entry = super()._find(catalog)
        if task_of(entry) is None:
            raise NotFound(
                f"model '{entry.name}' takes tensors, but this route takes images; send them to "
                f"/v2/models/{entry.name}/infer",
                reason="no-task",
            )
        return entry


def as_handlers_did(body: bytes) -> bytes:
    document: dict[str, Any] = orjson.loads(body)
    if "results" in document:  # several pictures, some of them perhaps with an error
        return orjson.dumps([_told(one) for one in document["results"]])
    return orjson.dumps(_told(document))


def _told(answer: dict[str, Any]) -> object:
    if "classes" in answer:
        return {one["label"]: one["score"] for one in answer["classes"]}
    if "detections" in answer:
        return [{one["label"]: one["box"], "score": one["score"]} for one in answer["detections"]]
    return answer
