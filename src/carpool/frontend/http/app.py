"""Implements the HTTP front end's application: the table of its routes, and how a request finds its
handler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from carpool.errors import CarpoolError, NotFound
from carpool.frontend import documents
from carpool.frontend.access.guard import Guard
from carpool.frontend.access.keys import Principal
from carpool.frontend.access.route_rules import Rule, rule_of
from carpool.frontend.caches.front_caches import CacheParts
from carpool.frontend.calls.asking import Feature
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.http import openapi, rollout_routes, small_routes
from carpool.frontend.http.chat_route import PREFIX, InOpenAiWords, list_models, one_model, start_chat
from carpool.frontend.http.exchange import BodyPlan, Exchange, Start, WrongMethod
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.generate_route import start_generate
from carpool.frontend.http.http_service import Handler, HttpService, SharedPage, Starter
from carpool.frontend.http.image_route import TASK_ROUTES, start_task
from carpool.frontend.http.infer_route import start_infer
from carpool.frontend.http.limits import MIB
from carpool.frontend.http.orca_report import LoadReport
from carpool.frontend.http.parsing import HttpHead
from carpool.frontend.http.text_route import TEXT_TASKS, start_predict, start_text
from carpool.frontend.http.torchserve_routes import ping, start_prediction
from carpool.link.door import Door
from carpool.observe.counters import Block, Table

Target = TypeVar("Target")

_LONGEST_SHOWN = 80


class UrlRoute(NamedTuple, Generic[Target]):
    """`{name}` in a pattern is any one segment; what stands in brackets may be absent."""

    method: str
    pattern: str
    handler: Target


class Router(Generic[Target]):
    """Matches whole segments that are decoded already, so an escaped slash never becomes a separator."""

    def __init__(self, table: Iterable[UrlRoute[Target]]) -> None:
        self._by_length: dict[int, list[tuple[list[str], dict[str, Target]]]] = {}
        for route in table:
            for pattern in _expanded(route.pattern):
                self._add(pattern.strip("/").split("/"), route)

    def find(self, method: str, segments: Sequence[str]) -> tuple[Target, Mapping[str, str]]:
        """The first pattern in the table that fits; raises `NotFound` or `WrongMethod`."""
        if len(segments) > 1 and not segments[-1]:
            segments = segments[:-1]
        for parts, handlers in self._by_length.get(len(segments), ()):
            variables = _variables(parts, segments)
            if variables is not None:
                return _handler_for(method, handlers), variables
        raise NotFound(f"there is nothing at '{_shown(segments)}'")

    def _add(self, parts: list[str], route: UrlRoute[Target]) -> None:
        lines = self._by_length.setdefault(len(parts), [])
        for known, handlers in lines:
            if known == parts:
                handlers[route.method] = route.handler
                return
        lines.append((parts, {route.method: route.handler}))


def _expanded(pattern: str) -> list[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    optional, _, after = rest.partition("]")
    return [before + after, before + optional + after]


def _variables(parts: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for part, segment in zip(parts, segments, strict=True):
        if part.startswith("{"):
            if not segment:
                return None
            found[part[1:-1]] = segment
        elif part != segment:
            return None
    return found


def _handler_for(method: str, handlers: Mapping[str, Target]) -> Target:
    handler = handlers.get("GET" if method == "HEAD" else method)
    if handler is None:
        allowed = [verb for known in handlers for verb in (("GET", "HEAD") if known == "GET" else (known,))]
        raise WrongMethod(method, allowed)
    return handler


def _shown(segments: Sequence[str]) -> str:
    path = "/" + "/".join(segments)
    return path if len(path) <= _LONGEST_SHOWN else path[:_LONGEST_SHOWN] + "…"


def _get(pattern: str, handler: Handler, cost: float = 0.0) -> UrlRoute[Starter]:
    return UrlRoute("GET", pattern, small_routes.per_request(handler, cost))


def _post(pattern: str, handler: Handler) -> UrlRoute[Starter]:
    return UrlRoute("POST", pattern, small_routes.per_request(handler))


_MODEL = "/v2/models/{model}[/versions/{version}]"
_ROLLOUT = "/v2/models/{model}/rollout"
_HISTORY_S = 0.002  # of the front end's, to gather the points of 15 minutes
_ASKED_S = 0.002  # of the engine's time, for a document that only it can write

ROUTES: tuple[UrlRoute[Starter], ...] = (
    UrlRoute("POST", f"{_MODEL}/infer", start_infer),
    UrlRoute("POST", f"{_MODEL}/generate", start_generate(streams=False)),
    UrlRoute("POST", f"{_MODEL}/generate_stream", start_generate(streams=True)),
    *(
        UrlRoute("POST", path, start_text(task) if task in TEXT_TASKS else start_task(task))
        for task, path in TASK_ROUTES.items()
    ),
    UrlRoute("POST", "/models/{model}/predict", start_predict),
    UrlRoute("POST", "/predictions/{model}[/{version}]", start_prediction),
    UrlRoute("PUT", "/predictions/{model}[/{version}]", start_prediction),
    UrlRoute("POST", "/v1/chat/completions", start_chat),
    _get("/v1/models", list_models),
    _get("/v1/models/{model}", one_model),
    _get("/ping", ping),
    _get("/", small_routes.front_page),
    _get("/console/live", small_routes.console_live),
    _get("/console/{file}", small_routes.console_file),
    _get("/openapi.json", openapi.describe),
    _get("/docs", small_routes.docs),
    _get("/health", small_routes.health),
    _get("/metrics", small_routes.metrics),
    _get("/v2", small_routes.server_metadata),
    _get("/v2/health/live", small_routes.live),
    _get("/v2/health/ready", small_routes.ready),
    _get("/v2/models/stats", small_routes.statistics, _ASKED_S),
    _get("/v2/history", small_routes.history, _HISTORY_S),
    _get(_MODEL, small_routes.about_model(documents.model_metadata)),
    _get(f"{_MODEL}/ready", small_routes.model_ready),
    _get(f"{_MODEL}/config", small_routes.about_model(documents.model_config)),
    _get(f"{_MODEL}/stats", small_routes.statistics, _ASKED_S),
    _get(f"{_MODEL}/profile", small_routes.profile, _ASKED_S),
    _get(f"{_MODEL}/drift", small_routes.drift, _ASKED_S),
    _post(f"{_MODEL}/drift", small_routes.change_drift),
    _get(f"{_MODEL}/cache", small_routes.cache_status),
    UrlRoute("DELETE", "/v2/models/{model}/cache", small_routes.per_request(small_routes.clear_cache)),
    _get(_ROLLOUT, rollout_routes.status, _ASKED_S),
    _post(_ROLLOUT, rollout_routes.act),
    _get(f"{_ROLLOUT}/disagreements", rollout_routes.disagreements, _ASKED_S),
    _get(f"{_ROLLOUT}/disagreements/{{number}}", rollout_routes.picture, _ASKED_S),
    _post("/v2/models/{model}/feedback", rollout_routes.feedback),
    _post("/v2/repository/index", small_routes.repository_index),
    _post("/v2/repository/{repository}/index", small_routes.missing("naming one of several repositories is")),
    _post("/v2/repository[/{repository}]/models/{model}/load", small_routes.load),
    _post("/v2/repository[/{repository}]/models/{model}/unload", small_routes.unload),
    _get("/v2/systemsharedmemory[/region/{region}]/status", small_routes.system_status),
    _post("/v2/systemsharedmemory/region/{region}/register", small_routes.register_system),
    _post("/v2/systemsharedmemory[/region/{region}]/unregister", small_routes.unregister_system),
    _get("/v2/cudasharedmemory[/region/{region}]/status", small_routes.cuda_status),
    _post("/v2/cudasharedmemory/region/{region}/register", small_routes.register_cuda),
    _post("/v2/cudasharedmemory[/region/{region}]/unregister", small_routes.unregister_cuda),
    _get("/v2[/models/{model}]/trace/setting", small_routes.trace_settings),
    _post("/v2[/models/{model}]/trace/setting", small_routes.update_trace_settings),
    _get("/v2/logging", small_routes.log_settings),
    _post("/v2/logging", small_routes.update_log_settings),
)


Ruled: TypeAlias = tuple[Rule, Starter]


def _ruled(route: UrlRoute[Starter]) -> UrlRoute[Ruled]:
    rule = rule_of(f"{route.method} {route.pattern}")
    return UrlRoute(route.method, route.pattern, (rule, route.handler))


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
    """Serves the v2 protocol from behind a door. One per front end, in its loop's thread.

    `table` holds the counters of all processes and `block` is this one's part of it; `metrics` makes the
    metrics page. `max_body_bytes` bounds bodies that are gathered in memory, counted after decompression; the
    server bounds all of them. `picture_threads` decode pictures. `fair` divides this front end's own time;
    `guard` says who may pass; pictures may be fetched from `picture_hosts`; `cache` is what may be kept.
    `load_report` says whether answers tell the load: off, asked or always; `forward` which headers models
    are told. `features` are wrapped around all others (`front_service.Features`).
    """

    def __init__(
        self,
        door: Door,
        block: Block,
        metrics: SharedPage,
        *,
        table: Table,
        max_body_bytes: int = 64 * MIB,
        picture_threads: int = 1,
        fair: Fairness | None = None,
        guard: Guard | None = None,
        picture_hosts: Collection[str] = (),
        cache: CacheParts | None = None,
        load_report: str = "off",
        forward: ForwardedHeaders | None = None,
        features: Sequence[Feature] = (),
    ) -> None:
        self._report = None if load_report == "off" else LoadReport(table, always=load_report == "always")
        fair = Fairness() if fair is None else fair
        given = max_body_bytes, picture_threads, fair, picture_hosts, cache, forward, features
        self._service = HttpService(door, block, metrics, table, *given)
        self._guard = guard or Guard()
        self._service.asks_for_keys = self._guard.asks_for_keys
        self._service.check_site = self._guard.check_site
        self._router = Router(map(_ruled, ROUTES))
        self.tracer = self._service.tracer

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        head.start = start = self._start(head)
        return start(exchange)

    def refused(self, exchange: Exchange, error: CarpoolError) -> None:
        if exchange.head.path.startswith(PREFIX):
            exchange.answer_through(InOpenAiWords)
        self._service.fair.tell(exchange, error)

    def _start(self, head: HttpHead) -> Start:
        """Whether it may pass is asked once for all requests with this head, until the keys change."""
        self._guard.check_host(head.headers)
        (rule, starter), variables = self._router.find(head.method, head.segments())

        def passed() -> Start:
            head.who = self._guard.check_http(
                rule, head.headers, f"{head.method} {head.path}", variables.get("model", "")
            )
            return starter(self._service, head, variables)

        def each_time(exchange: Exchange) -> BodyPlan:
            start = passed()
            return _start_as(exchange, head.who, start)

        if rule.changes:  # asked, and told in the log, each time
            start: Start = each_time
        elif self._guard.has_keys:
            start = _WhileKeysLast(self._guard, head, passed)
        else:
            start = passed()
        return start if self._report is None or not self._report.wanted(head) else self._reporting(start)

    def _reporting(self, start: Start) -> Start:
        report = self._report
        assert report is not None

        def told(exchange: Exchange) -> BodyPlan:
            report.attach(exchange)
            return start(exchange)

        return told

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
