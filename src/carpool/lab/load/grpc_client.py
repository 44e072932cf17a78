"""gRPC as the generator speaks it: calls made once for each kind, spread over a few channels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from carpool.lab.load.http_client import read_timing
from carpool.lab.load.messages import Asking, Bodies, Draw, asked_headers
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Clock, Kind, Tell, Ticket, Timing, failed
from carpool.types import Tensor
from carpool.wire.codec import to_binary
from carpool.wire.proto import message_class

INFER = "/inference.GRPCInferenceService/ModelInfer"
_ModelInferRequest = message_class("ModelInferRequest")
_ModelInferResponse = message_class("ModelInferResponse")
_KEPT = 64  # messages: each has its tensors in it
_SOURCES = 8192
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


def tensor_calls(
    asking: Asking, model: str, version: str, bodies: Bodies, draw: Draw
) -> Callable[[Ticket], Call]:
    made = lru_cache(maxsize=_KEPT)(bodies)

    @lru_cache(maxsize=_KEPT)
    def build(images: int, number: int, priority: int) -> bytes:
        return infer_request(model, version, made(images)[number], priority)

    @lru_cache(maxsize=_SOURCES)
    def metadata(source: str) -> Metadata:
        return tuple((name.lower(), value) for name, value in asked_headers(asking, source))

    def call(ticket: Ticket) -> Call:
        number = ticket.number % len(made(ticket.images))
        return build(ticket.images, number, draw.priority(ticket)), metadata(draw.source(ticket))

    return call


def infer_request(model: str, version: str, tensors: Sequence[Tensor], priority: int = 0) -> bytes:
    request = _ModelInferRequest(
        model_name=model,
        model_version=version,
        inputs=[{"name": t.name, "datatype": t.datatype.value, "shape": t.shape} for t in tensors],
        raw_input_contents=[bytes(to_binary(tensor)) for tensor in tensors],
    )
    if priority:
        request.parameters["priority"].int64_param = priority
    return bytes(request.SerializeToString())


@dataclass(eq=False)
class GrpcTarget:
    """Represents one server over `connections` channels. Calls share them, so that none waits for a free
    one."""

    address: str
    call: Callable[[Ticket], Call]
    connections: int
    name: str
    credentials: Any = None

    def __post_init__(self) -> None:
        self._channels: list[Any] = []
        self._methods: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:  # noqa: ARG002
        self._tell = tell
        self._clock = clock
        for _ in range(self.connections):
            if self.credentials is None:
                channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(self.address, self.credentials, options=_OPTIONS)
            self._channels.append(channel)
            self._methods.append(channel.unary_unary(INFER))
        # A channel connects when it is first used. A second is enough: requests to an absent server fail.
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
        return {"connections": len(self._channels), "connection_limit": self.connections}

    async def _ask(self, ticket: Ticket) -> None:
        message, metadata = self.call(ticket)
        method = self._methods[ticket.number % self.connections]
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
    """Reads a ModelInferResponse."""
    try:
        parameters = _ModelInferResponse.FromString(message).parameters
    except DecodeError:
        return failed("malformed")
    if "carpool_batch" not in parameters:
        return PLAIN_ANSWER
    post = parameters["carpool_post_ms"].double_param / 1e3 if "carpool_post_ms" in parameters else None
    timing = Timing(
        parameters["carpool_queue_ms"].double_param / 1e3,
        parameters["carpool_infer_ms"].double_param / 1e3,
        parameters["carpool_batch"].int64_param,
        post,
    )
    return Answer(Kind.ANSWERED, "", timing)


def read_error(code: grpc.StatusCode, trailing: Mapping[str, str]) -> Answer:
    """UNAVAILABLE is a refusal only if the server says why: it is also what a broken connection is called."""
    reason = trailing.get("carpool-reason", "")
    explained = bool(_REASON.fullmatch(reason))
    refused = code in _REFUSALS and (explained or code is not grpc.StatusCode.UNAVAILABLE)
    timing = read_timing(trailing.get("server-timing", ""))
    word = reason if explained else f"grpc-{code.name.lower().replace('_', '-')}"
    return Answer(Kind.REFUSED if refused else Kind.FAILED, word, timing)
