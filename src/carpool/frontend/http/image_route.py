"""The picture routes: which model answers, and what one head asks of it, worked out once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable
from carpool.frontend.access.guard import check_model
from carpool.frontend.access.keys import Principal
from carpool.frontend.http.body_slots import first_slot
from carpool.frontend.http.document_handlers import Start, Starter
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange, Receive
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.image_head import read_image_head
from carpool.frontend.http.image_request import ImageRequest
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.model_lookup import not_serving
from carpool.frontend.pictures.picture_models import PictureModel, task_of
from carpool.link.door import Catalog, ModelEntry
from carpool.memory.slot_files import FILE_AT
from carpool.observe.counters import Row, count_failure
from carpool.vision.options import Options
from carpool.vision.tasks import kinds, options_of, read_options
from carpool.vision.tasks.task import cannot_draw

TASK_ROUTES: Mapping[str, str] = {name: kind.route for name, kind in kinds().items() if kind.route}


def start_task(task: str) -> Starter:
    """For a route that names what is wanted, and leaves it open who does it."""

    def starter(service: Service, head: RequestHead, _variables: Mapping[str, str]) -> Start:
        return ImageRoute(service, head, task).begin

    return starter


def start_predict(service: Service, head: RequestHead, variables: Mapping[str, str]) -> Start:
    return ImageRoute(service, head, None, variables["model"]).begin


class Target(NamedTuple):
    """What serves a request, where it is counted, and what the query asks of it."""

    entry: ModelEntry
    row: Row
    model: PictureModel
    options: Options


class ImageRoute:
    """Requests with one head."""

    def __init__(self, service: Service, head: RequestHead, task: str | None, model: str = "") -> None:
        self.service = service
        self.asked = read_image_head(head)
        self._task = task
        self._who = head.who
        self._catalog: Catalog | None = None
        self._target: Target | None = None
        if model and self.asked.model:
            raise InvalidInput("the path names the model already", field="model")
        self._model = model or self.asked.model
        if self.asked.version and not self._model:
            raise InvalidInput("a version needs its model: give model, too", field="version")

    def begin(self, exchange: Exchange) -> BodyPlan:
        """Refuse before the body what can be refused, else gather it."""
        service = self.service
        target: Target | None = None
        try:
            if not service.door.serving:
                raise not_serving()
            target = self.current()
            now = exchange.head_at
            sender = self.asked.sender
            size = exchange.head.content_length or 0
            advised = service.pictures.refuses(target.entry, now + self.asked.budget, now, sender, size)
            refusal = service.fair.judge(target.entry, exchange, sender, advised)
            if refusal is None:
                return self._plan(exchange, target)
        except CarpoolError as error:
            refusal = error
        source = self.asked.sender.source
        service.fair.tell(exchange, refusal, None if target is None else target.entry, source)
        if target is not None:  # else nobody knows whose failure it is
            count_failure(target.row, refusal, 0.0)
            service.door.turned_away(target.entry, refusal, exchange.head_at, source=source)
        return None

    def _plan(self, exchange: Exchange, target: Target) -> BodyPlan:
        """A picture that the device may decode comes straight into a slot."""
        service = self.service
        request = ImageRequest(self, exchange, target)
        size = exchange.head.content_length or 0
        if target.model.encoded and self.asked.in_place and size <= service.max_body_bytes:
            with contextlib.suppress(Unavailable):
                # see `Intake` for what the byte is good for
                request.slot = first_slot(service.door, exchange, FILE_AT + size + 1)
                return Receive(request.slot.view[FILE_AT:], request.received_in_slot, request.more)
        return Collect(service.max_body_bytes, request.received)

    def current(self) -> Target:
        """What serves these requests now: a change of the catalogue holds from the next look on."""
        catalog = self.service.door.catalog
        if catalog is not self._catalog or self._target is None:
            self._target = None
            entry = self._entry(catalog)
            check_model(self._who, entry.name)
            model = self.service.pictures.model(entry)
            options = read_options(self.asked.options, model.task)
            if self.asked.wants_drawn and "overlay" not in options_of(model.task):
                raise cannot_draw(f"what {entry.name} answers")
            self._target = Target(entry, self.service.row(entry), model, options)
            self._catalog = catalog
        return self._target

    def _entry(self, catalog: Catalog) -> ModelEntry:
        if not self._model:
            assert self._task is not None
            return default_model(catalog, self._task, self._who)
        entry = self.service.look_up(self._model, self.asked.version)
        if self._task is not None and task_of(entry) not in (self._task, None):
            raise InvalidInput(
                f"model '{entry.name}' is for {task_of(entry)}, not for {self._task}; "
                f"send its pictures to /models/{entry.name}/predict",
                field="model",
            )
        return entry

    def read_options(
        self, target: Target, fields: Mapping[str, str], *, several: bool
    ) -> tuple[Options, str | None]:
        """With those that stand in a form; and the format of the drawn answer, if one is wanted."""
        options = target.options
        if fields:
            twice = next((name for name in fields if name in self.asked.options), None)
            if twice is not None:
                raise InvalidInput(f"{twice} is given in the query and in the form", field=twice)
            options = read_options({**self.asked.options, **fields}, target.model.task)
        if not (options.overlay or self.asked.wants_drawn):
            return options, None
        if several:
            raise InvalidInput("several pictures are answered in JSON: draw one at a time", field="overlay")
        return replace(options, overlay=True), self.asked.drawn


def default_model(catalog: Catalog, task: str, who: Principal | None = None) -> ModelEntry:
    """The first that was configured for a task, of those that the key is for; failing that, the first."""
    found = [entry for entry in in_order(catalog) if task_of(entry) == task]
    for entry in found:
        if who is None or who.may_use(entry.name):
            return entry
    if found:
        return found[0]
    there = {str(found): None for found in map(task_of, in_order(catalog)) if found is not None}
    tasks = f"there are models for {', '.join(there)}" if there else "no model here takes pictures"
    raise NotFound(f"no model is for {task}; {tasks}", reason="no-task")


def in_order(catalog: Catalog) -> Iterable[ModelEntry]:
    """The newest version of each model, in the order in which they were configured."""
    names_in_order = dict.fromkeys(line.name for line in catalog.index)
    return [catalog.newest[name] for name in names_in_order if name in catalog.newest]
