"""Routes for what the engine holds and every front end follows: models, clients' memory, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from carpool.config.rules import nearest, shown
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unsupported
from carpool.frontend.access.keys import told
from carpool.frontend.documents import region_status
from carpool.frontend.http.document_routes import with_json
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_answers import answer_error
from carpool.frontend.http.http_service import Service, Variables, answer_document
from carpool.wire.head import load_object, shorten

Arguments: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_FILE = "file:"
_TO_LOAD = ("config",)
_TO_UNLOAD = ("unload_dependents",)
_REGION_FIELDS = ("key", "offset", "byte_size")


# ── loading and unloading models ──


def load(service: Service, exchange: Exchange, variables: Variables) -> Collect:
    def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
        files = {
            name.removeprefix(_FILE): text for name, text in parameters.items() if name.startswith(_FILE)
        }
        rest = {name: value for name, value in parameters.items() if not name.startswith(_FILE)}
        _check_names(rest, _TO_LOAD)
        for name, value in parameters.items():
            if not isinstance(value, str):
                raise InvalidInput(f"{name[:64]} must be a string", field=f"parameters.{name[:64]}")
        return {"model": variables["model"], "config": rest.get("config"), "files": files}

    return _ask(service, exchange, variables, "load", arguments)


def unload(service: Service, exchange: Exchange, variables: Variables) -> Collect:
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
    service: Service, exchange: Exchange, variables: Variables, what: str, arguments: Arguments
) -> Collect:
    if "repository" in variables:
        raise Unsupported("naming one of several repositories is not available on this server")

    def received(body: bytes | bytearray, _at: float) -> None:
        try:
            document = load_object(body, "request") if body.strip() else {}
            asked = arguments(_parameters(document))
        except CarpoolError as error:
            answer_error(exchange, error)
            return
        service.answer_later(exchange, service.door.ask(what, asked))

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
    return parameters


def _check_names(parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in parameters:
        if name not in known:
            raise InvalidInput(
                f"unknown parameter {shown(name)}; {nearest(name, known)}", field=f"parameters.{name[:64]}"
            )


# ── clients' shared memory: the catalogue has what is registered ──


def system_status(service: Service, exchange: Exchange, variables: Variables) -> None:
    answer_document(exchange, region_status(service.door.catalog, variables.get("region", "")))


def register_system(service: Service, exchange: Exchange, variables: Variables) -> Collect:
    def register(asked: dict[str, Any]) -> None:
        given = {key: asked[key] for key in _REGION_FIELDS if key in asked}
        question = service.door.ask("register-memory", {"name": variables["region"], **given})
        service.answer_later(exchange, question)

    return with_json(exchange, register)


def unregister_system(service: Service, exchange: Exchange, variables: Variables) -> None:
    name = variables.get("region", "")
    service.answer_later(exchange, service.door.ask("unregister-memory", {"name": name}))


def cuda_status(_service: Service, exchange: Exchange, variables: Variables) -> None:
    if "region" in variables:
        raise NotFound(
            f"Unable to find cuda shared memory region: {shorten(variables['region'])}; there are none here"
        )
    answer_document(exchange, [])


def register_cuda(_service: Service, _exchange: Exchange, _variables: Variables) -> None:
    raise Unsupported("CUDA shared memory is not offered")


def unregister_cuda(_service: Service, exchange: Exchange, _variables: Variables) -> None:
    """Clients unregister everything before they begin: there is nothing, and that is no error."""
    answer_document(exchange, {})


# ── trace and log settings ──


def log_settings(service: Service, exchange: Exchange, _variables: Variables) -> None:
    service.answer_later(exchange, service.door.ask("log-settings", {"settings": {}}))


def update_log_settings(service: Service, exchange: Exchange, _variables: Variables) -> Collect:
    def update(asked: dict[str, Any]) -> None:
        arguments = {"settings": asked, **told(exchange.who)}
        service.answer_later(exchange, service.door.ask("log-settings", arguments))

    return with_json(exchange, update)


def trace_settings(service: Service, exchange: Exchange, variables: Variables) -> None:
    _trace(service, exchange, variables, {})


def update_trace_settings(service: Service, exchange: Exchange, variables: Variables) -> Collect:
    return with_json(exchange, lambda asked: _trace(service, exchange, variables, asked))


def _trace(service: Service, exchange: Exchange, variables: Variables, asked: dict[str, Any]) -> None:
    model = variables.get("model", "")
    service.answer_later(exchange, service.door.ask("trace-settings", {"model": model, "settings": asked}))
