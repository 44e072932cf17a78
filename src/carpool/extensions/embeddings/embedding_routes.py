"""Implements `/v1/embeddings`, and `/v1/models` with all models that take images."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from carpool.errors import NotFound
from carpool.extensions.embeddings.embedding_format import Asked, read_embeddings, told
from carpool.extensions.text import chat_format
from carpool.frontend.http.exchange import Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, results_of, with_body
from carpool.frontend.http.small_routes import per_request
from carpool.frontend.http.task_models import usable_tasks

_STARTED = int(time.time())


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    return chat_format.as_error(status, error)


def start_embeddings(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    def embed(exchange: Exchange, asked: Asked, at: float) -> None:
        question = PictureQuestion(pictures=asked.images, several=True, task="embed", model=asked.model)
        ask(service, exchange, question, at, partial(_told, asked))

    return with_body(service, read_embeddings, embed)


def _told(asked: Asked, answer: Answer) -> object:
    return told(asked, results_of(answer))


def _list(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    data = [
        chat_format.model_document(name, _STARTED)
        for name in usable_tasks(service.engine.catalog, exchange.who)
    ]
    answer_document(exchange, {"object": "list", "data": data})


def _one(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name = variables["model"]
    if name not in usable_tasks(service.engine.catalog, exchange.who):
        raise NotFound(f"model '{name[:80]}' does not exist, or takes no images")
    answer_document(exchange, chat_format.model_document(name, _STARTED))


start_list, start_one = per_request(_list), per_request(_one)
