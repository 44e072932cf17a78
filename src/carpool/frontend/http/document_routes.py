"""The small routes: each takes the service, the exchange and the variables of its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from carpool import __version__
from carpool.errors import CarpoolError, Unsupported
from carpool.frontend import documents
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange
from carpool.frontend.http.http_refusals import answer_error
from carpool.frontend.http.http_service import Service, answer_document
from carpool.frontend.http.metrics_page import answer_metrics
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.model_lookup import is_model_ready, not_serving
from carpool.wire.head import load_object
from carpool.wire.v2 import encode_error

Variables: TypeAlias = Mapping[str, str]
Handler: TypeAlias = Callable[[Service, Exchange, Variables], BodyPlan]
Start: TypeAlias = Callable[[Exchange], BodyPlan]
Starter: TypeAlias = Callable[[Service, RequestHead, Variables], Start]
"""Works out once, for all requests whose heads differ at most in length, what each of them starts with."""

_MAX_INDEX_BODY = _MAX_JSON_BODY = 64 * 1024


def per_request(handler: Handler, cost: float = 0.0) -> Starter:
    """For routes where the head says nothing but the path. They come after requests for inference: what one
    client asks of them has a bounded part of the front end's time. `cost` is what they cost the engine."""

    def starter(service: Service, _head: RequestHead, variables: Variables) -> Start:
        def start(exchange: Exchange) -> BodyPlan:
            return service.fair.document(exchange, lambda: handler(service, exchange, variables), cost)

        return start

    return starter


def live(_service: Service, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200)


def ready(service: Service, exchange: Exchange, _variables: Variables) -> None:
    _answer_ready(exchange, service.ready)


def model_ready(service: Service, exchange: Exchange, variables: Variables) -> None:
    entry = service.look_up(variables["model"], variables.get("version", ""))
    _answer_ready(exchange, is_model_ready(service.door, entry))


def health(service: Service, exchange: Exchange, _variables: Variables) -> None:
    """As ready, for load balancers that know nothing of v2: those expect 503, where Triton says 400."""
    is_ready = service.ready
    document = documents.health(service.door.catalog, ready=is_ready)
    if service.asks_for_keys and exchange.who is None:
        document = {"ready": is_ready}  # what there is is for those who may use it
    answer_document(exchange, document, 200 if is_ready else 503)


def server_metadata(service: Service, exchange: Exchange, _variables: Variables) -> None:
    answer_document(exchange, documents.server_metadata(__version__, service.door.catalog))


def model_metadata(service: Service, exchange: Exchange, variables: Variables) -> None:
    entry = service.look_up(variables["model"], variables.get("version", ""))
    answer_document(exchange, documents.model_metadata(service.door.catalog, entry))


def model_config(service: Service, exchange: Exchange, variables: Variables) -> None:
    answer_document(exchange, service.look_up(variables["model"], variables.get("version", "")).config)


def statistics(service: Service, exchange: Exchange, variables: Variables) -> None:
    """Of one model, or of all. The engine has the times per batch size, so it makes the document."""
    name, version = variables.get("model", ""), variables.get("version", "")
    if name:
        service.look_up(name, version)
    service.answer_later(exchange, service.door.ask("statistics", {"name": name, "version": version}))


def profile(service: Service, exchange: Exchange, variables: Variables) -> None:
    """What was measured of a model, and what the scheduler believes of it now."""
    entry = service.look_up(variables["model"], variables.get("version", ""))
    service.answer_later(
        exchange, service.door.ask("profile", {"name": entry.name, "version": entry.version})
    )


def repository_index(service: Service, exchange: Exchange, _variables: Variables) -> Collect:
    def answer(body: bytes | bytearray, _at: float) -> None:
        try:
            only_ready = documents.wants_only_ready(body)
        except CarpoolError as error:
            answer_error(exchange, error)
            return
        answer_document(exchange, documents.index(service.door.catalog.index, only_ready=only_ready))

    return Collect(_MAX_INDEX_BODY, answer)


def with_json(exchange: Exchange, use: Callable[[dict[str, Any]], None]) -> Collect:
    """For a small body that is a JSON object; an empty one is an empty object."""

    def received(body: bytes | bytearray, _at: float) -> None:
        try:
            use(load_object(body, "request") if body.strip() else {})
        except CarpoolError as error:
            answer_error(exchange, error)

    return Collect(_MAX_JSON_BODY, received)


def metrics(service: Service, exchange: Exchange, _variables: Variables) -> None:
    answer_metrics(exchange, service.metrics)


def missing(what: str) -> Handler:
    """For routes that Triton has and Carpool has not: a client learns what is missing, not just that."""

    def refuse(_service: Service, _exchange: Exchange, _variables: Variables) -> None:
        raise Unsupported(f"{what} not available on this server")

    return refuse


def _answer_ready(exchange: Exchange, is_ready: bool) -> None:
    if is_ready:
        exchange.respond(200)
    else:
        exchange.respond(400, JSON_FIELDS, encode_error(not_serving()))
