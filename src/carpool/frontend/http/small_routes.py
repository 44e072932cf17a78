"""The small routes: each takes the service, the exchange and the variables of its path, and answers a
document. Those of the console, and those that change what the engine holds, have files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from carpool import __version__
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, Unsupported
from carpool.frontend import documents
from carpool.frontend.demands import NotLoaded
from carpool.frontend.front_service import is_model_ready, not_serving
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Start,
    answer_error,
)
from carpool.frontend.http.http_service import (
    Handler,
    HttpService,
    SharedPage,
    Starter,
    Variables,
    answer_document,
)
from carpool.link.catalog import Catalog, ModelEntry
from carpool.wire.head import load_object
from carpool.wire.v2 import encode_error

_MAX_JSON_BODY = 64 * 1024
ASKED_S = 0.002  # of the engine's time, for a document that only it can write
_METRICS_FIELDS = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_OPENMETRICS_FIELDS = b"content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"
_WEIGHT = re.compile(rb";\s*q=([01](?:\.[0-9]{1,3})?)\s*(?:;|$)")


def per_request(handler: Handler, cost: float = 0.0) -> Starter:
    """Returns a starter for routes where the head says nothing but the path. They come after requests for
    inference: what one client asks of them has a bounded part of the front end's time. `cost` is what they
    cost the engine."""

    def starter(service: HttpService, _head: HttpHead, variables: Variables) -> Start:
        def start(exchange: Exchange) -> BodyPlan:
            return service.fair.document(exchange, lambda: handler(service, exchange, variables), cost)

        return start

    return starter


def live(_service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200)


def ready(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    _answer_ready(exchange, service.ready)


def model_ready(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    entry = service.look_up(variables["model"], variables.get("version", ""))
    _answer_ready(exchange, is_model_ready(service.engine, entry))


def health(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """As ready, for load balancers that know nothing of v2: those expect 503, where Triton says 400."""
    is_ready = service.ready
    document = documents.health(service.engine.catalog, ready=is_ready)
    if service.asks_for_keys and exchange.who is None:
        document = {"ready": is_ready}  # what there is is for those who may use it
    answer_document(exchange, document, 200 if is_ready else 503)


def server_metadata(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    answer_document(exchange, documents.server_metadata(__version__, service.engine.catalog))


def about_model(describe: Callable[[Catalog, ModelEntry], object]) -> Handler:
    """Returns a handler that answers a document about a model, which is loaded for it where that is done on
    demand."""

    def handler(service: HttpService, exchange: Exchange, variables: Variables) -> None:
        name, version = variables["model"], variables.get("version", "")

        def document() -> object:
            return describe(service.engine.catalog, service.look_up(name, version))

        async def when_loaded() -> object:
            await service.demands.loaded(name, INFINITY, 0)
            return document()

        try:
            answer_document(exchange, document())
        except NotLoaded:
            service.check_site(exchange.head.headers, f"GET {exchange.head.path}")  # before it loads anything
            service.answer_later(exchange, when_loaded())

    return handler


def statistics(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Answers the statistics of one model, or of all. The engine has the times per batch size, so it makes
    the document."""
    name, version = variables.get("model", ""), variables.get("version", "")
    if name:
        service.look_up(name, version)
    service.answer_later(exchange, service.engine.ask("statistics", {"name": name, "version": version}))


def profile(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Answers what was measured of a model, and what the scheduler believes of it now."""
    entry = service.look_up(variables["model"], variables.get("version", ""))
    service.answer_later(
        exchange, service.engine.ask("profile", {"name": entry.name, "version": entry.version})
    )


def repository_index(service: HttpService, exchange: Exchange, _variables: Variables) -> Collect:
    def answer(body: bytes | bytearray, _at: float) -> None:
        try:
            only_ready = documents.wants_only_ready(body)
        except CarpoolError as error:
            answer_error(exchange, error)
            return
        answer_document(exchange, documents.index(service.engine.catalog.index, only_ready=only_ready))

    return Collect(_MAX_JSON_BODY, answer)


def with_json(exchange: Exchange, use: Callable[[dict[str, Any]], None]) -> Collect:
    """Collects a small body that is a JSON object; an empty one is an empty object."""

    def received(body: bytes | bytearray, _at: float) -> None:
        try:
            use(load_object(body, "request") if body.strip() else {})
        except CarpoolError as error:
            answer_error(exchange, error)

    return Collect(_MAX_JSON_BODY, received)


def metrics(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    answer_metrics(exchange, service.metrics)


def missing(what: str) -> Handler:
    """Returns the handler for routes that Triton has and Carpool has not: a client learns what is missing,
    not just that."""

    def refuse(_service: HttpService, _exchange: Exchange, _variables: Variables) -> None:
        raise Unsupported(f"{what} not available on this server")

    return refuse


def _answer_ready(exchange: Exchange, is_ready: bool) -> None:
    if is_ready:
        exchange.respond(200)
    else:
        exchange.respond(400, JSON_FIELDS, encode_error(not_serving()))


def _wants_openmetrics(accepted: bytes) -> bool:
    """Returns whether a scraper prefers OpenMetrics to the plain text, which every scraper takes."""
    weights = {b"application/openmetrics-text": 0.0, b"text/plain": 0.0}
    for part in accepted.lower().split(b","):
        name = part.partition(b";")[0].strip()
        if name in weights:
            found = _WEIGHT.search(part)
            weights[name] = max(weights[name], 1.0 if found is None else float(found[1]))
    asked, plain = weights.values()
    return asked > 0.0 and asked >= plain


def answer_metrics(exchange: Exchange, page: SharedPage) -> None:
    fields = _METRICS_FIELDS
    if page.openmetrics is not None and _wants_openmetrics(exchange.head.headers.get(b"accept", b"")):
        page, fields = page.openmetrics, _OPENMETRICS_FIELDS

    def answer(written: bytes | None) -> None:
        if written is None:
            answer_error(exchange, CarpoolError("the server failed on this request"))
        else:
            exchange.respond(200, fields, written)

    page.ask(answer)
