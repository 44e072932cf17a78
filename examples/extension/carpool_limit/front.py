"""Rejects requests beyond the limit, and answers what the limit is."""

from carpool.errors import Refused
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.request import Infer, Listener, Request
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.small_routes import per_request
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.observe.columns import single


class UnderWay(Listener):
    """Counts the requests for one model from their arrival to their answer."""

    requests = 0

    def answered(self, _request: Request, answer: Answer) -> Answer:
        self.requests -= 1
        return answer

    def left(self, _request: Request) -> bool:
        self.requests -= 1
        return False


def front(server: FrontServer) -> FrontPart:
    by_model: dict[str, UnderWay] = {}

    def around(inner: Infer, entry: ModelEntry) -> Infer:
        if "limit" not in entry.extra:
            return inner
        most, row = entry.extra["limit"]["at_once"], server.row(entry)
        under_way = by_model.setdefault(entry.name, UnderWay())

        def infer(request: Request) -> None:
            if under_way.requests == most:
                row.add(single("limit", "rejected"))
                raise Refused(f"{most} requests for {entry.name} are under way; retry later", reason="limit")
            under_way.requests += 1
            request.listen(under_way)
            inner(request)

        return infer

    return FrontPart(around=around)


def _status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    entry = service.look_up(variables["model"])
    answer_document(exchange, {"name": entry.name, "limit": entry.extra.get("limit")})


start_status = per_request(_status)
