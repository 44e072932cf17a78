"""A complete body on its way to the app, decompressed if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from carpool.errors import without_stack
from carpool.frontend.http.compression import Inflater, body_encoding
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.responses import Fault

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

Failed = Callable[[Exception], None]


def deliver(
    plan: Collect, body: bytearray, received_at: float, exchange: Exchange, shared: Shared, failed: Failed
) -> None:
    """Tell the app that its request is here. Raises what goes wrong, or tells it later to `failed`."""
    field = exchange.head.headers.get(b"content-encoding")
    encoding = body_encoding(field) if plan.inflate and body else None
    if encoding is None:
        plan.done(body, received_at)
        return
    inflater = Inflater(encoding, body, plan.limit, shared.ledger)
    if inflater.begin():
        plan.done(inflater.body, received_at)
        return
    if shared.inflating >= shared.limits.max_inflating:
        raise Fault(503, "too many compressed bodies are here at once; try again", "busy")
    Inflation(plan, inflater, received_at, exchange, shared, failed).go_on()


class Inflation:
    """A few KB can hold many MB: what is not done in one step is done in a thread, not in the loop.

    There it gets one turn after the other, with those of other bodies in between, and no more of them once
    its client has left.
    """

    __slots__ = ("_exchange", "_failed", "_inflater", "_plan", "_received_at", "_shared")

    def __init__(
        self,
        plan: Collect,
        inflater: Inflater,
        received_at: float,
        exchange: Exchange,
        shared: Shared,
        failed: Failed,
    ) -> None:
        self._plan = plan
        self._inflater = inflater
        self._received_at = received_at
        self._exchange = exchange
        self._shared = shared
        self._failed = failed
        shared.inflating += 1

    def go_on(self) -> None:
        work = self._shared.loop.run_in_executor(self._shared.inflaters, self._inflater.turn)
        work.add_done_callback(self._turned)

    def _turned(self, work: asyncio.Future[bool]) -> None:
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None and self._exchange.pending and not work.result():
            self.go_on()
            return
        self._shared.inflating -= 1
        if isinstance(error, asyncio.CancelledError) or not self._exchange.pending:
            return
        if isinstance(error, Exception):
            self._failed(error)
            without_stack(error)
            return
        try:
            self._plan.done(self._inflater.body, self._received_at)
        except Exception as raised:
            self._failed(raised)
