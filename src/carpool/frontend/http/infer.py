"""The infer route: what one head asks for, worked out once for every request that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from carpool.errors import CarpoolError
from carpool.frontend.http.body_slots import first_slot
from carpool.frontend.http.document_handlers import Start
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange, Receive
from carpool.frontend.http.http_inference import Inference
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.infer_head import read_infer_head
from carpool.frontend.http.infer_pictures import PictureInference
from carpool.frontend.http.largest_body import LargestBody
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.model_lookup import not_serving
from carpool.link.door import Catalog, ModelEntry
from carpool.observe.counters import Row, count_failure
from carpool.wire.v2 import read_header_length


def start_infer(service: Service, head: RequestHead, variables: Mapping[str, str]) -> Start:
    return InferRoute(service, head, variables["model"], variables.get("version", "")).begin


class Target(NamedTuple):
    """What serves a request, and where it is counted."""

    entry: ModelEntry
    row: Row
    largest: LargestBody


class InferRoute:
    """Requests with one head: which model they want, where their bodies go, and what else it says."""

    def __init__(self, service: Service, head: RequestHead, model: str, version: str) -> None:
        self.service = service
        self.asked = read_infer_head(head)
        self._model = model
        self._version = version
        self._catalog: Catalog | None = None
        self._target: Target | None = None

    def begin(self, exchange: Exchange) -> BodyPlan:
        """Refuse before the body what can be refused, else say where it goes."""
        door = self.service.door
        if (exchange.head.content_length or 0) < self.asked.shortest:
            read_header_length(str(self.asked.header_length), exchange.head.content_length)  # raises
        try:
            if not door.serving:
                raise not_serving()
            now = exchange.head_at
            target = self.current()
            sender = self.asked.sender
            advised = door.refuses(target.entry, now + self.asked.budget, now, sender, certain=False)
            refusal = self.service.fair.judge(target.entry, exchange, sender, advised)
            if refusal is None:
                return self._plan(exchange, target)
        except CarpoolError as error:
            refusal = error
        source = self.asked.sender.source
        entry = None if self._target is None else self._target.entry
        self.service.fair.tell(exchange, refusal, entry, source)
        if self._target is not None:  # else nobody knows whose failure it is
            count_failure(self._target.row, refusal, 0.0)
            door.turned_away(self._target.entry, refusal, exchange.head_at, source=source)
        return None

    def current(self) -> Target:
        """What serves these requests now: a change of the catalogue holds from the next look on."""
        catalog = self.service.door.catalog
        if catalog is not self._catalog or self._target is None:
            self._target = None
            entry = self.service.look_up(self._model, self._version)
            largest = LargestBody(entry, self.service.max_body_bytes)
            self._target = Target(entry, self.service.row(entry), largest)
            self._catalog = catalog
        return self._target

    def _plan(self, exchange: Exchange, target: Target) -> BodyPlan:
        service = self.service
        kind = Inference if target.entry.vision is None else PictureInference
        size = exchange.head.content_length or 0
        largest = target.largest
        if not self.asked.in_place:
            most = largest.gathered()
            largest.check(size, most)
            return Collect(most, kind(self, exchange, target, None).collected)
        largest.check(size, largest.in_place(self.asked.header_length or 0))
        slot = first_slot(service.door, exchange, size + 1)  # see `Intake` for what the byte is good for
        inference = kind(self, exchange, target, slot)
        return Receive(slot.view, inference.received, inference.more)
