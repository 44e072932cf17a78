"""How a call finds its handler. Messages come and go as bytes: what is hot reads and writes them itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from carpool.errors import CarpoolError, InvalidInput, NotFound, without_stack
from carpool.frontend.access.guard import API_KEY, AUTHORIZATION, Guard, check_model, presented, tell_change
from carpool.frontend.access.keys import Principal
from carpool.frontend.access.route_rules import Kind, rule_of
from carpool.frontend.grpc.grpc_calls import CALLS, Call
from carpool.frontend.grpc.grpc_infer import Metadata, Stream, UnaryInfer
from carpool.frontend.grpc.grpc_service import Service, log, too_many_messages
from carpool.frontend.grpc.statuses import refuse
from carpool.wire.proto import message_class

SERVICE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"
_LOOK_S = 0.1
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_HealthCheckRequest = message_class("HealthCheckRequest", HEALTH.rpartition(".")[0])
_HealthCheckResponse = message_class("HealthCheckResponse", HEALTH.rpartition(".")[0])


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Asked for a handler when the head of a call is here, and its message not yet."""

    def __init__(self, service: Service, guard: Guard | None = None) -> None:
        self._service = service
        self._guard = guard or Guard()
        self._calls = {f"/{SERVICE}/{call.name}": call for call in CALLS}
        self._handlers = {path: _handler(service, call, None) for path, call in self._calls.items()}
        self._handlers[f"/{HEALTH}/Check"] = grpc.unary_unary_rpc_method_handler(self._check)
        self._handlers[f"/{HEALTH}/Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        method = details.method
        who: Principal | None = None
        if self._guard.looks_at_fields:
            try:
                who = self._holder(method, details.invocation_metadata)
            except CarpoolError as error:
                return _refusing(error)
        if method == _INFER and self._service.is_full():
            return grpc.stream_unary_rpc_method_handler(_too_many)  # one that does not wait for its message
        if method == _INFER:
            infer = UnaryInfer(self._service, details.invocation_metadata, who)
            return grpc.unary_unary_rpc_method_handler(infer.run)
        if method == _STREAM:
            metadata = details.invocation_metadata
            holder = partial(self._holder, method, metadata)
            stream = Stream(self._service, metadata, who, self._guard, holder)
            return grpc.stream_stream_rpc_method_handler(stream.run)
        if who is not None and method in self._calls:
            return _handler(self._service, self._calls[method], who)
        return self._handlers.get(method)

    def _holder(self, method: str, metadata: Metadata) -> Principal | None:
        """Whose key the call brings; raises `Unauthenticated` or `Forbidden`."""
        name = method.rpartition("/")[2]
        rule = rule_of(name)
        found = dict(metadata)
        key = presented(_bytes(found.get(AUTHORIZATION)), _bytes(found.get(API_KEY)))
        who = self._guard.check(rule, key, name, model=None)
        self._guard.check_restricted(rule, lambda field: _bytes(found.get(field)), name)
        return who

    async def _check(self, message: bytes, context: Any) -> bytes:
        """gRPC's own health service, which Kubernetes and load balancers ask."""
        name = _service_asked_for(message, context)
        if name is None:
            return b""
        status = self._health(name)
        if status == _SERVICE_UNKNOWN:
            return refuse(context, NotFound("this server has no service of that name", field="service"))
        return _health_answer(status)

    async def _watch(self, message: bytes, context: Any) -> None:
        """Tell the status now and whenever it changes, until the server stops."""
        name = _service_asked_for(message, context)
        sent = None
        while name is not None:
            status = self._health(name)
            if status != sent:
                await context.write(_health_answer(status))
                sent = status
            if self._service.stopping.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.stopping.wait(), _LOOK_S)

    def _health(self, name: str) -> int:
        """Of the whole server, or of a service that it has; of others it knows nothing."""
        if name not in ("", SERVICE, HEALTH):
            return _SERVICE_UNKNOWN
        return _SERVING if self._service.ready else _NOT_SERVING


def _health_answer(status: int) -> bytes:
    return bytes(_HealthCheckResponse(status=status).SerializeToString())


async def _too_many(_messages: object, context: Any) -> bytes:
    return refuse(context, too_many_messages())


def _service_asked_for(message: bytes, context: Any) -> str | None:
    """None if it was refused."""
    try:
        name: str = _HealthCheckRequest.FromString(message).service
    except DecodeError:
        refuse(context, InvalidInput("the message is not a HealthCheckRequest", field="body"))
        return None
    return name


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode(errors="replace") if isinstance(value, str) else value


def _refusing(error: CarpoolError) -> grpc.RpcMethodHandler:
    """As for a stream, whatever the call is: it ends before its message is read."""

    async def run(_requests: object, context: Any) -> None:
        refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(run)


def _handler(service: Service, call: Call, who: Principal | None) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(_answering(service, call, who))


def _check_concerned(call: Call, request: Any, who: Principal | None) -> None:
    """Whether the key is for what the message names, and a word in the log before anything changes."""
    rule = rule_of(call.name)
    of_model = call.name.startswith("Model")
    model = request.name if of_model else getattr(request, "model_name", "")
    check_model(who, model, whole_server=rule.kind is Kind.CONTROL)
    if rule.changes and getattr(request, "settings", True):  # without any, they are only asked for
        tell_change(call.name, model, who)


def _answering(
    service: Service, call: Call, who: Principal | None
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    request_class = message_class(f"{call.name}Request")
    response_class = message_class(f"{call.name}Response")

    async def answered(message: bytes) -> bytes:
        try:
            request = request_class.FromString(message)
        except DecodeError:
            raise InvalidInput(f"the message is not a {call.name}Request", field="body") from None
        _check_concerned(call, request, who)
        document = await call.answer(service, request, *((who,) if call.told_who else ()))
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
