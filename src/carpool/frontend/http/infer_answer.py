"""Answers to inferences as they leave: their fields, with `Server-Timing`, and how their bytes are sent."""

from __future__ import annotations

from typing import TypeAlias

from carpool.frontend.http.compressing import WORTH_COMPRESSING, answer_compressed
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.infer_head import InferHead
from carpool.observe.columns import BYTES_SENT
from carpool.wire.v2 import HEADER_LENGTH, Encoded

Times: TypeAlias = tuple[float, float, float, float, int]
"""Milliseconds of decode, queue, infer and post, and the number of images in the batch."""

TIMING = b'Server-Timing: decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, post;dur=%.3f, batch;desc="%d"\r\n'
_JSON_ANSWER = b"Content-Type: application/json\r\n" + TIMING
_BINARY_ANSWER = b"Content-Type: application/octet-stream\r\n" + HEADER_LENGTH.encode() + b": %d\r\n" + TIMING
_JOINED = 8 * 1024  # up to here one more copy is cheaper than sending pieces


def send_answer(
    service: Service, exchange: Exchange, asked: InferHead, encoded: Encoded, times: Times
) -> None:
    buffers, size, length = encoded
    if length is None:
        fields, encoding = _JSON_ANSWER % times, asked.json_encoding
    else:
        fields, encoding = _BINARY_ANSWER % (length, *times), asked.binary_encoding
    if encoding is not None and size >= WORTH_COMPRESSING:
        answer_compressed(service, exchange, fields, b"".join(buffers), encoding)
        return
    service.server_row.add(BYTES_SENT, size)
    exchange.respond(200, fields, b"".join(buffers) if size <= _JOINED else buffers)
