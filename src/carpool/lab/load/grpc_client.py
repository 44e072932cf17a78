"""gRPC as the generator speaks it: calls of raw bytes, spread over a few channels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import grpc

from carpool.errors import InvalidInput
from carpool.lab.load.http_client import read_timing
from carpool.lab.load.messages import Asking, Bodies, asked_headers
from carpool.lab.load.protobuf import infer_request, numbers
from carpool.lab.load.request_data import Draw
from carpool.lab.load.ticket import PLAIN_ANSWER, Answer, Clock, Kind, Tell, Ticket, Timing, failed
from carpool.wire.tensors import to_binary

INFER = "/inference.GRPCInferenceService/ModelInfer"
_PARAMETERS = 4  # the field of ModelInferResponse
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels to one address are one connection
]
_REFUSALS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}
_REASON = re.compile(r"[a-z][a-z0-9-]{0,39}")

Metadata = tuple[tuple[str, str], ...]
Call = tuple[bytes, Metadata]


class GrpcTarget:
    """One server over `connections` channels. Calls share them, so that none waits for a free one."""

    def __init__(
        self,
        address: str,
        call: Callable[[Ticket], Call],
        *,
        connections: int,
        name: str,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.name = name
        self._credentials = credentials
        self._address = address
        self._call = call
        self._count = connections
        self._channels: list[Any] = []
        self._methods: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:  # noqa: ARG002
        self._tell = tell
        self._clock = clock
        for _ in range(self._count):
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(self._address, self._credentials, options=_OPTIONS)
            self._channels.append(channel)
            self._methods.append(channel.unary_unary(INFER))
        # A channel connects when it is first used: a second is enough, and whoever is not there fails anyway.
        waiting = [asyncio.ensure_future(channel.channel_ready()) for channel in self._channels]
        _done, late = await asyncio.wait(waiting, timeout=1.0)
        for task in late:
            task.cancel()

    def send(self, ticket: Ticket) -> None:
        task = asyncio.ensure_future(self._ask(ticket))
        ticket.handle = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def let_go(self, ticket: Ticket) -> None:
        if isinstance(ticket.handle, asyncio.Task):
            ticket.handle.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for channel in self._channels:
            await channel.close(grace=None)

    def facts(self) -> dict[str, int]:
        return {"connections": len(self._channels), "connection_limit": self._count}

    async def _ask(self, ticket: Ticket) -> None:
        message, metadata = self._call(ticket)
        method = self._methods[ticket.number % self._count]
        ticket.sent = self._clock()
        try:
            answer = read_answer(await method(message, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            trailing = {
                key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)
            }
            answer = read_error(error.code(), trailing)
        ticket.handle = None
        self._tell(ticket, answer)


def read_answer(message: bytes) -> Answer:
    """Of a ModelInferResponse."""
    try:
        found = numbers(message, _PARAMETERS)
    except InvalidInput:
        return failed("malformed")
    if "carpool_batch" not in found:
        return PLAIN_ANSWER
    queue, infer = found.get("carpool_queue_ms", 0.0), found.get("carpool_infer_ms", 0.0)
    post = found.get("carpool_post_ms")
    timing = Timing(
        queue / 1e3, infer / 1e3, int(found["carpool_batch"]), None if post is None else post / 1e3
    )
    return Answer(Kind.ANSWERED, "", timing)


def read_error(code: grpc.StatusCode, trailing: Mapping[str, str]) -> Answer:
    """UNAVAILABLE is a refusal only if the server says why: it is also what a broken connection is called."""
    reason = trailing.get("carpool-reason", "")
    explained = bool(_REASON.fullmatch(reason))
    refused = code in _REFUSALS and (explained or code is not grpc.StatusCode.UNAVAILABLE)
    timing = read_timing(trailing.get("server-timing", "").encode())
    word = reason if explained else f"grpc-{code.name.lower().replace('_', '-')}"
    return Answer(Kind.REFUSED if refused else Kind.FAILED, word, timing)


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
