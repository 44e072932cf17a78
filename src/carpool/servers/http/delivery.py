"""A complete body on its way to the app, decompressed if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from carpool.servers.http.compression import Inflater, body_encoding
from carpool.servers.http.exchange import BodyPlan, Collect, Exchange, Receive
from carpool.servers.http.shared import Shared

Failed = Callable[[Exception], None]


def deliver(
    plan: BodyPlan, body: bytearray, received_at: float, exchange: Exchange, shared: Shared, failed: Failed
) -> None:
    """Tell the app that its request is here; what goes wrong is told to `failed`."""
    try:
        if isinstance(plan, Receive):
            plan.done(received_at)
        elif isinstance(plan, Collect):
            _deliver_collected(plan, body, received_at, exchange, shared, failed)
    except Exception as error:
        failed(error)


def _deliver_collected(
    plan: Collect, body: bytearray, received_at: float, exchange: Exchange, shared: Shared, failed: Failed
) -> None:
    field = exchange.head.headers.get(b"content-encoding")
    encoding = body_encoding(field) if plan.inflate and body else None
    if encoding is None:
        plan.done(body, received_at)
        return
    inflater = Inflater(encoding, body, plan.limit)
    if inflater.step():
        plan.done(inflater.body, received_at)
        return
    # A few KB can hold many MB: what is not done in one step is done in a thread, not in the loop.
    work = shared.loop.run_in_executor(shared.inflaters, inflater.finish)
    work.add_done_callback(partial(_inflated, plan, received_at, exchange, failed))


def _inflated(
    plan: Collect, received_at: float, exchange: Exchange, failed: Failed, work: asyncio.Future[bytearray]
) -> None:
    if work.cancelled():
        return
    error = work.exception()
    if not exchange.pending:
        return
    try:
        if error is not None:
            raise error
        plan.done(work.result(), received_at)
    except Exception as reported:
        failed(reported)
