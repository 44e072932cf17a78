"""Describes the routes for pictures and text as an OpenAPI 3.1 document, made from what the code reads and
answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from carpool import __version__
from carpool.extensions import installed
from carpool.frontend.documents import assumptions, task_of
from carpool.frontend.http.exchange import JSON_FIELDS, Exchange
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.http.task_models import in_order
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.senders import DEADLINE, LATEST, SOURCE
from carpool.observe.shared_history import KEPT_S
from carpool.vision import draw, tasks
from carpool.vision.tasks.written import TEXT_TASKS
from carpool.wire.head import MAX_SOURCE_CHARS

Document = dict[str, Any]

_EVENTS = (
    'Server-sent events: data: {"text": …, "index": n} for each piece, then the whole response with '
    '"done": true. An error after the first piece is an event, too'
)

_REFUSALS: Mapping[str, str] = {
    "400": "The image, a name or a value cannot be used; `field` says which.",
    "401": "The key is missing or not known.",
    "403": "The key is not for this model.",
    "404": "There is no such model, or none for this task.",
    "409": "A newer image of the same source replaced it.",
    "413": "The body or the image is too large.",
    "429": "Rejected, to meet the SLO of accepted requests; retry after `Retry-After`.",
    "503": "Loading, stopping, or out of memory for requests; retry.",
    "504": "The deadline passed before there was a response.",
}
_KEYS: Document = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the server's --api-key-file."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}


class MoreOfPictures(NamedTuple):
    """Describes what an extension adds to the routes for pictures, where a model asks for it."""

    parameters: Sequence[tuple[str, str, Document]]  # name, description and schema of each
    properties: Document  # of answers
    tasks: Collection[str] = ()  # whose models any request may ask to be served so


def openapi(catalog: Catalog, *, with_keys: bool = False) -> Document:
    """`with_keys`: the server asks for one."""
    listed = with_tasks(catalog)
    models = [(entry.name, entry.version, task) for entry, task in listed]
    more = {task: _more_of([task], (entry for entry, of in listed if of == task)) for task in tasks.kinds()}
    paths: Document = {}
    for task, kind in tasks.kinds().items():
        served = [name for name, _, of in models if of == task]
        if kind.route:
            paths[kind.route] = {"post": _operation(task, served, more[task])}
    paths["/models/{model}/predict"] = {"post": predict_operation(catalog)}
    for one in installed().values():
        for routes in one.routes:
            paths |= one.part(routes.paths)(catalog) if routes.paths else {}
    paths["/v2/history"] = {"get": _history()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Carpool: images",
            "version": __version__,
            "summary": "Images in, typed responses out.",
            "description": "Tensors use the v2 inference protocol at `/v2`, of which only `generate` and "
            f"`history` are part of this document.{_warning(catalog)}",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "security": [{name: []} for name in _KEYS] if with_keys else [],
        "components": {"schemas": _schemas(more), "responses": _responses(), "securitySchemes": _KEYS},
        "x-carpool-models": [
            {"name": entry.name, "version": entry.version, "task": str(task), **_assumed(entry)}
            for entry, task in listed
        ],
    }


def with_tasks(catalog: Catalog) -> list[tuple[ModelEntry, str]]:
    """Returns the models that take pictures, each with its task."""
    return [(entry, task) for entry in in_order(catalog) if (task := task_of(entry))]


def _assumed(entry: ModelEntry) -> Document:
    names = (entry.vision or {}).get("assumed")
    return {"assumed": list(names)} if names else {}


def _warning(catalog: Catalog) -> str:
    """Returns the warning for readers of this document as a page: which answers may be wrong."""
    found = assumptions(catalog)
    named = "; ".join(f"`{name}` ({keys})" for name, keys in found.items())
    what = "**Responses may be wrong.** The preprocessing of these models is not known, so it is assumed: "
    return f"\n\n{what}{named}. Set `preset` in their model.toml." if found else ""


def _history() -> Document:
    """Describes what happened lately, by the second."""
    whole = {"type": "integer", "minimum": 0}
    point = {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "description": "Seconds since 1970; each is larger than the last."},
            "time": {"type": "number", "description": "When the point was taken, in seconds since 1970."},
            "seconds": {
                "type": "number",
                "description": "Length that the point covers, up to `time`, in seconds.",
            },
            "server": {"type": "object", "description": "Connections, bytes, cores, memory, GPUs."},
            "models": {"type": "object", "description": "By `name/version`, of models with traffic."},
            "senders": {
                "type": "array",
                "description": "The busiest clients; with keys, for admin keys only.",
            },
        },
    }
    return {
        "summary": "What the server did in the last 15 minutes, one point per second",
        "operationId": "history",
        "parameters": [
            _parameter("after", "Only points with a larger number.", whole),
            _parameter("seconds", "Only the last so many seconds.", {**whole, "maximum": KEPT_S}),
        ],
        "responses": {
            "200": {
                "description": "The points, the oldest first.",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {
                                "every_s": {"type": "number"},
                                "kept_s": {"type": "integer"},
                                "bounds": {"type": "object", "description": "Of the histograms' buckets."},
                                "points": {"type": "array", "items": point},
                            },
                        }
                    }
                },
            }
        },
    }


def _more_of(of: Iterable[str], entries: Iterable[ModelEntry]) -> list[MoreOfPictures]:
    """Returns what extensions add for these models, which are `of` these tasks."""
    named = {name for entry in entries for name in entry.extra}
    described = [one for one in installed().values() if one.pictures]
    found = [(one, one.part(one.pictures)) for one in described if one.name in named or one.picture_options]
    return [more for one, more in found if one.name in named or not set(of).isdisjoint(more.tasks)]


def _stream(task: str) -> list[Document]:
    """Describes the parameter of what can come in pieces."""
    what = "1, as `Accept: text/event-stream`: text as the model writes it, in server-sent events."
    return [_parameter("stream", what, {"type": "string", "enum": ["0", "1"]})] if task in TEXT_TASKS else []


def _operation(task: str, models: Sequence[str], more: Sequence[MoreOfPictures]) -> Document:
    known: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    default = f"`{models[0]}` without it." if models else "No model is for this task now."
    who = [
        _parameter("model", f"The model; {default}", known),
        _parameter("version", "Its version. Default: the newest.", {"type": "string"}),
    ]
    options = [*tasks.parameters(task), *_parameters(more), *_stream(task)]
    return {
        "operationId": str(task),
        "x-carpool-models": list(models),
        "summary": tasks.kinds()[task].summary,
        "parameters": [*who, *options, *_header_parameters()],
        "requestBody": _request_body(),
        "responses": _answers([task], drawn="overlay" in tasks.options_of(task)),
    }


def predict_operation(catalog: Catalog) -> Document:
    """Describes a call of any model that takes pictures, whose name is in the path."""
    listed = with_tasks(catalog)
    models = [entry.name for entry, _ in listed]
    options = [
        *tasks.parameters(),
        *_parameters(_more_of({task for _, task in listed}, (entry for entry, _ in listed))),
    ]
    known: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    version = _parameter("version", "Its version. Default: the newest.", {"type": "string"})
    return {
        "operationId": "predict",
        "summary": "Call one model, whatever its task",
        "description": "Options that the model's task does not have are rejected.",
        "parameters": [in_path(known), version, *options, *_header_parameters()],
        "requestBody": _request_body(),
        "responses": _answers(list(tasks.kinds()), drawn=True),
    }


def in_path(schema: Document, name: str = "model", description: str = "The model.") -> Document:
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _parameters(more: Iterable[MoreOfPictures]) -> list[Document]:
    return [_parameter(*parameter) for one in more for parameter in one.parameters]


def _parameter(name: str, description: str, schema: Document) -> Document:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _header_parameters() -> list[Document]:
    return [
        {
            "name": DEADLINE,
            "in": "header",
            "description": "Deadline in milliseconds, from the head of the request.",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        },
        {
            "name": SOURCE,
            "in": "header",
            "description": "The source, such as a camera or a tenant: sources get fair shares of a busy "
            "model.",
            "schema": {"type": "string", "maxLength": MAX_SOURCE_CHARS},
        },
        {
            "name": LATEST,
            "in": "header",
            "description": "1: a newer image of the same source replaces it while it waits.",
            "schema": {"type": "string", "enum": ["0", "1"]},
        },
    ]


def _request_body() -> Document:
    text = {"type": "string", "contentEncoding": "base64", "description": "an image, or a data: URL of one"}
    file = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "array", "items": file, "minItems": 1, "maxItems": MAX_PICTURES}},
        "description": "Options may also be fields of the form.",
    }
    many = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_PICTURES}
    address = {"type": "string", "description": "of an image, on a host that the server may fetch from"}
    named: list[Document] = [{"image": text}, {"images": many}, {"url": address}]
    json = {"oneOf": [_object(one) for one in named]}
    return {
        "required": True,
        "description": "One image or several; the format is recognised from the bytes.",
        "content": {
            "multipart/form-data": {"schema": form},
            "application/json": {"schema": json},
            "image/*": {"schema": file},
            "application/octet-stream": {"schema": file},
        },
    }


def _object(properties: Document) -> Document:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _answers(of: Sequence[str], *, drawn: bool) -> Document:
    kinds = [tasks.kinds()[task] for task in of]
    one = [_ref(kind.form.__name__) for kind in kinds]
    several = _object({"results": {"type": "array", "items": {"anyOf": [*one, _ref("PictureError")]}}})
    content: Document = {
        "application/json": {
            "schema": {"anyOf": [*one, several]},
            "examples": {str(kind.name): {"value": kind.examples()} for kind in kinds},
        }
    }
    if any(task in TEXT_TASKS for task in of):
        content["text/event-stream"] = {"schema": {"type": "string", "description": _EVENTS}}
    if drawn:
        for kind in draw.FORMATS:
            content[f"image/{kind}"] = {"schema": {"type": "string", "format": "binary"}}
    good = {
        "description": "The response, in pixels of the upright image. Several images give a list in their "
        "order; a failed one has its error in its place.",
        "headers": {"Server-Timing": {"description": "Milliseconds by part.", "schema": {"type": "string"}}},
        "content": content,
    }
    return {"200": good, **refusals()}


def refusals() -> Document:
    return {status: {"$ref": f"#/components/responses/E{status}"} for status in _REFUSALS}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _schema(task: str, more: Iterable[MoreOfPictures]) -> Document:
    schema = tasks.kinds()[task].schema()
    for one in more:
        schema["properties"] = {**schema["properties"], **one.properties}
    return schema


def _schemas(more: Mapping[str, Sequence[MoreOfPictures]]) -> Document:
    error = {
        "type": "object",
        "title": "Why there is no response",
        "properties": {
            "error": {"type": "string", "description": "one sentence"},
            "reason": {"type": "string", "description": "a stable word for programs"},
            "field": {"type": "string", "description": "the field of the request"},
            "predicted_ms": {"type": "number", "description": "how long it would have taken"},
            "retry_after_s": {"type": "number", "description": "when to retry"},
        },
        "required": ["error", "reason"],
    }
    status = {"type": "integer", "description": "the HTTP status that it would have alone"}
    alone: Document = {"allOf": [_ref("Error"), {"properties": {"status": status}, "required": ["status"]}]}
    return {
        **{kind.form.__name__: _schema(task, more[task]) for task, kind in tasks.kinds().items()},
        "Error": error,
        "PictureError": alone,
    }


def _responses() -> Document:
    content = {"application/json": {"schema": _ref("Error")}}
    return {
        f"E{status}": {"description": description, "content": content}
        for status, description in _REFUSALS.items()
    }


def describe(service: HttpService, exchange: Exchange, _variables: Variables) -> None:
    catalog = service.engine.catalog
    if service.described[0] is not catalog:
        service.described = catalog, orjson.dumps(openapi(catalog, with_keys=service.asks_for_keys))
    exchange.respond(200, JSON_FIELDS, service.described[1])
