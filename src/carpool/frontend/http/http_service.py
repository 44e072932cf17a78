"""What all handlers of the HTTP front end share, besides what every front end has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import orjson

from carpool.errors import CarpoolError
from carpool.frontend.documents import LivePage, ProfileWatch
from carpool.frontend.front_service import FrontService
from carpool.frontend.http.exchange import JSON_FIELDS, BodyPlan, Exchange
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_answers import answer_error, compress
from carpool.frontend.http.long_json import LongJson
from carpool.frontend.http.pages import SharedPage
from carpool.frontend.http.parsing import RequestHead
from carpool.link.door import Catalog, Door
from carpool.observe.columns import BYTES_SENT
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger

log = logger("http")

Variables: TypeAlias = Mapping[str, str]
Handler: TypeAlias = "Callable[[Service, Exchange, Variables], BodyPlan]"
Start: TypeAlias = Callable[[Exchange], BodyPlan]
Starter: TypeAlias = "Callable[[Service, RequestHead, Variables], Start]"
"""Works out once, for all requests whose heads differ at most in length, what each of them starts with."""

WORTH_COMPRESSING = 1024
"""Bytes; less fits into one packet anyway."""

_COMPRESSED_AT_ONCE = 16 * 1024
_LEVEL = 1  # three times as fast as the usual 6, and little worse on tensors


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
        self.described: tuple[Catalog | None, bytes] = None, b""  # /openapi.json, of the catalogue asked last
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

    def answer_compressed(self, exchange: Exchange, fields: bytes, body: bytes, encoding: bytes) -> None:
        """Answer 200 with `body` in the given encoding, or as it is when that is shorter: long ones by way of
        a thread."""

        def answer(smaller: bytes) -> None:
            shorter = len(smaller) < len(body)
            more = b"Content-Encoding: %b\r\n" % encoding if shorter else b""
            sent = smaller if shorter else body
            self.server_row.add(BYTES_SENT, len(sent))
            exchange.respond(200, fields + more, sent)

        if len(body) <= _COMPRESSED_AT_ONCE:
            answer(compress(body, encoding, _LEVEL))
            return
        exchange.on_disconnect = None  # the model's work is done: there is nothing left to save
        work = asyncio.get_running_loop().run_in_executor(self.threads, compress, body, encoding, _LEVEL)
        work.add_done_callback(lambda done: None if done.cancelled() else answer(done.result()))

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
