"""Implements the HTTP front end's application: the table of its routes, and who may begin a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from carpool.errors import CarpoolError
from carpool.frontend import documents
from carpool.frontend.access.guard import Guard, key_in_fields
from carpool.frontend.access.keys import Principal
from carpool.frontend.access.route_rules import rule_of
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import FrontPart, StartedWith
from carpool.frontend.http import small_routes
from carpool.frontend.http.dialects import Destination, Dialect, routes_of_extensions
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Start,
    hand_over,
)
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_service import Handler, HttpService, SharedPage, Starter, Variables
from carpool.frontend.http.infer_route import start_infer
from carpool.frontend.http.limits import MIB
from carpool.frontend.http.small_routes import ASKED_S
from carpool.frontend.http.task_models import task_routes
from carpool.frontend.http.url_routes import Router, UrlRoute
from carpool.link.engine_client import EngineClient
from carpool.observe.counters import Block, Table

if TYPE_CHECKING:
    from carpool.frontend.http.orca_report import LoadReport

_MOST_BEFORE_A_KEY = 4 * MIB
"""Bytes of a body that are read to find the key in it."""


def _get(pattern: str, handler: Handler, cost: float = 0.0) -> UrlRoute[Starter]:
    return UrlRoute("GET", pattern, small_routes.per_request(handler, cost))


def _post(pattern: str, handler: Handler) -> UrlRoute[Starter]:
    return UrlRoute("POST", pattern, small_routes.per_request(handler))


def _late(module: str, name: str) -> Handler:
    """Returns a handler of this folder's module, which is imported with the first request for it."""

    def handler(service: HttpService, exchange: Exchange, variables: Variables) -> BodyPlan:
        found: Handler = getattr(import_module(f"carpool.frontend.http.{module}"), name)
        return found(service, exchange, variables)

    return handler


def _starter_for(task: str | None) -> Starter:
    """Returns a starter for a route that takes images: for a task, or for a model that the path names."""

    def start(service: HttpService, head: HttpHead, variables: Variables) -> Start:
        from carpool.frontend.http.image_route import ImageRoute  # with the first request that needs it

        return ImageRoute(service, head, task, variables.get("model", "")).begin

    return start


