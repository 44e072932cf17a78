"""The calls that are not inferences: each takes the service and its request, and returns a JSON document."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from carpool import __version__
from carpool.errors import InvalidInput, NotFound, Unavailable, Unsupported
from carpool.frontend import documents
from carpool.frontend.access.keys import Principal, told
from carpool.frontend.front_service import is_model_ready
from carpool.frontend.grpc.grpc_service import Service
from carpool.wire.head import shorten

Document = Mapping[str, Any]
_FILE = "file:"


class Call(NamedTuple):
    """The names of its messages follow from its own, but for the index."""

    answer: Callable[..., Awaitable[Document]]
    name: str
    told_who: bool = False  # `answer` also takes whose key the call brings


async def _server_live(_service: Service, _request: Any) -> Document:
    return {"live": True}


async def _server_ready(service: Service, _request: Any) -> Document:
    return {"ready": service.ready}


async def _model_ready(service: Service, request: Any) -> Document:
    """A model that is not there is not ready, and that is all: as in Triton."""
    try:
        entry = service.look_up(request.name, request.version)
    except (NotFound, Unavailable):
        return {"ready": False}
    return {"ready": is_model_ready(service.door, entry)}


async def _server_metadata(service: Service, _request: Any) -> Document:
    return documents.server_metadata(__version__, service.door.catalog)


async def _model_metadata(service: Service, request: Any) -> Document:
    entry = service.look_up(request.name, request.version)
    return documents.model_metadata(service.door.catalog, entry)


async def _model_config(service: Service, request: Any) -> Document:
    return {"config": service.look_up(request.name, request.version).config}


async def _model_statistics(service: Service, request: Any) -> Document:
    if request.name:
        service.look_up(request.name, request.version)
    asked = {"name": request.name, "version": request.version}
    found: Document = await service.door.ask("statistics", asked)
    return found


# ---- the repository ----------------------------------------------------------------------------------------


async def _repository_index(service: Service, request: Any) -> Document:
    _only_repository(request)
    return {"models": documents.index(service.door.catalog.index, only_ready=request.ready)}


async def _load(service: Service, request: Any) -> Document:
    _only_repository(request)
    asked: dict[str, Any] = {"model": request.model_name}
    for name, parameter in request.parameters.items():
        if name == "config":
            asked["config"] = _value(parameter, name, "string_param")
        elif name.startswith(_FILE):
            content = _value(parameter, name, "bytes_param")
            encoded = await service.aside(len(content), base64.b64encode, content)
            asked.setdefault("files", {})[name.removeprefix(_FILE)] = encoded.decode()
        else:
            raise _unknown(name, "config and file:<version>/<name>")
    await service.door.ask("load", asked)
    return {}


async def _unload(service: Service, request: Any) -> Document:
    _only_repository(request)
    dependents = False
    for name, parameter in request.parameters.items():
        if name != "unload_dependents":
            raise _unknown(name, "unload_dependents")
        dependents = _value(parameter, name, "bool_param")
    await service.door.ask("unload", {"model": request.model_name, "dependents": dependents})
    return {}


def _only_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported(
            "naming one of several repositories is not available on this server", field="repository_name"
        )


def _value(parameter: Any, name: str, kind: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidInput(f"parameter {shorten(name)} must be a {kind}", field=f"parameters.{name[:80]}")
    return getattr(parameter, kind)


def _unknown(name: str, known: str) -> InvalidInput:
    return InvalidInput(
        f"unknown parameter {shorten(name)}; known are {known}", field=f"parameters.{name[:80]}"
    )


# ---- shared memory -----------------------------------------------------------------------------------------


async def _memory_status(service: Service, request: Any) -> Document:
    regions = documents.region_status(service.door.catalog, request.name)
    return {"regions": {region["name"]: region for region in regions}}


async def _memory_register(service: Service, request: Any) -> Document:
    asked = {name: getattr(request, name) for name in ("name", "key", "offset", "byte_size")}
    await service.door.ask("register-memory", asked)
    return {}


async def _memory_unregister(service: Service, request: Any) -> Document:
    await service.door.ask("unregister-memory", {"name": request.name})
    return {}


async def _cuda_register(_service: Service, _request: Any) -> Document:
    raise Unsupported(
        "CUDA shared memory is not offered on this server: register system shared memory instead"
    )


async def _nothing(_service: Service, _request: Any) -> Document:
    """There is never any CUDA memory to show or to let go, which clients ask for when they start."""
    return {}


# ---- settings ----------------------------------------------------------------------------------------------


async def _trace_setting(service: Service, request: Any) -> Document:
    """A setting without a value is cleared."""
    changes = {name: list(setting.value) or None for name, setting in request.settings.items()}
    asked = {"model": request.model_name, "settings": changes}
    in_force = await service.door.ask("trace-settings", asked)
    return {"settings": {name: {"value": _texts(value)} for name, value in in_force.items()}}


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


async def _log_settings(service: Service, request: Any, who: Principal | None) -> Document:
    changes = {}
    for name, setting in request.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput(f"log setting {shorten(name)} has no value", field=f"settings.{name[:80]}")
        changes[name] = getattr(setting, kind)
    in_force = await service.door.ask("log-settings", {"settings": changes, **told(who)})
    return {"settings": {name: {_kind(value): value} for name, value in in_force.items()}}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"


CALLS = (
    Call(_server_live, "ServerLive"),
    Call(_server_ready, "ServerReady"),
    Call(_server_metadata, "ServerMetadata"),
    Call(_model_ready, "ModelReady"),
    Call(_model_metadata, "ModelMetadata"),
    Call(_model_config, "ModelConfig"),
    Call(_model_statistics, "ModelStatistics"),
    Call(_repository_index, "RepositoryIndex"),
    Call(_load, "RepositoryModelLoad"),
    Call(_unload, "RepositoryModelUnload"),
    Call(_memory_status, "SystemSharedMemoryStatus"),
    Call(_memory_register, "SystemSharedMemoryRegister"),
    Call(_memory_unregister, "SystemSharedMemoryUnregister"),
    Call(_nothing, "CudaSharedMemoryStatus"),
    Call(_cuda_register, "CudaSharedMemoryRegister"),
    Call(_nothing, "CudaSharedMemoryUnregister"),
    Call(_trace_setting, "TraceSetting"),
    Call(_log_settings, "LogSettings", told_who=True),
)
"""With ModelInfer and ModelStreamInfer, all of the service."""
