"""The metrics page, beside the other routes and on a port of its own."""

from __future__ import annotations

from carpool.errors import CarpoolError
from carpool.frontend.access.guard import Guard
from carpool.frontend.access.route_rules import rule_of
from carpool.frontend.http.exchange import BodyPlan, Exchange
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_refusals import answer_error
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import Fault
from carpool.frontend.http.routes import Route, Router
from carpool.frontend.http.shared_page import SharedPage
from carpool.observe.prometheus import CONTENT_TYPE

_RULE = rule_of("GET /metrics")
_FIELDS = b"content-type: %b\r\n" % CONTENT_TYPE.encode()


def answer_metrics(exchange: Exchange, page: SharedPage) -> None:
    page.ask(lambda written: _send(exchange, written))


def _send(exchange: Exchange, written: bytes | None) -> None:
    if written is None:
        answer_error(exchange, CarpoolError("the server failed on this request"))
    else:
        exchange.respond(200, _FIELDS, written)


class MetricsApp:
    """An app that serves nothing else, for a port that only Prometheus can reach.

    It shares its page and its time with the app of the other port.
    """

    def __init__(self, page: SharedPage, fair: Fairness, guard: Guard | None = None) -> None:
        self._page = page
        self._fair = fair
        self._guard = guard or Guard()
        self._router = Router([Route("GET", "/metrics", answer_metrics)])

    def begin(self, head: RequestHead, exchange: Exchange) -> BodyPlan:
        try:
            self._guard.check_host(head.headers)
            handler = self._router.find(head.method, head.segments()).handler
            self._guard.check_http(_RULE, head.headers, "GET /metrics")
        except Fault:
            raise
        except CarpoolError as error:
            self._fair.tell(exchange, error)
        else:
            self._fair.document(exchange, lambda: handler(exchange, self._page))
        return None
