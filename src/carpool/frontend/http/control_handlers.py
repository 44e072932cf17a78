"""Loading and unloading models by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from carpool.config.rules import nearest, shown
from carpool.errors import CarpoolError, InvalidInput, Unsupported
from carpool.frontend.http.document_handlers import Variables
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_refusals import answer_error
from carpool.frontend.http.http_service import Service
from carpool.wire.head import load_object

Arguments: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_FILE = "file:"
_TO_LOAD = ("config",)
_TO_UNLOAD = ("unload_dependents",)


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
