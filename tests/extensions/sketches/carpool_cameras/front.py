"""The routes that control cameras."""

from __future__ import annotations

from functools import partial
from typing import Any

from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.small_routes import per_request, with_json


def _list(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    answer_document(exchange, service.engine.catalog.extra["cameras_sketch"]["cameras"])


def _add(service: HttpService, exchange: Exchange, _variables: Variables) -> Collect:
    return with_json(exchange, partial(_ask, service, exchange, "add"))


def _remove(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    _ask(service, exchange, "remove", {"name": variables["name"]})


def _ask(service: HttpService, exchange: Exchange, what: str, arguments: dict[str, Any]) -> None:
    service.answer_later(exchange, service.engine.ask(f"cameras_sketch/{what}", arguments))


start_list = per_request(_list)
start_add = per_request(_add)
start_remove = per_request(_remove)
