"""The routes of trace and log settings: the engine holds them, and every front end follows."""

from __future__ import annotations

from typing import Any

from carpool.frontend.access.keys import told
from carpool.frontend.http.document_handlers import Variables, with_json
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_service import Service


def log_settings(service: Service, exchange: Exchange, _variables: Variables) -> None:
    service.answer_later(exchange, service.door.ask("log-settings", {"settings": {}}))


def update_log_settings(service: Service, exchange: Exchange, _variables: Variables) -> Collect:
    def update(asked: dict[str, Any]) -> None:
        arguments = {"settings": asked, **told(exchange.who)}
        service.answer_later(exchange, service.door.ask("log-settings", arguments))

    return with_json(exchange, update)


def trace_settings(service: Service, exchange: Exchange, variables: Variables) -> None:
    _trace(service, exchange, variables, {})


def update_trace_settings(service: Service, exchange: Exchange, variables: Variables) -> Collect:
    return with_json(exchange, lambda asked: _trace(service, exchange, variables, asked))


def _trace(service: Service, exchange: Exchange, variables: Variables, asked: dict[str, Any]) -> None:
    model = variables.get("model", "")
    service.answer_later(exchange, service.door.ask("trace-settings", {"model": model, "settings": asked}))
