"""How a call finds its handler, and the calls that are not inferences: these take the service and a request,
and return a JSON document. Messages come and go as bytes: what is hot reads and writes them itself."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, cast

from google.protobuf.json_format import ParseDict

from carpool import __version__
from carpool.core.job import INFINITY
from carpool.errors import (
    CarpoolError,
    InvalidInput,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
    without_stack,
)
from carpool.frontend import documents
from carpool.frontend.access.guard import API_KEY, AUTHORIZATION, Guard, check_model, presented, tell_change
from carpool.frontend.access.keys import Principal, asked_by, holder
from carpool.frontend.access.route_rules import Kind, rule_of
from carpool.frontend.calls.thread_errors import stopping
from carpool.frontend.demands import NotLoaded
from carpool.frontend.front_service import is_model_ready
from carpool.frontend.grpc.grpc_infer import UnaryInfer
from carpool.frontend.grpc.grpc_service import SERVICE, GrpcService, log, refuse
from carpool.frontend.grpc.infer_messages import parse
from carpool.frontend.grpc.message_fields import check_fields
from carpool.frontend.grpc.rpc import Handler, InTask, Rpc
from carpool.frontend.grpc.rpc_heads import Metadata, Status
from carpool.frontend.grpc.stream_infer import Stream
from carpool.link.catalog import ModelEntry
from carpool.wire.head import MAX_PARAMETERS, shorten
from carpool.wire.proto import message_class

Document = Mapping[str, Any]

HEALTH: Final = "grpc.health.v1.Health"

LONGEST_CALL: Final = 16 * 1024
"""Bytes of a message that brings neither tensors nor files."""

MOST_WATCHES: Final = 4
"""Calls of Health/Watch on one connection."""

_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"
_BACKGROUNDD = frozenset((f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", f"/{HEALTH}/Check"))
_WATCH = f"/{HEALTH}/Watch"
_REFUSED_WATCH: Final = 24  # credit, of which the answer gives back a part
_LOOK_S = 0.1
_FILE: Final = "file:"
_WITH_FILES: Final = (
    (MAX_PARAMETERS + 16, 3),
    (16, 2),
    (16, 0),
)  # fields of it, its parameters, their values
_SERVING: Final = 1
_NOT_SERVING: Final = 2
_SERVICE_UNKNOWN: Final = 3
_HealthCheckRequest = message_class("HealthCheckRequest", HEALTH.rpartition(".")[0])
_HealthCheckResponse = message_class("HealthCheckResponse", HEALTH.rpartition(".")[0])


class RpcMethod(NamedTuple):
    """The names of its messages follow from its own."""

    name: str
    answer: Callable[..., Document | Awaitable[Document]]
    told_who: bool = False  # `answer` also takes whose key the call brings
    files: bool = False  # its parameters may be files, of any length


def _model_ready(service: GrpcService, request: Any) -> Document:
    """A model that is not there is not ready, and that is all: as in Triton."""
    try:
        entry = service.look_up(request.name, request.version)
    except (NotFound, Unavailable):
        return {"ready": False}
    return {"ready": is_model_ready(service.engine, entry)}


async def _found(service: GrpcService, request: Any) -> ModelEntry:
    """Returns the model, which is loaded for this where that is done on demand."""
    try:
        return service.look_up(request.name, request.version)
    except NotLoaded as error:
        missing = error.model
    await service.demands.loaded(missing, INFINITY, 0)
    return service.look_up(request.name, request.version)


async def _model_metadata(service: GrpcService, request: Any) -> Document:
    entry = await _found(service, request)
    return documents.model_metadata(service.engine.catalog, entry)


async def _model_config(service: GrpcService, request: Any) -> Document:
    return {"config": (await _found(service, request)).published.config}


async def _model_statistics(service: GrpcService, request: Any) -> Document:
    if request.name:
        service.look_up(request.name, request.version)
    asked = {"name": request.name, "version": request.version}
    return cast(Document, await service.engine.ask("statistics", asked))


# ---- the repository ----------------------------------------------------------------------------------------


def _repository_index(service: GrpcService, request: Any) -> Document:
    _only_repository(request)
    return {"models": documents.index(service.engine.catalog.index, only_ready=request.ready)}


async def _load(service: GrpcService, request: Any) -> Document:
    _only_repository(request)
    asked: dict[str, Any] = {"model": request.model_name}
    for name, parameter in request.parameters.items():
        if name == "config":
            asked["config"] = _value(parameter, name, "string_param")
        elif name.startswith(_FILE):
            content = _value(parameter, name, "bytes_param")
            encoded = await service.aside("", len(content), base64.b64encode, content)
            asked.setdefault("files", {})[name.removeprefix(_FILE)] = encoded.decode()
        else:
            raise _wrong(
                name, f"unknown parameter {shorten(name)}; known are config and file:<version>/<name>"
            )
    await service.engine.ask("load", asked)
    return {}


async def _unload(service: GrpcService, request: Any) -> Document:
    _only_repository(request)
    dependents = False
    for name, parameter in request.parameters.items():
        if name != "unload_dependents":
            raise _wrong(name, f"unknown parameter {shorten(name)}; known are unload_dependents")
        dependents = _value(parameter, name, "bool_param")
    await service.engine.ask("unload", {"model": request.model_name, "dependents": dependents})
    return {}


def _only_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported(
            "naming one of several repositories is not available on this server", field="repository_name"
        )


def _value(parameter: Any, name: str, kind: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise _wrong(name, f"parameter {shorten(name)} must be a {kind}")
    return getattr(parameter, kind)


def _wrong(name: str, sentence: str) -> InvalidInput:
    return InvalidInput(sentence, field=f"parameters.{name[:80]}")


# ---- shared memory -----------------------------------------------------------------------------------------


def _memory_status(service: GrpcService, request: Any, who: Principal | None) -> Document:
    regions = documents.region_status(service.engine.catalog, request.name, holder(who))
    return {"regions": {region["name"]: region for region in regions}}


def _order(what: str, *names: str) -> Callable[[GrpcService, Any, Principal | None], Awaitable[Document]]:
    """Returns a handler that passes a call on to the engine, with these fields of it and who asks."""

    async def answer(service: GrpcService, request: Any, who: Principal | None) -> Document:
        await service.engine.ask(what, {name: getattr(request, name) for name in names} | asked_by(who))
        return {}

    return answer


def _cuda_register(_service: GrpcService, _request: Any) -> Document:
    raise Unsupported(
        "CUDA shared memory is not offered on this server: register system shared memory instead"
    )


# ---- settings ----------------------------------------------------------------------------------------------


async def trace_setting(service: GrpcService, request: Any) -> Document:
    """A setting without a value is cleared."""
    changes = {name: list(setting.value) or None for name, setting in request.settings.items()}
    asked = {"model": request.model_name, "settings": changes}
    in_force = await service.engine.ask("tracing/settings", asked)
    listed = {name: value if isinstance(value, list | tuple) else [value] for name, value in in_force.items()}
    return {"settings": {name: {"value": list(map(str, values))} for name, values in listed.items()}}


async def _log_settings(service: GrpcService, request: Any, who: Principal | None) -> Document:
    changes = {}
    for name, setting in request.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput(f"log setting {shorten(name)} has no value", field=f"settings.{name[:80]}")
        changes[name] = getattr(setting, kind)
    in_force = await service.engine.ask("log-settings", {"settings": changes, **asked_by(who)})
    return {"settings": {name: {_kind(value): value} for name, value in in_force.items()}}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"


CALLS = (
    RpcMethod("ServerLive", lambda _service, _request: {"live": True}),
    RpcMethod("ServerReady", lambda service, _: {"ready": service.ready}),
    RpcMethod(
        "ServerMetadata", lambda service, _: documents.server_metadata(__version__, service.engine.catalog)
    ),
    RpcMethod("ModelReady", _model_ready),
    RpcMethod("ModelMetadata", _model_metadata),
    RpcMethod("ModelConfig", _model_config),
    RpcMethod("ModelStatistics", _model_statistics),
    RpcMethod("RepositoryIndex", _repository_index),
    RpcMethod("RepositoryModelLoad", _load, files=True),
    RpcMethod("RepositoryModelUnload", _unload),
    RpcMethod("SystemSharedMemoryStatus", _memory_status, told_who=True),
    RpcMethod(
        "SystemSharedMemoryRegister",
        _order("register-memory", "name", "key", "offset", "byte_size"),
        told_who=True,
    ),
    RpcMethod("SystemSharedMemoryUnregister", _order("unregister-memory", "name"), told_who=True),
    # There is never any CUDA memory to show or to let go, which clients ask for when they start.
    RpcMethod("CudaSharedMemoryStatus", lambda _service, _request: {}),
    RpcMethod("CudaSharedMemoryRegister", _cuda_register),
    RpcMethod("CudaSharedMemoryUnregister", lambda _service, _request: {}),
    RpcMethod("TraceSetting", trace_setting),
    RpcMethod("LogSettings", _log_settings, told_who=True),
)
"""With ModelInfer and ModelStreamInfer, all of the service."""


class Handlers:
    """Finds a handler when the head of a call is here, and its message not yet."""

    def __init__(self, service: GrpcService, guard: Guard | None = None) -> None:
        self._service = service
        self._guard = guard or Guard()
        self._guard.listen(self._keys_changed)
        self._calls = {f"/{SERVICE}/{call.name}": _work(service, call) for call in CALLS}
        self._watching: set[asyncio.Future[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._seen = False  # whether the server was ready at the last look
        self._others = {f"/{HEALTH}/Check": self._check, _WATCH: self._watch}

    def find(self, rpc: Rpc) -> Handler | None:
        """Returns None if it was refused, or there is no such call."""
        path = rpc.head.path
        who: Principal | None = None
        if self._guard.looks_at_fields:
            try:
                who = self._holder(rpc)
            except CarpoolError as error:
                refuse(rpc, error)
                return None
        client = rpc.client if who is None else who.name
        if not self._service.admit(rpc, client, spared=path in _BACKGROUNDD):
            rpc.end(Status.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")  # in the words of gRPC
            return None
        if path == _INFER:
            rpc.of_models = True
            return UnaryInfer(self._service, rpc, who)
        if path == _STREAM:
            rpc.of_models = True
            return self._stream(rpc, who)
        if path in self._calls:
            return InTask(rpc, partial(self._calls[path], rpc, who))
        if path == _WATCH and rpc.others_like_this() > MOST_WATCHES:
            rpc.mistake(_REFUSED_WATCH)
            refuse(rpc, Unavailable(f"a connection has at most {MOST_WATCHES} of these calls", reason="busy"))
            return None
        if path in self._others:
            return InTask(rpc, partial(self._others[path], rpc))
        return None

    def _stream(self, rpc: Rpc, who: Principal | None) -> Handler | None:
        try:
            if self._service.stopping.is_set():
                raise stopping()
            return Stream(self._service, rpc, who, partial(self._holder, rpc))
        except CarpoolError as error:
            refuse(rpc, error)
            return None

    def _keys_changed(self) -> None:
        for stream in list(self._service.streams):
            stream.keys_changed()

    def _holder(self, rpc: Rpc) -> Principal | None:
        """Whose key the call brings; raises `Unauthenticated` or `Forbidden`."""
        name = rpc.head.path.rpartition("/")[2]
        rule = rule_of(name)
        found = _joined(rpc.head.metadata)
        key = presented(_bytes(found.get(AUTHORIZATION)), _bytes(found.get(API_KEY)))
        who = self._guard.check(rule, key, name, model=None)
        self._guard.check_restricted(rule, lambda field: _bytes(found.get(field)), name)
        return who

    async def _check(self, rpc: Rpc, message: bytes) -> bytes | None:
        """Implements gRPC's own health service, which Kubernetes and load balancers ask."""
        name = _service_asked_for(rpc, message)
        if name is None:
            return None
        status = self._health(name)
        if status == _SERVICE_UNKNOWN:
            refuse(rpc, NotFound("this server has no service of that name", field="service"))
            return None
        return bytes(_HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, rpc: Rpc, message: bytes) -> None:
        """Sends the status now and whenever it changes, until the server stops."""
        name = _service_asked_for(rpc, message)
        rpc.owed = False  # for as long as nothing changes, it is silent
        sent = None
        while name is not None:
            status = self._health(name)
            if status != sent:
                await rpc.write(_HealthCheckResponse(status=status).SerializeToString())
                sent = status
            if self._service.stopping.is_set():
                return
            await self._change()

    async def _change(self) -> None:
        """Waits until the server's health is another: one look for all who watch."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._watching.add(waiter)
        if self._looking is None:
            self._seen = self._service.ready
            self._looking = loop.call_later(_LOOK_S, self._look)
        try:
            await waiter
        finally:
            self._watching.discard(waiter)

    def _look(self) -> None:
        self._looking = None
        service = self._service
        if service.ready != self._seen or service.stopping.is_set():
            for waiter in self._watching:
                if not waiter.done():
                    waiter.set_result(None)
        elif self._watching:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _health(self, name: str) -> int:
        """Returns the health of the whole server, or of a service that it has; of others it knows nothing."""
        if name not in ("", SERVICE, HEALTH):
            return _SERVICE_UNKNOWN
        return _SERVING if self._service.ready else _NOT_SERVING


def _service_asked_for(rpc: Rpc, message: bytes) -> str | None:
    """Returns None if it was refused."""
    try:
        if len(message) > LONGEST_CALL:
            raise too_long_for("Health")
        return str(parse(_HealthCheckRequest, message).service)
    except CarpoolError as error:
        refuse(rpc, error)
        return None


def _joined(metadata: Metadata) -> dict[str, str | bytes]:
    """Returns the entries by name. What is there more than once is one list with commas, as over HTTP, and so
    no key: of two, neither the first nor the last is the one that counts."""
    found: dict[str, str | bytes] = {}
    for name, value in metadata:
        before = _bytes(found.get(name))
        found[name] = value if before is None else before + b", " + (_bytes(value) or b"")
    return found


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode(errors="replace") if isinstance(value, str) else value


def _check_concerned(call: RpcMethod, request: Any, who: Principal | None) -> None:
    """Checks whether the key is for what the message names, and leaves a word in the log before anything
    changes."""
    rule = rule_of(call.name)
    of_model = call.name.startswith("Model")
    model = request.name if of_model else getattr(request, "model_name", "")
    check_model(who, model, whole_server=rule.kind is Kind.CONTROL)
    if rule.changes and getattr(request, "settings", True):  # without any, they are only asked for
        tell_change(call.name, model, who)


def _check_cost(call: RpcMethod, message: bytes) -> None:
    """A parser makes an object of each field, and two bytes are enough for one: so it sees few of them."""
    if call.files:
        check_fields(message, _WITH_FILES, f"the message of {call.name}")
    elif len(message) > LONGEST_CALL:
        raise too_long_for(call.name)


def too_long_for(call: str) -> TooLarge:
    return TooLarge(f"the message of {call} may have at most {LONGEST_CALL:,} bytes", field="body")


def _work(
    service: GrpcService, call: RpcMethod
) -> Callable[[Rpc, Principal | None, bytes], Coroutine[Any, Any, bytes | None]]:
    request_class = message_class(f"{call.name}Request")
    response_class = message_class(f"{call.name}Response")

    async def answered(rpc: Rpc, message: bytes, who: Principal | None) -> bytes:
        _check_cost(call, message)
        request = await service.aside(rpc.client, len(message), parse, request_class, message)
        _check_concerned(call, request, who)
        document = call.answer(service, request, *((who,) if call.told_who else ()))
        if isinstance(document, Awaitable):
            document = await document
        return bytes(ParseDict(document, response_class()).SerializeToString())

    async def handle(rpc: Rpc, who: Principal | None, message: bytes) -> bytes | None:
        with service:
            try:
                return await answered(rpc, message, who)
            except CarpoolError as known:
                error = known
            except Exception as unknown:
                log.exception("request-failed", call=call.name)
                without_stack(unknown)
                error = CarpoolError(f"the server failed on this request: {type(unknown).__name__}")
            refuse(rpc, error)
            return None

    return handle
