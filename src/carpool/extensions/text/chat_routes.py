"""Implements OpenAI's routes, for clients that were written for them: `/v1/chat/completions` and
`/v1/responses` with one picture, and `/v1/models`. The picture goes the way of all pictures, through the same
gates; the words are OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import getrandbits
from typing import Any, TypeVar

import orjson

from carpool.errors import CarpoolError, InvalidInput, NotFound
from carpool.extensions.text import chat_format, responses_format
from carpool.extensions.text.chat_format import Chat, Head, read_chat
from carpool.extensions.text.responses_format import AskedResponse, ResponseHead, read_response
from carpool.extensions.text.written_tokens import tokens_in
from carpool.frontend.documents import task_of
from carpool.frontend.http.event_stream import as_event
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    Exchange,
    HttpHead,
    Start,
    hand_over,
    status_of,
)
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.image_reading import BodyLayout
from carpool.frontend.http.image_route import ImageRoute, ImageTarget
from carpool.frontend.http.picture_question import with_body
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import in_order
from carpool.frontend.http.text_answer import TextAnswer, Writer, Written
from carpool.link.catalog import Catalog, ModelEntry
from carpool.vision.picture_answers import Options
from carpool.vision.tasks.written import TEXT_TASKS
from carpool.wire.v2 import encode_error

_STARTED = int(time.time())
Found = TypeVar("Found")


def start_chat(service: HttpService, head: HttpHead, _variables: Variables) -> Start:
    def asked(exchange: Exchange, chat: Chat, at: float) -> None:
        _ask(service, exchange, chat, partial(ChatWords, chat), at)

    return _with_json(service, head, read_chat, asked)


def start_response(service: HttpService, head: HttpHead, _variables: Variables) -> Start:
    def asked(exchange: Exchange, response: AskedResponse, at: float) -> None:
        _ask(service, exchange, response.chat, partial(ResponseWords, response), at)

    return _with_json(service, head, read_response, asked)


def _with_json(
    service: HttpService,
    head: HttpHead,
    read: Callable[..., Found],
    then: Callable[[Exchange, Found, float], None],
) -> Start:
    if b"json" not in head.headers.get(b"content-type", b"application/json").lower():
        raise InvalidInput("the body must be JSON: content-type application/json", field="content-type")
    return with_body(service, read, then)


def _ask(
    service: HttpService, exchange: Exchange, chat: Chat, words: Callable[[ModelEntry], Writer], at: float
) -> None:
    hand_over(ChatRoute(service, exchange.head, chat, words).begin(exchange), chat.picture, at)


class ChatRoute(ImageRoute):
    """Answers one request: only its body says which model it is for."""

    in_parts = True

    def __init__(
        self, service: HttpService, head: HttpHead, chat: Chat, words: Callable[[ModelEntry], Writer]
    ) -> None:
        super().__init__(service, head, None, chat.model)
        self.asked = self.asked._replace(
            layout=BodyLayout("raw"), in_place=False, wants_drawn=False, options={}
        )
        self._chat = chat
        self._words = words

    def parts(self, exchange: Exchange, target: ImageTarget) -> TextAnswer:
        return TextAnswer(exchange, self._words(target.lane.entry), self.service.server_row)

    def _find(self, catalog: Catalog) -> ModelEntry:
        entry = super()._find(catalog)
        if task_of(entry) not in TEXT_TASKS:
            raise NotFound(
                f"model '{entry.name}' writes no text from images: GET /v1/models lists the models that do",
                reason="no-task",
            )
        return entry

    def _made(self, entry: ModelEntry) -> ImageTarget:
        target = super()._made(entry)
        chat = self._chat
        if not entry.traits.decoupled:
            if chat.max_tokens:
                field = chat.limit_field
                raise InvalidInput(f"{field}: {entry.name} does not write token by token", field=field)
            return target
        extra = {"max_tokens": chat.max_tokens, "prompt": chat.prompt}
        told = {name: value for name, value in extra.items() if value}
        return target._replace(options=Options(extra=told))


class ChatWords:
    def __init__(self, chat: Chat, entry: ModelEntry) -> None:
        self.streams = chat.stream
        self._usage = chat.include_usage
        self._writes = entry.traits.writes
        self._head = Head(f"chatcmpl-{getrandbits(96):024x}", int(time.time()), entry.name)

    def head(self) -> Sequence[bytes]:
        return [as_event(chat_format.first_chunk(self._head, include_usage=self._usage))]

    def piece(self, text: str, _number: int) -> Sequence[bytes]:
        return [as_event(chat_format.text_chunk(self._head, text, include_usage=self._usage))]

    def last(self, written: Written) -> Sequence[bytes]:
        finish, tokens = written.finish, _tokens(written, self._writes)
        chunks = chat_format.last_chunks(self._head, finish, tokens, include_usage=self._usage)
        return list(map(as_event, chunks))

    def whole(self, written: Written) -> bytes:
        tokens = _tokens(written, self._writes)
        return chat_format.completion(self._head, written.text, written.finish, tokens)

    def error(self, error: CarpoolError) -> Sequence[bytes]:
        return [as_event(orjson.dumps(_as_error(error)))]


class ResponseWords:
    def __init__(self, asked: AskedResponse, entry: ModelEntry) -> None:
        self.streams = asked.chat.stream
        self._writes = entry.traits.writes
        self._head = ResponseHead(f"{getrandbits(96):024x}", int(time.time()), entry.name, asked)
        self._events = responses_format.FIRST  # so many events come before the first piece

    def head(self) -> Sequence[bytes]:
        return responses_format.begin_events(self._head)

    def piece(self, text: str, _number: int) -> Sequence[bytes]:
        return self._counted([responses_format.text_event(self._head, text, self._events)])

    def last(self, written: Written) -> Sequence[bytes]:
        about = _status(written), written.text, _tokens(written, self._writes)
        return self._counted(responses_format.end_events(self._head, *about, self._events))

    def whole(self, written: Written) -> bytes:
        about = _status(written), written.text, _tokens(written, self._writes)
        return orjson.dumps(responses_format.response(self._head, *about))

    def error(self, error: CarpoolError) -> Sequence[bytes]:
        return responses_format.error_events(self._head, _as_error(error)["error"], self._events)

    def _counted(self, events: Sequence[bytes]) -> Sequence[bytes]:
        self._events += len(events)
        return events


def _status(written: Written) -> str:
    return "incomplete" if written.finish == "length" else "completed"


def _tokens(written: Written, writes: bool) -> int:
    """Returns how many were written; each piece of a model that counts none is a token."""
    counted = tokens_in(written.steps) if writes and written.steps is not None else None
    return written.pieces if counted is None else counted


def _as_error(error: CarpoolError) -> Mapping[str, Any]:
    return chat_format.as_error(status_of(error), orjson.loads(encode_error(error)))[1]


# ── which models there are ──


def _list_models(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    data = [chat_format.model_document(name, _STARTED) for name in _names(service, exchange)]
    answer_document(exchange, {"object": "list", "data": data})


def _one_model(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name = variables["model"]
    if name not in _names(service, exchange):
        raise NotFound(f"model '{name[:80]}' does not exist, or writes no text from images")
    exchange.respond(200, JSON_FIELDS, orjson.dumps(chat_format.model_document(name, _STARTED)))


def _names(service: HttpService, exchange: Exchange) -> list[str]:
    """Returns the names of those that the key is for."""
    who, catalog = exchange.who, service.engine.catalog
    found = [entry.name for entry in in_order(catalog) if task_of(entry) in TEXT_TASKS]
    found += [
        name for name, task in catalog.server.on_demand.items() if task in TEXT_TASKS and name not in found
    ]
    return [name for name in found if who is None or who.may_use(name)]


start_list = per_request(_list_models)
start_one = per_request(_one_model)
