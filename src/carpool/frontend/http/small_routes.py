"""The small routes: each takes the service, the exchange and the variables of its path. Documents and pages,
and what the engine holds and every front end follows: models, clients' memory, settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from carpool import __version__
from carpool.config.rules import MAX_FILE_NAME, nearest, shown
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unsupported
from carpool.frontend import documents
from carpool.frontend.access.keys import asked_by, holder
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
    choose_encoding,
)
from carpool.frontend.http.http_service import (
    Handler,
    HttpService,
    SharedPage,
    Starter,
    Variables,
    answer_asset,
    answer_document,
    site,
)
from carpool.frontend.http.query_text import read_query
from carpool.link.catalog import Catalog, ModelEntry
from carpool.observe.shared_history import KEPT_S
from carpool.wire.head import load_object, read_object, shorten
from carpool.wire.v2 import encode_error

Arguments: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_FILE = "file:"
_TO_LOAD = ("config",)
_TO_UNLOAD = ("unload_dependents",)
_REGION_FIELDS = ("key", "offset", "byte_size")
_MAX_JSON_BODY = 64 * 1024
ASKED_S = 0.002  # of the engine's time, for a document that only it can write
_MOST_TIME = 10**11  # seconds since 1970, which points are numbered by
_METRICS_FIELDS = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_OPENMETRICS_FIELDS = b"content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"
_WEIGHT = re.compile(rb";\s*q=([01](?:\.[0-9]{1,3})?)\s*(?:;|$)")
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


# ── loading and unloading models ──


def load(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
        files = {
            name.removeprefix(_FILE): text for name, text in parameters.items() if name.startswith(_FILE)
        }
        rest = {name: value for name, value in parameters.items() if not name.startswith(_FILE)}
        _check_names(rest, _TO_LOAD)
        for name, value in parameters.items():
            if not isinstance(value, str):
                raise InvalidInput(f"{name[:64]} must be a string", field=f"parameters.{name[:64]}")
        for name in files:  # over gRPC, Triton's own example takes it for the server's fault
            if len(name) > MAX_FILE_NAME:
                raise InvalidInput(
                    f"the name of a file has at most {MAX_FILE_NAME} characters", field=f"file:{name[:64]}"
                )
        return {"model": variables["model"], "config": rest.get("config"), "files": files}

    return _ask(service, exchange, variables, "load", arguments)


def unload(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(parameters, _TO_UNLOAD)
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidInput(
                "unload_dependents must be true or false", field="parameters.unload_dependents"
            )
        return {"model": variables["model"], "dependents": dependents}

    return _ask(service, exchange, variables, "unload", arguments)


def _ask(
    service: HttpService, exchange: Exchange, variables: Variables, what: str, arguments: Arguments
) -> Collect:
    if "repository" in variables:
        raise Unsupported("naming one of several repositories is not available on this server")

    def received(body: bytes | bytearray, _at: float) -> None:
        try:
            document = load_object(body, "request", tensors=False) if body.strip() else {}
            asked = arguments(_parameters(document))
        except CarpoolError as error:
            answer_error(exchange, error)
            return
        service.answer_later(exchange, service.engine.ask(what, asked))

    return Collect(service.max_body_bytes, received)


def _parameters(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in document:
        if name != "parameters":
            raise InvalidInput(
                f"unknown field {shown(name)}; {nearest(name, ['parameters'])}", field=name[:64]
            )
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidInput('parameters must be an object like {"config": "…"}', field="parameters")
    return read_object(parameters, "parameters")  # which bounds their number


def _check_names(parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in parameters:
        if name not in known:
            raise InvalidInput(
                f"unknown parameter {shown(name)}; {nearest(name, known)}", field=f"parameters.{name[:64]}"
            )


# ── clients' shared memory: the catalogue has what is registered ──


def system_status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name, owner = variables.get("region", ""), holder(exchange.who)
    answer_document(exchange, documents.region_status(service.engine.catalog, name, owner))


def register_system(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def register(asked: dict[str, Any]) -> None:
        given = {key: asked[key] for key in _REGION_FIELDS if key in asked}
        arguments = {"name": variables["region"], **given, **asked_by(exchange.who)}
        question = service.engine.ask("register-memory", arguments)
        service.answer_later(exchange, question)

    return with_json(exchange, register)


def unregister_system(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name = variables.get("region", "")
    asked = {"name": name, **asked_by(exchange.who)}
    service.answer_later(exchange, service.engine.ask("unregister-memory", asked))


def cuda_status(_service: HttpService, exchange: Exchange, variables: Variables) -> None:
    if "region" in variables:
        raise NotFound(
            f"Unable to find cuda shared memory region: {shorten(variables['region'])}; this server has none"
        )
    answer_document(exchange, [])


def register_cuda(_service: HttpService, _exchange: Exchange, _variables: Variables) -> None:
    raise Unsupported("CUDA shared memory is not offered")


def unregister_cuda(_service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Clients unregister everything before they begin: there is nothing, and that is no error."""
    answer_document(exchange, {})


# ── log settings ──


def log_settings(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    service.answer_later(exchange, service.engine.ask("log-settings", {"settings": {}}))


def update_log_settings(service: HttpService, exchange: Exchange, _variables: Variables) -> Collect:
    def update(asked: dict[str, Any]) -> None:
        arguments = {"settings": asked, **asked_by(exchange.who)}
        service.answer_later(exchange, service.engine.ask("log-settings", arguments))

    return with_json(exchange, update)
