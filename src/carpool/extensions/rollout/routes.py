"""Implements the routes of rollouts: how one stands, what to do with it, what was answered differently, and
complaints. The engine knows all of it; here requests are checked."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

from carpool.config.rules import nearest, shown
from carpool.errors import CarpoolError, InvalidInput
from carpool.extensions.rollout.counted import FEEDBACK
from carpool.frontend.access.keys import asked_by
from carpool.frontend.http.exchange import Collect, Exchange, answer_error
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.query_text import read_query
from carpool.frontend.http.small_routes import ASKED_S, per_request, with_json
from carpool.vision.heads import sniff

_TO_ACT = ("action", "version", "reason", "plan")
_TO_COMPLAIN = ("id", "verdict")
_LONGEST_ID = 128
_PICTURE = b"content-type: %b\r\nx-content-type-options: nosniff\r\n"


def _status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    service.answer_later(exchange, service.engine.ask("rollout/status", {"model": variables["model"]}))


def _act(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def received(asked: dict[str, Any]) -> None:
        _check_names(asked, _TO_ACT)
        if "action" not in asked:
            raise InvalidInput('the request must be like {"action": "abort"}', field="action")
        question = {**asked, "model": variables["model"], **asked_by(exchange.who)}
        service.answer_later(exchange, service.engine.ask("rollout/act", question))

    return with_json(exchange, received)


def _disagreements(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Lists the worst first, `limit` of those above the number `after`."""
    query = read_query(exchange.head.query)
    _check_names(query, ("after", "limit"))
    numbers = {name: _number(text, name) for name, text in query.items()}
    question = {"model": variables["model"], **numbers}
    service.answer_later(exchange, service.engine.ask("rollout/disagreements", question))


def _picture(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Answers with one of them, as it came."""
    question = {"model": variables["model"], "number": _number(variables["number"], "number")}

    async def answer() -> None:
        try:
            found = await service.engine.ask("rollout/disagreements", question)
            data = base64.b64decode(found)
            exchange.respond(200, _PICTURE % _type(data), data)
        except CarpoolError as error:
            answer_error(exchange, error)

    service.later(answer())


def _feedback(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def received(asked: dict[str, Any]) -> None:
        _check_names(asked, _TO_COMPLAIN)
        identity, verdict = asked.get("id"), asked.get("verdict")
        if (
            not isinstance(identity, str)
            or not 0 < len(identity) <= _LONGEST_ID
            or not identity.isprintable()
        ):
            raise InvalidInput(f"id must be a text of 1 to {_LONGEST_ID} characters", field="id")
        if verdict not in FEEDBACK:
            hint = nearest(str(verdict), FEEDBACK)
            raise InvalidInput(f"verdict cannot be {shown(str(verdict))}; {hint}", field="verdict")
        question = {"model": variables["model"], "id": identity, "verdict": verdict}
        service.answer_later(exchange, service.engine.ask("rollout/feedback", question))

    return with_json(exchange, received)


def _type(picture: bytes) -> bytes:
    """Returns the type by its first bytes: it is kept as it came."""
    try:
        return f"image/{sniff(picture).lower()}".encode()
    except CarpoolError:
        return b"application/octet-stream"


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InvalidInput(f"{name} must be a whole number", field=name)
    return int(text)


def _check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidInput(f"unknown field {shown(name)}; {nearest(name, known)}", field=name[:64])


start_status = per_request(_status, ASKED_S)
start_act = per_request(_act)
start_disagreements = per_request(_disagreements, ASKED_S)
start_picture = per_request(_picture, ASKED_S)
start_feedback = per_request(_feedback)
