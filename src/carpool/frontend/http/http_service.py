"""What all handlers of the HTTP front end share, besides what every front end has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import orjson

from carpool.errors import CarpoolError
from carpool.frontend.front_service import FrontService
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_refusals import answer_error
from carpool.frontend.http.long_json import LongJson
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.http.shared_page import SharedPage
from carpool.frontend.live_document import LivePage
from carpool.frontend.profile_watch import ProfileWatch
from carpool.link.door import Catalog, Door
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger

log = logger("http")


class CatalogPages:
    """Pages that only the catalogue decides, written once for the one that was asked about last."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._written: dict[Hashable, bytes] = {}

    def read(self, catalog: Catalog, write: Callable[[Catalog], bytes]) -> bytes:
        if catalog is not self._catalog:
            self._catalog = catalog
            self._written.clear()
        page = self._written.get(write)
        if page is None:
            page = self._written[write] = write(catalog)
        return page


class Service(FrontService):
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
        super().__init__("http", door, block, max_body_bytes, picture_threads)
        self.metrics = metrics
        self.fair = fair
        self.pages = CatalogPages()
        self.live = LivePage(table)
        self.profiles = ProfileWatch(door)
        self.asks_for_keys = False
        self.long_json = LongJson()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self.door.serving and self.door.catalog.ready and self.door.catalog.able

    def answer_later(self, exchange: Exchange, document: Coroutine[Any, Any, object]) -> None:
        """Answer with the document once it is there."""
        task = asyncio.get_running_loop().create_task(_answer(exchange, document))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        super().close()
        self.fair.close()
        self.long_json.close()
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
