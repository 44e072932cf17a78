"""What all handlers of the HTTP front end share: the door, the counters, and how to find a model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from carpool.errors import CarpoolError
from carpool.frontend.client_memory import ClientMemory
from carpool.frontend.http.catalog_pages import CatalogPages
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_refusals import answer_error
from carpool.frontend.http.long_json import LongJson
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.http.shared_page import SharedPage
from carpool.frontend.live_document import LivePage
from carpool.frontend.model_lookup import look_up
from carpool.frontend.model_rows import ModelRows
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.profile_watch import ProfileWatch
from carpool.frontend.tracing import Tracer
from carpool.link.door import Door, ModelEntry
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger

log = logger("http")

_THREADS = 2  # few, so that long bodies and answers leave cores to the rest


class Service:
    """One per front end, used in its loop's thread only."""

    def __init__(
        self,
        door: Door,
        block: Block,
        metrics: SharedPage,
        table: Table,
        max_body_bytes: int,
        picture_threads: int,
        fair: Fairness,
    ) -> None:
        self.door = door
        self.server_row = block.server
        self.metrics = metrics
        self.fair = fair
        self.pages = CatalogPages()
        self.live = LivePage(table)
        self.profiles = ProfileWatch(door)
        self.max_body_bytes = max_body_bytes
        self.asks_for_keys = False
        self.memory = ClientMemory(door, max_body_bytes)
        self.tracer = Tracer(door)
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="http")
        self.long_json = LongJson()
        self.row = ModelRows(door, block).row
        self.pictures = PictureService(door, self.row, self.tracer, picture_threads)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self.door.serving and self.door.catalog.ready and self.door.catalog.able

    def look_up(self, name: str, version: str = "") -> ModelEntry:
        """The version asked for or the newest; raises `NotFound`, or `Unavailable` when it may come."""
        return look_up(self.door, name, version)

    def answer_later(self, exchange: Exchange, document: Coroutine[Any, Any, object]) -> None:
        """Answer with the document once it is there."""
        task = asyncio.get_running_loop().create_task(_answer(exchange, document))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.fair.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.long_json.close()
        self.pictures.close()
        self.profiles.close()
        for task in self._tasks:
            task.cancel()


def answer_document(exchange: Exchange, document: object, status: int = 200) -> None:
    exchange.respond(status, JSON_FIELDS, orjson.dumps(document))


async def _answer(exchange: Exchange, document: Coroutine[Any, Any, object]) -> None:
    try:
        answer_document(exchange, await document)
    except CarpoolError as error:
        answer_error(exchange, error)
    except Exception:
        log.exception("request-failed", path=exchange.head.path)
        answer_error(exchange, CarpoolError("the server failed on this request"))
