"""The infer route: what one head asks for, worked out once for every request that repeats it."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.errors import CarpoolError
from carpool.observe.counters import Row
from carpool.observe.failures import count_failure
from carpool.servers.door import Catalog, ModelEntry
from carpool.servers.http.exchange import BodyPlan, Collect, Exchange, Receive
from carpool.servers.http.handlers import Start
from carpool.servers.http.infer_head import read_infer_head
from carpool.servers.http.inference import Inference, no_slots
from carpool.servers.http.parsing import RequestHead
from carpool.servers.http.refusals import answer_error
from carpool.servers.http.service import Service
from carpool.servers.lookup import not_serving


def start_infer(service: Service, head: RequestHead, variables: Mapping[str, str]) -> Start:
    return InferRoute(service, head, variables["model"], variables.get("version", "")).begin


class InferRoute:
    """Requests with one head: which model they want, where their bodies go, and what else it says."""

    def __init__(self, service: Service, head: RequestHead, model: str, version: str) -> None:
        self.service = service
        self.asked = read_infer_head(head)
        self.size = head.content_length or 0
        self.entry: ModelEntry
        self.row: Row
        self._model = model
        self._version = version
        self._catalog: Catalog | None = None

    def begin(self, exchange: Exchange) -> BodyPlan:
        """Refuse before the body what can be refused, else say where it goes."""
        door = self.service.door
        try:
            if not door.serving:
                raise not_serving()
            if door.catalog is not self._catalog:
                self._look_up()
            now = exchange.head_at
            refusal: CarpoolError | None = door.refuses(self.entry, now + self.asked.budget, now)
            if refusal is None:
                return self._plan(exchange)
        except CarpoolError as error:
            refusal = error
        answer_error(exchange, refusal)
        self.failed(refusal)
        return None

    def failed(self, error: BaseException, seconds: float = 0.0) -> None:
        """Count a failure, if it is known whose."""
        if self._catalog is not None:
            count_failure(self.row, error, seconds)

    def _plan(self, exchange: Exchange) -> BodyPlan:
        service = self.service
        if not self.asked.in_place:
            return Collect(service.max_body_bytes, Inference(self, exchange, None).collected)
        slot = service.door.slot(self.size)
        if slot is None:
            raise no_slots()
        return Receive(slot.view, Inference(self, exchange, slot).received)

    def _look_up(self) -> None:
        self._catalog = None
        self.entry = self.service.look_up(self._model, self._version)
        self.row = self.service.row(self.entry)
        self._catalog = self.service.door.catalog
