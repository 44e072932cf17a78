"""What a front end does for clients of the counting service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import orjson

from carpool.errors import InvalidInput
from carpool.frontend.http.exchange import (
    BodyPlan,
    Exchange,
    HttpHead,
    Start,
)
from carpool.frontend.http.http_service import HttpService, answer_document
from carpool.frontend.http.small_routes import with_json


def start_models(service: HttpService, _head: HttpHead, _variables: Mapping[str, str]) -> Start:
    """Answers how many models there are."""

    def start(exchange: Exchange) -> None:
        answer_document(exchange, {"ok": True, "count": len(service.engine.catalog.newest)})

    return start


def start_words(_service: HttpService, _head: HttpHead, _variables: Mapping[str, str]) -> Start:
    """Counts the words of a text."""

    def start(exchange: Exchange) -> BodyPlan:
        def count(asked: dict[str, Any]) -> None:
            text = asked.get("text")
            if not isinstance(text, str):
                raise InvalidInput("text must be a string", field="text")
            by = "" if exchange.who is None else exchange.who.name
            answer_document(exchange, {"ok": True, "count": len(text.split()), "by": by})

        return with_json(exchange, count)

    return start


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    """Its clients read the body of every answer, and give up at any other status than 200."""
    return 200, {"ok": False, "status": status, "why": error["error"]}


def key_of(head: HttpHead) -> bytes | None:
    return next((key.encode() for key in parse_qs(head.query).get("token", ())), None)


def key_in(body: bytes) -> bytes | None:
    try:
        key = orjson.loads(body)["token"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return key.encode() if isinstance(key, str) else None
