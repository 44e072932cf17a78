"""A front end's questions: what it asks of the engine that is not an inference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from carpool.errors import CarpoolError
from carpool.link.link_failures import write_failure
from carpool.link.records import ANSWER, MAX_ASKS, OK, Outbox, ProtocolError, to_frontend
from carpool.observe.logs import logger

_log = logger("link")


class Questions:
    """Those of one front end that are open. They are answered in whatever order they end."""

    def __init__(
        self,
        frontend: int,
        answer: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._frontend = frontend
        self._answer = answer
        self._outbox = outbox
        self._loop = loop
        self._open: set[asyncio.Task[None]] = set()

    def ask(self, number: int, payload: bytes) -> None:
        if len(self._open) >= MAX_ASKS:
            raise ProtocolError(f"more than {MAX_ASKS} open questions")
        task = self._loop.create_task(self._settle(number, payload))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _settle(self, number: int, payload: bytes) -> None:
        try:
            what, arguments = orjson.loads(payload)
            answer = orjson.dumps(await self._answer(what, arguments))
            status = OK
        except CarpoolError as error:
            status, answer = write_failure(error)
        except Exception as error:
            _log.exception("ask-failed", frontend=self._frontend)
            status, answer = write_failure(CarpoolError(f"the engine failed: {error}"))
        self._outbox.put(to_frontend(ANSWER, number, status, answer))
