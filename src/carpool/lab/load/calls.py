"""Infer calls over gRPC as bytes and metadata, made once for each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from carpool.lab.load.grpc_client import Call, Metadata
from carpool.lab.load.messages import Asking, Bodies, asked_headers
from carpool.lab.load.mix import Draw
from carpool.lab.load.protobuf import infer_request
from carpool.lab.load.ticket import Ticket
from carpool.wire.tensors import to_binary

_KEPT = 64  # messages: each has its tensors in it
_SOURCES = 8192


def tensor_calls(
    asking: Asking, model: str, version: str, bodies: Bodies, draw: Draw
) -> Callable[[Ticket], Call]:
    made = lru_cache(maxsize=_KEPT)(bodies)

    @lru_cache(maxsize=_KEPT)
    def build(images: int, number: int, priority: int) -> bytes:
        tensors = made(images)[number]
        raw = [to_binary(tensor) for tensor in tensors]
        return infer_request(model, version, tensors, raw, priority=priority)

    @lru_cache(maxsize=_SOURCES)
    def metadata(source: str) -> Metadata:
        return tuple((name.lower(), value) for name, value in asked_headers(asking, source))

    def call(ticket: Ticket) -> Call:
        number = ticket.number % len(made(ticket.images))
        return build(ticket.images, number, draw.priority(ticket)), metadata(draw.source(ticket))

    return call
