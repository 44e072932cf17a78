"""The routes of prompted models: JSON in, JSON out, errors in the protocol's own words."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from carpool.errors import CarpoolError, InvalidInput
from carpool.frontend.access.keys import holder
from carpool.frontend.calls.request_facts import OVER, RequestFacts, RequestReply
from carpool.frontend.http.exchange import BodyPlan, Exchange, HttpHead, Start, answer_error
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.small_routes import per_request, with_json
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.step_times import Times
from carpool.types import Array

_KEY_BYTES = 16


def start_segment(service: HttpService, _head: HttpHead, _variables: Mapping[str, str]) -> Start:
    def start(exchange: Exchange) -> BodyPlan:
        return with_json(exchange, lambda asked: Segment(service, exchange, asked).send())

    return start


class Segment(RequestReply):
    """Answers one prompt. A picture is named by its digest; a client finds only what it has sent itself."""

    __slots__ = ("_asked", "_exchange", "_handle", "_service")

    def __init__(self, service: HttpService, exchange: Exchange, asked: dict[str, Any]) -> None:
        self._service = service
        self._exchange = exchange
        self._asked = asked
        self._handle = ""

    def send(self) -> None:
        entry = self._service.look_up(str(self._asked.get("model")))
        inputs: dict[str, Array] = {"points": self._numbers("points")}
        if "image" in self._asked:
            inputs["picture"] = self._numbers("image")
            self._handle = blake2b(inputs["picture"].tobytes(), digest_size=_KEY_BYTES).hexdigest()
        else:
            self._handle = str(self._asked.get("handle"))
        inputs["key"] = key_of(self._exchange, self._handle)
        exchange = self._exchange
        request = self._service.parts.server.send(entry, inputs, self, exchange.sender)
        if request.state != OVER:
            exchange.on_disconnect = request.leave

    def _numbers(self, name: str) -> Array:
        try:
            found = np.array(self._asked[name], np.float32)
        except (KeyError, TypeError, ValueError):
            found = np.zeros(0, np.float32)
        if found.ndim != 1 or not found.size:
            raise InvalidInput(f"{name} must be a list of numbers", field=name)
        return found

    # ── as `RequestReply` ──

    def current(self) -> ModelEntry:
        return self._service.look_up(str(self._asked.get("model")))

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        [mask] = answer.outputs
        self._exchange.on_disconnect = None
        answer_document(self._exchange, {"handle": self._handle, "mask": mask.data.tolist()})

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        self._exchange.on_disconnect = None
        answer_error(self._exchange, error)


def key_of(exchange: Exchange, handle: str) -> Array:
    """Returns what a picture is stored under: a handle means nothing to other clients."""
    owner = holder(exchange.who).encode()
    digest = blake2b(handle.encode(), digest_size=_KEY_BYTES, key=owner[:64]).digest()
    return np.frombuffer(digest, np.uint8)


def _forget(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    key = key_of(exchange, variables["handle"]).tobytes().hex()
    service.answer_later(exchange, service.engine.ask("prompts_sketch/forget", {"key": key}))


start_forget = per_request(_forget)


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    return status, {"detail": error["error"], "type": error["reason"]}
