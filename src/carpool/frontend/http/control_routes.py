"""The routes that change what the engine holds and every front end follows: models, clients' memory, log
settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from carpool.config.rules import MAX_FILE_NAME, nearest, shown
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unsupported
from carpool.frontend import documents
from carpool.frontend.access.keys import asked_by, holder
from carpool.frontend.http.exchange import (
    Collect,
    Exchange,
    answer_error,
)
from carpool.frontend.http.http_service import (
    HttpService,
    Variables,
    answer_document,
)
from carpool.frontend.http.small_routes import with_json
from carpool.wire.head import load_object, read_object, shorten

Arguments: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_FILE = "file:"
_TO_LOAD = ("config",)
_TO_UNLOAD = ("unload_dependents",)
_REGION_FIELDS = ("key", "offset", "byte_size")


# ── loading and unloading models ──


def load(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
        files = {
            name.removeprefix(_FILE): text for name, text in parameters.items() if name.startswith(_FILE)
        }
        rest = {name: value for name, value in parameters.items() if not name.startswith(_FILE)}
        _check_names(rest, _TO_LOAD)
        for name, value in parameters.items():
            if not isinstance(value, str):
                raise InvalidInput(f"{name[:64]} must be a string", field=f"parameters.{name[:64]}")
        for name in files:  # over gRPC, Triton's own example takes it for the server's fault
            if len(name) > MAX_FILE_NAME:
                raise InvalidInput(
                    f"the name of a file has at most {MAX_FILE_NAME} characters", field=f"file:{name[:64]}"
                )
        return {"model": variables["model"], "config": rest.get("config"), "files": files}

    return _ask(service, exchange, variables, "load", arguments)


def unload(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(parameters, _TO_UNLOAD)
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidInput(
                "unload_dependents must be true or false", field="parameters.unload_dependents"
            )
        return {"model": variables["model"], "dependents": dependents}

    return _ask(service, exchange, variables, "unload", arguments)


def _ask(
    service: HttpService, exchange: Exchange, variables: Variables, what: str, arguments: Arguments
) -> Collect:
    if "repository" in variables:
        raise Unsupported("naming one of several repositories is not available on this server")

    def received(body: bytes | bytearray, _at: float) -> None:
        try:
            document = load_object(body, "request", tensors=False) if body.strip() else {}
            asked = arguments(_parameters(document))
        except CarpoolError as error:
            answer_error(exchange, error)
            return
        service.answer_later(exchange, service.engine.ask(what, asked))

    return Collect(service.max_body_bytes, received)


def _parameters(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in document:
        if name != "parameters":
            raise InvalidInput(
                f"unknown field {shown(name)}; {nearest(name, ['parameters'])}", field=name[:64]
            )
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidInput('parameters must be an object like {"config": "…"}', field="parameters")
    return read_object(parameters, "parameters")  # which bounds their number


def _check_names(parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in parameters:
        if name not in known:
            raise InvalidInput(
                f"unknown parameter {shown(name)}; {nearest(name, known)}", field=f"parameters.{name[:64]}"
            )


# ── clients' shared memory: the catalogue has what is registered ──


def system_status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name, owner = variables.get("region", ""), holder(exchange.who)
    answer_document(exchange, documents.region_status(service.engine.catalog, name, owner))


def register_system(service: HttpService, exchange: Exchange, variables: Variables) -> Collect:
    def register(asked: dict[str, Any]) -> None:
        given = {key: asked[key] for key in _REGION_FIELDS if key in asked}
        arguments = {"name": variables["region"], **given, **asked_by(exchange.who)}
        question = service.engine.ask("register-memory", arguments)
        service.answer_later(exchange, question)

    return with_json(exchange, register)


def unregister_system(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    name = variables.get("region", "")
    asked = {"name": name, **asked_by(exchange.who)}
    service.answer_later(exchange, service.engine.ask("unregister-memory", asked))


def cuda_status(_service: HttpService, exchange: Exchange, variables: Variables) -> None:
    if "region" in variables:
        raise NotFound(
            f"Unable to find cuda shared memory region: {shorten(variables['region'])}; this server has none"
        )
    answer_document(exchange, [])


def register_cuda(_service: HttpService, _exchange: Exchange, _variables: Variables) -> None:
    raise Unsupported("CUDA shared memory is not offered")


def unregister_cuda(_service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    """Clients unregister everything before they begin: there is nothing, and that is no error."""
    answer_document(exchange, {})


# ── log settings ──


def log_settings(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    service.answer_later(exchange, service.engine.ask("log-settings", {"settings": {}}))


def update_log_settings(service: HttpService, exchange: Exchange, _variables: Variables) -> Collect:
    def update(asked: dict[str, Any]) -> None:
        arguments = {"settings": asked, **asked_by(exchange.who)}
        service.answer_later(exchange, service.engine.ask("log-settings", arguments))

    return with_json(exchange, update)
