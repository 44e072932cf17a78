"""Measures how often a cache is wrong. Some of its answers are computed all the same, and compared with what
was sent."""

from __future__ import annotations

import asyncio
from time import monotonic

import orjson

from carpool.errors import CarpoolError
from carpool.extensions.cache import counted
from carpool.extensions.cache.front_caches import Hit, ModelCache
from carpool.extensions.cache.similar import OFF_S, judged
from carpool.frontend.calls.request_facts import RequestService
from carpool.frontend.pictures.recomputation import Recomputation, in_threads
from carpool.frontend.pictures.sent_pictures import RoutePicture
from carpool.link.engine_client import Answer
from carpool.memory.layout import FILE_AT, write_file
from carpool.observe.logs import logger
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.likeness import Difference
from carpool.vision.plans.compare import compare_answers

_LONGEST_SHOWN = 80

log = logger("cache")


class CacheAudit(Recomputation[Difference]):
    """Audits one answer to a picture of a picture route, after it was sent."""

    def __init__(
        self, service: RequestService, name: str, model: ModelCache, picture: RoutePicture, hit: Hit
    ) -> None:
        """`name` is its source's; a hit without a source is the same request again."""
        super().__init__(service.pictures, model.entry, in_threads(service.threads))
        self._name = name
        self._model = model
        self._picture = picture
        self._hit = hit

    def begin(self, file: bytes) -> None:
        service, picture = self._service, self._picture
        if service.workers.waiting:
            self._skipped("busy")
        elif not picture.is_file:
            self.prepare(picture.head, picture.size, picture.prepare)
        else:
            try:
                slot = service.engine.slot(FILE_AT + len(file))
            except CarpoolError:  # no memory now
                self._skipped("slots")
                return
            write_file(slot.view, file)
            self.run(picture.head, slot)

    def _compare(self, answer: Answer) -> Difference:
        picture = self._picture
        picture.compose(answer.outputs)
        sent, computed = orjson.loads(self._hit.kept.body), orjson.loads(picture.body)
        return compare_answers(str(picture.model.task), sent, computed, CompareSettings())

    def _compared(self, found: Difference) -> None:
        source, model = self._hit.source, self._model
        verdict = "differs" if found.differs else "same"
        self._count(verdict if source is not None else f"exact-{verdict}")
        if source is not None and judged(source, model.settings, monotonic(), wrong=found.differs):
            model.row.add(counted.SOURCES_OFF)
            asyncio.get_running_loop().call_later(OFF_S, model.row.add, counted.SOURCES_OFF, -1.0)
            log.warning(
                "similar-cache-off",
                model=model.entry.name,
                source=self._name[:_LONGEST_SHOWN],
                seconds=OFF_S,
                change=round(self._hit.change, 1),
                why=found.why,
            )

    def _skipped(self, _why: str) -> None:
        self._count("skipped")

    def _count(self, verdict: str) -> None:
        self._model.row.add(counted.AUDITS[verdict])
