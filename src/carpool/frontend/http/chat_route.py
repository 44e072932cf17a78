"""OpenAI's routes, for clients that were written for them: `/v1/chat/completions` with one picture, and
`/v1/models`. The picture goes the way of all pictures, through the same gates; the words are OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from random import getrandbits
from typing import Any

import orjson

from carpool.errors import CarpoolError, InvalidInput, NotFound
from carpool.frontend.documents import task_of
from carpool.frontend.http import chat_format
from carpool.frontend.http.chat_format import Chat, Head, read_chat
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    Before,
    Body,
    BodyPlan,
    Collect,
    Exchange,
    hand_over,
    status_of,
)
from carpool.frontend.http.http_service import Service, Start, Variables, answer_document
from carpool.frontend.http.image_reading import Layout
from carpool.frontend.http.image_route import ImageRoute, ImageTarget
from carpool.frontend.http.parsing import RequestHead as HttpHead
from carpool.frontend.http.task_models import in_order
from carpool.frontend.http.text_route import TEXT_TASKS, StreamedRequest, read_aside
from carpool.link.door import Catalog, ModelEntry
from carpool.link.step_times import tokens_in
from carpool.observe.columns import BYTES_SENT
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import encode_error

PREFIX = "/v1/"
"""Of all paths here: errors below it are told in OpenAI's words."""
_STARTED = int(time.time())


class InOpenAiWords(Before):
    """Errors, whoever makes them."""

    __slots__ = ()

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        if status >= 400 and isinstance(body, bytes):
            body = chat_format.as_error(status, body)
        self._connection.answer(status, fields, body)


def start_chat(service: Service, head: HttpHead, _variables: Mapping[str, str]) -> Start:
    def start(exchange: Exchange) -> BodyPlan:
        exchange.answer_through(InOpenAiWords)
        return Collect(service.max_body_bytes, partial(_received, service, exchange))

    if b"json" not in head.headers.get(b"content-type", b"application/json").lower():
        raise InvalidInput("the body must be JSON: content-type application/json", field="content-type")
    return start


def _received(service: Service, exchange: Exchange, body: bytes | bytearray, at: float) -> None:
    def ask(chat: Chat) -> None:
        hand_over(ChatRoute(service, exchange.head, chat).begin(exchange), chat.picture, at)

    read_aside(service, exchange, body, read_chat, ask)


class ChatRoute(ImageRoute):
    """For one request: only its body says which model it is for."""

    def __init__(self, service: Service, head: HttpHead, chat: Chat) -> None:
        super().__init__(service, head, None, chat.model)
        self.asked = self.asked._replace(layout=Layout("raw"), in_place=False, wants_drawn=False, options={})
        self.chat = chat
        self.makes = ChatRequest

    def _find(self, catalog: Catalog) -> ModelEntry:
        entry = super()._find(catalog)
        if task_of(entry) not in TEXT_TASKS:
            raise NotFound(
                f"model '{entry.name}' makes no text of pictures: GET /v1/models lists those that do",
                reason="no-task",
            )
        return entry

    def _made(self, entry: ModelEntry) -> ImageTarget:
        target = super()._made(entry)
        chat = self.chat
        if not entry.decoupled:
            if chat.max_tokens:
                raise InvalidInput(
                    f"max_tokens: {entry.name} answers at once, and all that it reads", field="max_tokens"
                )
            return target
        extra = {"max_tokens": chat.max_tokens, "prompt": chat.prompt}
        told = {name: value for name, value in extra.items() if value}
        return target._replace(options=Options(extra=told))


class ChatRequest(StreamedRequest):
    __slots__ = ("_chat", "_head")

    def __init__(self, route: ImageRoute, exchange: Exchange, target: ImageTarget) -> None:
        super().__init__(route, exchange, target)
        assert isinstance(route, ChatRoute)
        self._chat = route.chat
        self._head = Head(f"chatcmpl-{getrandbits(96):024x}", int(time.time()), target.entry.name)

    def part(self, text: str) -> None:
        if self._chat.stream:
            super().part(text)
        else:
            self.pieces += bool(text)

    def _send(self, fields: bytes, body: bytes, *, compressible: bool = True) -> None:
        if self._chat.stream:
            super()._send(fields, body, compressible=compressible)
            return
        document: dict[str, Any] = orjson.loads(body)
        if not self.target.entry.decoupled:
            self.part(document["text"])
        finish = document.get("finish_reason", "stop")
        answer = chat_format.completion(self._head, document["text"], finish, self._tokens())
        self.service.server_row.add(BYTES_SENT, len(answer))
        self.exchange.respond(200, fields, answer)

    def _opening(self) -> Sequence[bytes]:
        return [chat_format.first_chunk(self._head, include_usage=self._chat.include_usage)]

    def _piece(self, text: str) -> Sequence[bytes]:
        return [chat_format.text_chunk(self._head, text, include_usage=self._chat.include_usage)]

    def _last(self, document: dict[str, Any]) -> Sequence[bytes]:
        finish = document.get("finish_reason", "stop")
        return chat_format.last_chunks(
            self._head, finish, self._tokens(), include_usage=self._chat.include_usage
        )

    def _tokens(self) -> int:
        """As they were counted where they were written. Of a model that gives pieces, each is one."""
        outcome = self._outcomes[0]
        assert outcome is not None
        timing = outcome.steps if self.target.entry.writes else None
        counted = None if timing is None else tokens_in(timing)
        return self.pieces if counted is None else counted

    def _error(self, error: CarpoolError) -> bytes:
        return chat_format.as_error(status_of(error), encode_error(error))


# ── which models there are ──


def list_models(service: Service, exchange: Exchange, _variables: Variables) -> None:
    data = [chat_format.model_document(name, _STARTED) for name in _names(service, exchange)]
    answer_document(exchange, {"object": "list", "data": data})


def one_model(service: Service, exchange: Exchange, variables: Variables) -> None:
    name = variables["model"]
    if name not in _names(service, exchange):
        raise NotFound(f"model '{name[:80]}' does not exist, or makes no text of pictures")
    exchange.respond(200, JSON_FIELDS, orjson.dumps(chat_format.model_document(name, _STARTED)))


def _names(service: Service, exchange: Exchange) -> list[str]:
    """Of those that the key is for."""
    who, catalog = exchange.who, service.door.catalog
    found = [entry.name for entry in in_order(catalog) if task_of(entry) in TEXT_TASKS]
    found += [name for name, task in catalog.on_demand.items() if task in TEXT_TASKS and name not in found]
    return [name for name in found if who is None or who.may_use(name)]