def _describe(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    from carpool.frontend.http.openapi import describe  # with the first request that needs it

    describe(service, exchange, variables)


_MODEL = "/v2/models/{model}[/versions/{version}]"
_HISTORY_S = 0.002  # of the front end's, to gather the points of 15 minutes

ROUTES: tuple[UrlRoute[Starter], ...] = (
    UrlRoute("POST", f"{_MODEL}/infer", start_infer),
    *(UrlRoute("POST", path, _starter_for(task)) for task, path in task_routes().items()),
    UrlRoute("POST", "/models/{model}/predict", _starter_for(None)),
    _get("/", _late("console_routes", "front_page")),
    _get("/console/live", _late("console_routes", "console_live")),
    _get("/console/{file}", _late("console_routes", "console_file")),
    _get("/openapi.json", _describe),
    _get("/docs", _late("console_routes", "docs")),
    _get("/health", small_routes.health),
    _get("/metrics", small_routes.metrics),
    _get("/v2", small_routes.server_metadata),
    _get("/v2/health/live", small_routes.live),
    _get("/v2/health/ready", small_routes.ready),
    _get("/v2/models/stats", small_routes.statistics, ASKED_S),
    _get("/v2/history", _late("console_routes", "history"), _HISTORY_S),
    _get(_MODEL, small_routes.about_model(documents.model_metadata)),
    _get(f"{_MODEL}/ready", small_routes.model_ready),
    _get(f"{_MODEL}/config", small_routes.about_model(documents.model_config)),
    _get(f"{_MODEL}/stats", small_routes.statistics, ASKED_S),
    _get(f"{_MODEL}/profile", small_routes.profile, ASKED_S),
    _post("/v2/repository/index", small_routes.repository_index),
    _post("/v2/repository/{repository}/index", small_routes.missing("naming one of several repositories is")),
    _post("/v2/repository[/{repository}]/models/{model}/load", _late("control_routes", "load")),
    _post("/v2/repository[/{repository}]/models/{model}/unload", _late("control_routes", "unload")),
    _get("/v2/systemsharedmemory[/region/{region}]/status", _late("control_routes", "system_status")),
    _post("/v2/systemsharedmemory/region/{region}/register", _late("control_routes", "register_system")),
    _post(
        "/v2/systemsharedmemory[/region/{region}]/unregister", _late("control_routes", "unregister_system")
    ),
    _get("/v2/cudasharedmemory[/region/{region}]/status", _late("control_routes", "cuda_status")),
    _post("/v2/cudasharedmemory/region/{region}/register", _late("control_routes", "register_cuda")),
    _post("/v2/cudasharedmemory[/region/{region}]/unregister", _late("control_routes", "unregister_cuda")),
    _get("/v2/logging", _late("control_routes", "log_settings")),
    _post("/v2/logging", _late("control_routes", "update_log_settings")),
)


def all_routes(apis: Collection[str] = ()) -> tuple[UrlRoute[Destination], ...]:
    """Returns the server's own routes, and behind them those of extensions; of protocols that are off by
    default, those of `apis`."""
    found: dict[tuple[str, str], UrlRoute[Destination]] = {}
    for route in ROUTES:
        rule = rule_of(f"{route.method} {route.pattern}")
        found[route.method, route.pattern] = UrlRoute(*route[:2], Destination(rule, route.handler))
    for of_extension in routes_of_extensions(apis):
        here, destination = of_extension[:2], of_extension.handler
        known = found.setdefault(here, of_extension)
        if destination.for_events and known is not of_extension:
            found[here] = UrlRoute(*here, known.handler._replace(events=destination.starter))
    return tuple(found.values())


class _WhileKeysLast:
    """Holds the start of requests whose key was found good: looked up again when the keys have changed."""

    __slots__ = ("_generation", "_guard", "_head", "_passed", "_start")

    def __init__(self, guard: Guard, head: HttpHead, passed: Callable[[], Start]) -> None:
        self._guard = guard
        self._head = head
        self._passed = passed
        self._generation = guard.generation
        self._start = passed()

    def __call__(self, exchange: Exchange) -> BodyPlan:
        if self._generation != self._guard.generation:
            self._start = self._passed()  # raises when the key is not good any more
            self._generation = self._guard.generation
        return _start_as(exchange, self._head.who, self._start)


def _start_as(exchange: Exchange, who: Principal | None, start: Start) -> BodyPlan:
    exchange.head.who = who
    if who is not None:
        exchange.payer = who.name
    return start(exchange)


class HttpApp:
    """Serves the v2 protocol in front of an engine. One per front end, in its loop's thread.

    `table` holds the counters of all processes and `block` is this one's part of it; `metrics` makes the
    metrics page. `max_body_bytes` bounds bodies that are gathered in memory, counted after decompression; the
    server bounds all of them. `picture_threads` decode pictures. `fair` divides this front end's own time;
    `guard` says who may pass; pictures may be fetched from `picture_hosts`; `cache` is what may be kept.
    `load_report` says whether answers report the load: off, asked or always; `forward` which headers models
    receive. `parts` are wrapped around all others (`front_service.ModelLanes`); `started` decides which
    extensions are on without a model.
    """

    def __init__(
        self,
        engine: EngineClient,
        block: Block,
        metrics: SharedPage,
        *,
        table: Table,
        max_body_bytes: int = 64 * MIB,
        picture_threads: int = 1,
        fair: Fairness | None = None,
        guard: Guard | None = None,
        picture_hosts: Collection[str] = (),
        load_report: str = "off",
        forward: ForwardedHeaders | None = None,
        parts: Sequence[FrontPart] = (),
        started: StartedWith | None = None,
    ) -> None:
        self._report: LoadReport | None = None
        if load_report != "off":
            from carpool.frontend.http.orca_report import LoadReport

            self._report = LoadReport(table, always=load_report == "always")
        fair = Fairness() if fair is None else fair
        given = max_body_bytes, picture_threads, fair, picture_hosts, forward, parts, started
        self._service = HttpService(engine, block, metrics, table, *given)
        self._guard = guard or Guard()
        self._service.asks_for_keys = self._guard.asks_for_keys
        self._service.check_site = self._guard.check_site
        routes = all_routes(self._service.settings.apis)
        self._router = Router(routes)
        dialects = {route.handler.dialect for route in routes}
        worded = [one for one in dialects if one is not None and one.prefix]
        self._worded = sorted(worded, key=lambda one: len(one.prefix), reverse=True)
        self.charge_to = self._service.charge_to

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        head.start = start = self._start(head)
        return start(exchange)

    def refused(self, exchange: Exchange, error: CarpoolError) -> None:
        dialect = self._dialect_of(exchange.head.path)
        if dialect is not None:
            dialect.attach(exchange)
        self._service.fair.tell(exchange, error)

    def reworded(self, head: HttpHead, status: int, body: bytes) -> tuple[int, bytes]:
        dialect = self._dialect_of(head.path)
        return (status, body) if dialect is None else dialect.reworded(status, body)

    def _dialect_of(self, path: str) -> Dialect | None:
        """Returns the dialect with the longest prefix of the path."""
        return next((one for one in self._worded if path.startswith(one.prefix)), None)

    def _start(self, head: HttpHead) -> Start:
        """Whether it may pass is asked once for all requests with this head, until the keys change."""
        self._guard.check_host(head.headers)
        destination, variables = self._router.find(head.method, head.segments())
        rule, dialect = destination.rule, destination.dialect
        what, model = f"{head.method} {head.path}", variables.get("model", "")

        def started(head: HttpHead, key: bytes | None) -> Start:
            head.who = self._guard.check_http(rule, head.headers, what, model, key)
            return destination.chosen(head)(self._service, head, variables)

        def passed() -> Start:
            return started(head, None if dialect is None else dialect.key_of(head))

        def each_time(exchange: Exchange) -> BodyPlan:
            start = passed()
            return _start_as(exchange, head.who, start)

        if dialect is not None and dialect.finds_keys_in_bodies and self._lacks_key(head, dialect):
            start: Start = partial(self._look_for_key, dialect, started)
        elif rule.changes:  # checked, and logged, each time
            start = each_time
        elif self._guard.has_keys:
            start = _WhileKeysLast(self._guard, head, passed)
        else:
            start = passed()
        if dialect is not None:
            start = dialect.in_words(start)
        return start if self._report is None or not self._report.wanted(head) else self._reporting(start)

    def _lacks_key(self, head: HttpHead, dialect: Dialect) -> bool:
        return self._guard.has_keys and key_in_fields(head.headers) is None and dialect.key_of(head) is None

    def _look_for_key(
        self, dialect: Dialect, started: Callable[[HttpHead, bytes | None], Start], exchange: Exchange
    ) -> BodyPlan:
        """Reads the body before anything else. The head is copied, because requests with other keys in their
        bodies share it."""

        def received(body: bytes | bytearray, at: float) -> None:
            head = exchange.head = exchange.head.copy()
            try:
                start = started(head, dialect.key_in(body))
                hand_over(_start_as(exchange, head.who, start), body, at)
            except CarpoolError as error:
                self.refused(exchange, error)

        return Collect(_MOST_BEFORE_A_KEY, received)

    def _reporting(self, start: Start) -> Start:
        report = self._report
        assert report is not None

        def reporting(exchange: Exchange) -> BodyPlan:
            report.attach(exchange)
            return start(exchange)

        return reporting

    def close(self) -> None:
        """The server has stopped: end what is left of the app's own work."""
        if self._report is not None:
            self._report.close()
        self._service.close()


_METRICS_RULE = rule_of("GET /metrics")


class MetricsApp:
    """Serves metrics and nothing else, for a port that only Prometheus can reach.

    It shares its page and its time with the app of the other port.
    """

    def __init__(self, page: SharedPage, fair: Fairness, guard: Guard | None = None) -> None:
        self._page = page
        self._fair = fair
        self._guard = guard or Guard()
        self._router = Router([UrlRoute("GET", "/metrics", _METRICS_RULE)])

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        self._guard.check_host(head.headers)
        self._router.find(head.method, head.segments())
        self._guard.check_http(_METRICS_RULE, head.headers, "GET /metrics")
        self._fair.document(exchange, lambda: small_routes.answer_metrics(exchange, self._page))
        return None

    def refused(self, exchange: Exchange, error: CarpoolError) -> None:
        self._fair.tell(exchange, error)

    def reworded(self, _head: HttpHead, status: int, body: bytes) -> tuple[int, bytes]:
        return status, body
