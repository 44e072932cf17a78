"""The HTTP front end's application: the table of its routes, and how a request finds its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from carpool.errors import CarpoolError
from carpool.frontend.access.guard import Guard
from carpool.frontend.access.route_rules import Rule, rule_of
from carpool.frontend.http import console_handlers, control_handlers, docs_page, document_handlers
from carpool.frontend.http.document_handlers import Handler, Start, Starter, missing, per_request
from carpool.frontend.http.exchange import BodyPlan, Exchange
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.image_route import TASK_ROUTES, start_predict, start_task
from carpool.frontend.http.infer_route import start_infer
from carpool.frontend.http.limits import MIB
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import Fault
from carpool.frontend.http.routes import Route, Router
from carpool.frontend.http.shared_page import SharedPage
from carpool.link.door import Door
from carpool.observe.counters import Block, Table


def _get(pattern: str, handler: Handler, cost: float = 0.0) -> Route[Starter]:
    return Route("GET", pattern, per_request(handler, cost))


def _post(pattern: str, handler: Handler) -> Route[Starter]:
    return Route("POST", pattern, per_request(handler))


_MODEL = "/v2/models/{model}[/versions/{version}]"
_GENERATE = missing("the generate extension is")
_ASKED_S = 0.002  # of the engine's time, for a document that only it can write

ROUTES: tuple[Route[Starter], ...] = (
    Route("POST", f"{_MODEL}/infer", start_infer),
    *(Route("POST", path, start_task(task)) for task, path in TASK_ROUTES.items()),
    Route("POST", "/models/{model}/predict", start_predict),
    _get("/", console_handlers.front_page),
    _get("/console/live", console_handlers.console_live),
    _get("/console/{file}", console_handlers.console_file),
    _get("/openapi.json", docs_page.describe),
    _get("/docs", docs_page.read),
    _get("/health", document_handlers.health),
    _get("/metrics", document_handlers.metrics),
    _get("/v2", document_handlers.server_metadata),
    _get("/v2/health/live", document_handlers.live),
    _get("/v2/health/ready", document_handlers.ready),
    _get("/v2/models/stats", document_handlers.statistics, _ASKED_S),
    _get(_MODEL, document_handlers.model_metadata),
    _get(f"{_MODEL}/ready", document_handlers.model_ready),
    _get(f"{_MODEL}/config", document_handlers.model_config),
    _get(f"{_MODEL}/stats", document_handlers.statistics, _ASKED_S),
    _get(f"{_MODEL}/profile", document_handlers.profile, _ASKED_S),
    _post("/v2/repository/index", document_handlers.repository_index),
    _post("/v2/repository/{repository}/index", missing("naming one of several repositories is")),
    _post("/v2/repository[/{repository}]/models/{model}/load", control_handlers.load),
    _post("/v2/repository[/{repository}]/models/{model}/unload", control_handlers.unload),
    _get("/v2/systemsharedmemory[/region/{region}]/status", control_handlers.system_status),
    _post("/v2/systemsharedmemory/region/{region}/register", control_handlers.register_system),
    _post("/v2/systemsharedmemory[/region/{region}]/unregister", control_handlers.unregister_system),
    _get("/v2/cudasharedmemory[/region/{region}]/status", control_handlers.cuda_status),
    _post("/v2/cudasharedmemory/region/{region}/register", control_handlers.register_cuda),
    _post("/v2/cudasharedmemory[/region/{region}]/unregister", control_handlers.unregister_cuda),
    _get("/v2[/models/{model}]/trace/setting", control_handlers.trace_settings),
    _post("/v2[/models/{model}]/trace/setting", control_handlers.update_trace_settings),
    _get("/v2/logging", control_handlers.log_settings),
    _post("/v2/logging", control_handlers.update_log_settings),
    _post(f"{_MODEL}/generate", _GENERATE),
    _post(f"{_MODEL}/generate_stream", _GENERATE),
)


Ruled: TypeAlias = tuple[Rule, Starter]


def _ruled(route: Route[Starter]) -> Route[Ruled]:
    rule = rule_of(f"{route.method} {route.pattern}")
    return Route(route.method, route.pattern, (rule, route.handler))


class _WhileKeysLast:
    """The start of requests whose key was found good: looked up again when the keys have changed."""

    __slots__ = ("_generation", "_guard", "_head", "_passed", "_start")

    def __init__(self, guard: Guard, head: RequestHead, passed: Callable[[], Start]) -> None:
        self._guard = guard
        self._head = head
        self._passed = passed
        self._generation = guard.generation
        self._start = passed()

    def __call__(self, exchange: Exchange) -> BodyPlan:
        if self._generation != self._guard.generation:
            self._start = self._passed()  # raises when the key is not good any more
            self._generation = self._guard.generation
        exchange.head.who = self._head.who
        return self._start(exchange)


class HttpApp:
    """Serves the v2 protocol from behind a door. One per front end, in its loop's thread.

    `table` holds the counters of all processes and `block` is this one's part of it; `metrics` makes the
    metrics page. `max_body_bytes` bounds bodies that are gathered in memory, counted after decompression; the
    server bounds all of them. `picture_threads` decode pictures. `fair` divides this front end's own time;
    `guard` says who may pass.
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
    ) -> None:
        fair = Fairness() if fair is None else fair
        self._service = Service(door, block, metrics, table, max_body_bytes, picture_threads, fair)
        self._guard = guard or Guard()
        self._service.asks_for_keys = self._guard.asks_for_keys
        self._router = Router(map(_ruled, ROUTES))

    def begin(self, head: RequestHead, exchange: Exchange) -> BodyPlan:
        try:
            start = cast("Start | None", head.derived)
            if start is None:
                head.derived = start = self._start(head)
            return start(exchange)
        except Fault:
            raise
        except CarpoolError as error:
            self._service.fair.tell(exchange, error)
        return None

    def _start(self, head: RequestHead) -> Start:
        """Whether it may pass is asked once for all requests with this head, until the keys change."""
        self._guard.check_host(head.headers)
        (rule, starter), variables = self._router.find(head.method, head.segments())

        def passed() -> Start:
            head.who = self._guard.check_http(
                rule, head.headers, f"{head.method} {head.path}", variables.get("model", "")
            )
            return starter(self._service, head, variables)

        if rule.changes:  # asked, and told in the log, each time
            return lambda exchange: passed()(exchange)
        if not self._guard.has_keys:
            return passed()
        return _WhileKeysLast(self._guard, head, passed)

    def close(self) -> None:
        """The server has stopped: end what is left of the app's own work."""
        self._service.close()
