"""Implements the routes of drift: how far a model is from its reference, and how to learn that anew."""

from __future__ import annotations

from typing import Any

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput
from carpool.frontend.access.keys import asked_by
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.query_text import read_query
from carpool.frontend.http.small_routes import ASKED_S, per_request, with_json

_TO_CHANGE = ("action", "hours")
_ACTIONS = ("learn", "reset")


def _status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Answers how far a model's pictures and answers are from its reference; with `?reference=1` that one,
    too."""
    entry = service.look_up(variables["model"], variables.get("version", ""))
    wanted = read_query(exchange.head.query).get("reference") == "1"
    asked = {"name": entry.name, "version": entry.version, "reference": wanted, **asked_by(exchange.who)}
    service.answer_later(exchange, service.engine.ask("drift/status", asked))


def _change(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    """Takes `{"action": "learn", "hours": 24}`, or `{"action": "reset"}`."""
    entry = service.look_up(variables["model"], variables.get("version", ""))

    def change(asked: dict[str, Any]) -> None:
        unknown = next((name for name in asked if name not in _TO_CHANGE), None)
        if unknown is not None:
            raise InvalidInput(f"unknown field {shown(unknown)}; {nearest(unknown, _TO_CHANGE)}")
        action = asked.pop("action", None)
        if action not in _ACTIONS:
            raise InvalidInput(f"action must be {' or '.join(_ACTIONS)}", field="action")
        arguments = {**asked, "name": entry.name, "version": entry.version, **asked_by(exchange.who)}
        service.answer_later(exchange, service.engine.ask(f"drift/{action}", arguments))

    return with_json(exchange, change)


start_status = per_request(_status, ASKED_S)
start_change = per_request(_change)
