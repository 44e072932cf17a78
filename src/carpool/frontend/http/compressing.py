"""Answers that leave compressed, long ones by way of a thread."""

from __future__ import annotations

import asyncio
from functools import partial

from carpool.frontend.http.compression import compress
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service
from carpool.observe.columns import BYTES_SENT

WORTH_COMPRESSING = 1024
"""Bytes; less fits into one packet anyway."""

_AT_ONCE = 16 * 1024
_LEVEL = 1  # three times as fast as the usual 6, and little worse on tensors


def answer_compressed(
    service: Service, exchange: Exchange, fields: bytes, body: bytes, encoding: bytes
) -> None:
    """Answer 200 with `body` in the given encoding, or as it is when that is shorter."""
    answer = partial(_answer, service, exchange, fields, body, encoding)
    if len(body) <= _AT_ONCE:
        answer(compress(body, encoding, _LEVEL))
        return
    exchange.on_disconnect = None  # the model's work is done: there is nothing left to save
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(service.threads, compress, body, encoding, _LEVEL)
    work.add_done_callback(lambda done: None if done.cancelled() else answer(done.result()))


def _answer(
    service: Service, exchange: Exchange, fields: bytes, body: bytes, encoding: bytes, smaller: bytes
) -> None:
    if len(smaller) < len(body):
        fields = b"%bContent-Encoding: %b\r\n" % (fields, encoding)
        body = smaller
    service.server_row.add(BYTES_SENT, len(body))
    exchange.respond(200, fields, body)
