"""The routes of the console and of the page of documents, and of the history that the console draws."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.errors import InvalidInput, NotFound
from carpool.frontend import documents
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    Exchange,
    choose_encoding,
)
from carpool.frontend.http.http_service import (
    HttpService,
    Variables,
    answer_asset,
    site,
)
from carpool.frontend.http.query_text import read_query
from carpool.observe.shared_history import KEPT_S
from carpool.wire.head import shorten

_MOST_TIME = 10**11  # seconds since 1970, which points are numbered by
_TEXT_FIELDS = b"content-type: text/plain; charset=utf-8\r\nvary: accept\r\n"
_TEXT = (
    b"Carpool serves vision models over the v2 inference protocol.\n\n"
    b"/                     in a browser: the console\n"
    b"/docs                 in a browser: pictures in, answers out (POST /detect, /classify, ...)\n"
    b"/v2                   this server and what it can do\n"
    b"/v2/repository/index  its models (POST)\n"
    b"/v2/health/ready      whether it serves\n"
    b"/metrics              for Prometheus\n"
)
_LIVE_FIELDS = JSON_FIELDS + b"cache-control: no-store\r\n"
_WORTH_COMPRESSING = 16 * 1024  # a page that looks at a few models is on the same machine or a near one


def front_page(_service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Answers with the console where a client accepts HTML; with a short text for curl and its like."""
    if b"text/html" in exchange.head.headers.get(b"accept", b"").lower():
        answer_asset(exchange, site()["index.html"], b"vary: accept\r\n")
    else:
        exchange.respond(200, _TEXT_FIELDS, _TEXT)


def docs(_service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """The picture routes to read, written by the page itself from /openapi.json."""
    answer_asset(exchange, site()["docs.html"])


def console_file(_service: HttpService, exchange: Exchange, variables: Variables) -> None:
    asset = site().get(variables["file"])
    if asset is None:
        raise NotFound("the console has no such file")
    answer_asset(exchange, asset)


def console_live(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Answers with the console's page: with `?model=…&version=…` also that model version's profile, as far as
    the engine has reported it; with `?after=…` also the points of the history since then."""
    page = service.live.read(service.engine)
    asked = read_query(exchange.head.query)
    if "model" in asked:
        page = documents.with_profile(page, service.profiles.look(asked["model"], asked.get("version", "")))
    if "after" in asked:
        after = _whole(asked, "after", 0, _MOST_TIME)
        page = documents.with_history(page, service.table, after, senders=_sees_senders(exchange))
    _answer_page(service, exchange, page)


def history(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Answers what happened in the last `seconds`, or since the point with the number `after`."""
    asked = read_query(exchange.head.query)
    unknown = next((name for name in asked if name not in ("after", "seconds")), None)
    if unknown is not None:
        raise InvalidInput(f"{shorten(unknown)} is not a parameter; after and seconds are", field="query")
    after = _whole(asked, "after", 0, _MOST_TIME)
    seconds = _whole(asked, "seconds", KEPT_S, KEPT_S)
    page = documents.history(service.table, after, seconds, senders=_sees_senders(exchange))
    _answer_page(service, exchange, page)


def _sees_senders(exchange: Exchange) -> bool:
    """Sources and keys of others are for administrators, where keys are asked for."""
    return exchange.who is None or exchange.who.admin


def _whole(asked: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise InvalidInput(f"{name} must be a whole number from 0 to {most}, not {shorten(text)}", field=name)
    return int(text)


def _answer_page(service: HttpService, exchange: Exchange, page: bytes) -> None:
    encoding = choose_encoding(exchange.head.headers.get(b"accept-encoding", b""))
    if encoding is None or len(page) < _WORTH_COMPRESSING:
        exchange.respond(200, _LIVE_FIELDS, page)
    else:
        service.answer_compressed(exchange, _LIVE_FIELDS + b"vary: accept-encoding\r\n", page, encoding)
