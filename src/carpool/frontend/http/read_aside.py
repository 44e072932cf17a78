"""Reads the body of a request where that delays no other client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from carpool.errors import CarpoolError, without_stack
from carpool.frontend.calls.packing import AT_ONCE
from carpool.frontend.calls.thread_errors import stopping
from carpool.frontend.http.exchange import Exchange, answer_error
from carpool.frontend.http.http_service import HttpService

Found = TypeVar("Found")


def read_aside(
    service: HttpService,
    exchange: Exchange,
    body: bytes | bytearray,
    read: Callable[..., Found],
    then: Callable[[Found], None],
    *more: object,
) -> None:
    """Reads the body and `more` with `read`, long ones in a thread, and passes the result to `then`. The
    client is answered with the errors of either."""

    def go_on(work: asyncio.Future[Found]) -> None:
        if not exchange.pending:
            return
        exchange.on_disconnect = None
        error = stopping() if work.cancelled() else work.exception()
        try:
            if error is not None:
                raise error
            then(work.result())
        except CarpoolError as wrong:
            service.fair.tell(exchange, wrong)
        except Exception as failed:
            service.log.exception("request-failed", path=exchange.head.path)
            answer_error(exchange, CarpoolError("the server failed on this request"))
            without_stack(failed)

    if len(body) > AT_ONCE:
        exchange.on_disconnect = _nothing
        service.fair_threads.begin(exchange.payer, lambda _: read(body, *more)).done.add_done_callback(go_on)
        return
    try:
        then(read(body, *more))
    except CarpoolError as error:
        service.fair.tell(exchange, error)


def _nothing() -> None:
    """The client left while its request was read: `pending` says so."""
