"""Implements Triton's routes of trace settings, which the engine holds."""

from __future__ import annotations

from typing import Any

from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.small_routes import per_request, with_json


def _settings(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    _trace(service, exchange, variables, {})


def _update(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    return with_json(exchange, lambda asked: _trace(service, exchange, variables, asked))


def _trace(service: HttpService, exchange: Exchange, variables: Variables, asked: dict[str, Any]) -> None:
    model = variables.get("model", "")
    service.answer_later(
        exchange, service.engine.ask("tracing/settings", {"model": model, "settings": asked})
    )


start_settings = per_request(_settings)
start_update = per_request(_update)
