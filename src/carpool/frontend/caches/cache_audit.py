"""How often is a cache wrong? Some of its answers are computed all the same, and held against what was sent.

Nobody waits for that: pictures are decoded while no other is about to be, and the model runs them out of what
its device leaves over. So under load nothing is audited, and nothing is proven either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TypeVar

import orjson

from carpool.cache.similar import OFF_S, judged
from carpool.config.rollout_settings import CompareSettings
from carpool.errors import CarpoolError
from carpool.frontend.caches.front_caches import Hit, ModelCache
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.pictures.sent_pictures import RoutePicture
from carpool.link.door import Answer, Ask, Call, OneAnswer
from carpool.memory.arena import Slot
from carpool.memory.layout import FILE_AT, write_file
from carpool.observe import columns
from carpool.observe.logs import logger
from carpool.vision.likeness import Difference
from carpool.vision.plans.compare import compare_answers

_LONGEST_SHOWN = 80

T = TypeVar("T")

log = logger("cache")


class Audit(OneAnswer):
    """One answer to a picture of a picture route, after it was sent. `source` is None for the same request
    again. Used in the loop's thread; what takes long is done in others."""

    def __init__(
        self, service: CallService, name: str, model: ModelCache, picture: RoutePicture, hit: Hit
    ) -> None:
        """`name` is its source's."""
        self._service = service
        self._name = name
        self._model = model
        self._picture = picture
        self._kept = hit.kept
        self._source = hit.source
        self._change = hit.change
        self._call: Call | None = None

    def begin(self, file: bytes) -> None:
        service, picture = self._service, self._picture
        if service.pictures.workers.waiting:
            self._count("skipped")
            return
        try:
            if picture.is_file:
                slot = service.door.slot(FILE_AT + len(file))
                write_file(slot.view, file)
                self._infer(slot)
                return
            slot = service.door.slot(picture.size)
        except CarpoolError:  # no memory now
            self._count("skipped")
            return
        self._aside(partial(picture.prepare, slot.view), partial(self._prepared, slot))

    def _prepared(self, slot: Slot, seconds: float | None) -> None:
        if seconds is None:
            slot.release()
            self._count("skipped")
        else:
            self._infer(slot)

    def _aside(self, work: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """In a thread. Nothing comes back of what failed, or when the server stops."""

        def came_back(done: asyncio.Future[T]) -> None:
            then(None if done.cancelled() or done.exception() is not None else done.result())

        try:
            future = asyncio.get_running_loop().run_in_executor(self._service.threads, work)
        except RuntimeError:  # there are no threads any more
            then(None)
        else:
            future.add_done_callback(came_back)

    def _infer(self, slot: Slot) -> None:
        ask = Ask(self._model.entry, self._picture.head, slot, 0, monotonic(), spare=True)
        self._call = self._service.door.infer(ask, self)

    def done(self, answer: Answer) -> None:
        if answer.error is not None:
            self._compared(None)
        else:
            self._aside(partial(self._compare, answer), self._compared)

    def _compare(self, answer: Answer) -> Difference:
        self._picture.compose(answer.outputs)
        vision = self._model.entry.vision
        assert vision is not None
        sent, computed = orjson.loads(self._kept.body), orjson.loads(self._picture.body)
        return compare_answers(str(vision["task"]), sent, computed, CompareSettings())

    def _compared(self, found: Difference | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.release()
        if found is None:
            self._count("skipped")
            return
        source = self._source
        verdict = "differs" if found.differs else "same"
        self._count(verdict if source is not None else f"exact-{verdict}")
        if source is None:
            return
        if judged(source, self._model.settings, monotonic(), wrong=found.differs):
            row = self._model.row
            row.add(columns.CACHE_SOURCES_OFF)
            asyncio.get_running_loop().call_later(OFF_S, row.add, columns.CACHE_SOURCES_OFF, -1.0)
            log.warning(
                "similar-cache-off",
                model=self._model.entry.name,
                source=self._name[:_LONGEST_SHOWN],
                seconds=OFF_S,
                change=round(self._change, 1),
                why=found.why,
            )

    def _count(self, verdict: str) -> None:
        self._model.row.add(columns.CACHE_AUDITS[verdict])
