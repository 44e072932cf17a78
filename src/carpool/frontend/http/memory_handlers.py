"""The routes of clients' shared memory. The catalogue has what is registered; the engine changes it."""

from __future__ import annotations

from carpool.errors import NotFound, Unsupported
from carpool.frontend.documents import region_status
from carpool.frontend.http.document_handlers import Variables, with_json
from carpool.frontend.http.exchange import Collect, Exchange
from carpool.frontend.http.http_service import Service, answer_document
from carpool.wire.head import shorten

_FIELDS = ("key", "offset", "byte_size")


def system_status(service: Service, exchange: Exchange, variables: Variables) -> None:
    answer_document(exchange, region_status(service.door.catalog, variables.get("region", "")))


def register_system(service: Service, exchange: Exchange, variables: Variables) -> Collect:
    name = variables["region"]
    return with_json(
        exchange,
        lambda asked: service.answer_later(
            exchange,
            service.door.ask(
                "register-memory", {"name": name, **{key: asked[key] for key in _FIELDS if key in asked}}
            ),
        ),
    )


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
