"""How a call finds its handler. Messages come and go as bytes: what is hot reads and writes them itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from carpool.errors import CarpoolError, InvalidInput, without_stack
from carpool.servers.grpc import health
from carpool.servers.grpc.calls import CALLS, Call
from carpool.servers.grpc.schema import message_class
from carpool.servers.grpc.service import Service, log, too_many_messages
from carpool.servers.grpc.statuses import refuse
from carpool.servers.grpc.stream import Stream
from carpool.servers.grpc.unary import UnaryInfer

SERVICE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"
_KNOWN = frozenset({SERVICE, HEALTH})


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Asked for a handler when the head of a call is here, and its message not yet."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handlers = {f"/{SERVICE}/{call.name}": _handler(service, call) for call in CALLS}
        self._handlers[f"/{HEALTH}/Check"] = grpc.unary_unary_rpc_method_handler(self._check)
        self._handlers[f"/{HEALTH}/Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        method = details.method
        if method == _INFER and self._service.is_full():
            return grpc.stream_unary_rpc_method_handler(_too_many)  # one that does not wait for its message
        if method == _INFER:
            infer = UnaryInfer(self._service, details.invocation_metadata)
            return grpc.unary_unary_rpc_method_handler(infer.run)
        if method == _STREAM:
            stream = Stream(self._service, details.invocation_metadata)
            return grpc.stream_stream_rpc_method_handler(stream.run)
        return self._handlers.get(method)

    async def _check(self, message: bytes, context: Any) -> bytes:
        name = _service_asked_for(message, context)
        return b"" if name is None else await health.checked(self._service, name, _KNOWN, context)

    async def _watch(self, message: bytes, context: Any) -> None:
        name = _service_asked_for(message, context)
        if name is not None:
            await health.watch(self._service, name, _KNOWN, context)


async def _too_many(_messages: object, context: Any) -> bytes:
    return refuse(context, too_many_messages())


def _service_asked_for(message: bytes, context: Any) -> str | None:
    """None if it was refused."""
    try:
        name: str = health.HealthCheckRequest.FromString(message).service
    except DecodeError:
        refuse(context, InvalidInput("the message is not a HealthCheckRequest", field="body"))
        return None
    return name


def _handler(service: Service, call: Call) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(_answering(service, call))


def _answering(service: Service, call: Call) -> Callable[[bytes, Any], Awaitable[bytes]]:
    request_class = message_class(f"{call.name}Request")
    response_class = message_class(f"{call.name}Response")

    async def answered(message: bytes) -> bytes:
        try:
            request = request_class.FromString(message)
        except DecodeError:
            raise InvalidInput(f"the message is not a {call.name}Request", field="body") from None
        document = await call.answer(service, request)
        return bytes(ParseDict(document, response_class()).SerializeToString())

    async def handle(message: bytes, context: Any) -> bytes:
        with service:
            try:
                return await answered(message)
            except CarpoolError as known:
                error = known
            except Exception as unknown:
                log.exception("request-failed", call=call.name)
                without_stack(unknown)
                error = CarpoolError(f"the server failed on this request: {type(unknown).__name__}")
            return refuse(context, error)

    return handle
