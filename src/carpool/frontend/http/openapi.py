"""What describes the picture routes, made from what the code reads and answers: the OpenAPI 3.1 document for
programs, and `/docs`, the same as a page to read, without scripts or other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

import orjson

from carpool import __version__
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service, Variables
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.http.image_route import TASK_ROUTES, in_order
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.pictures.picture_models import task_of
from carpool.link.asked_fields import DEADLINE, LATEST, SOURCE
from carpool.link.door import Catalog
from carpool.vision import draw, tasks
from carpool.wire.parameters import MAX_SOURCE_CHARS

Document = dict[str, Any]

_REFUSALS: Mapping[str, str] = {
    "400": "The picture, a name or a value cannot be used; `field` says which.",
    "401": "The server asks for a key, and this is none of its own.",
    "403": "The key is not for this model.",
    "404": "There is no such model, or none for this task.",
    "409": "A newer picture of the same source took its place.",
    "413": "The body or the picture is too large.",
    "429": "Refused, to keep the promise made to others; `Retry-After` says when to come back.",
    "503": "Loading, stopping, or out of memory for requests; try again.",
    "504": "The deadline passed before there was an answer.",
}
_KEYS: Document = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the server's --api-key-file."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}

_CODE = re.compile(r"`([^`]*)`")
_STYLE = (resources.files("carpool.frontend.http") / "docs_page.css").read_text()
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_PAGE_FIELDS = (
    "content-type: text/html; charset=utf-8\r\n"
    f"content-security-policy: default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'\r\n"
    "x-content-type-options: nosniff\r\n"
    "referrer-policy: no-referrer\r\n"
    "cache-control: no-cache\r\n"
).encode()


def openapi(catalog: Catalog, *, with_keys: bool = False) -> Document:
    """`with_keys`: the server asks for one."""
    models = [(entry.name, entry.version, task) for entry in in_order(catalog) if (task := task_of(entry))]
    paths: Document = {}
    for task, path in TASK_ROUTES.items():
        served = [name for name, _, of in models if of == task]
        paths[path] = {"post": _operation(task, served)}
    paths["/models/{model}/predict"] = {"post": _predict([name for name, _, _ in models])}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Carpool: pictures",
            "version": __version__,
            "summary": "Pictures in, typed answers out.",
            "description": "Tensors go over the v2 inference protocol at `/v2`, which is not part of this "
            "document.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "security": [{name: []} for name in _KEYS] if with_keys else [],
        "components": {"schemas": _schemas(), "responses": _responses(), "securitySchemes": _KEYS},
        "x-carpool-models": [
            {"name": name, "version": version, "task": str(task)} for name, version, task in models
        ],
    }


def _operation(task: str, models: Sequence[str]) -> Document:
    known: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    default = f"`{models[0]}` without it." if models else "No model here is for this task now."
    who = [
        _parameter("model", f"Which model answers; {default}", known),
        _parameter("version", "Which version of it; the newest without it.", {"type": "string"}),
    ]
    return {
        "operationId": str(task),
        "summary": tasks.kinds()[task].summary,
        "parameters": [*who, *tasks.parameters(task), *_header_parameters()],
        "requestBody": _request_body(),
        "responses": _answers([task], drawn="overlay" in tasks.options_of(task)),
    }


def _predict(models: Sequence[str]) -> Document:
    known: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    path = {"name": "model", "in": "path", "required": True, "description": "The model.", "schema": known}
    version = _parameter("version", "Which version of it; the newest without it.", {"type": "string"})
    return {
        "operationId": "predict",
        "summary": "Ask one model, whatever its task",
        "description": "Options that mean nothing to the model's task are refused.",
        "parameters": [path, version, *tasks.parameters(), *_header_parameters()],
        "requestBody": _request_body(),
        "responses": _answers(list(tasks.kinds()), drawn=True),
    }


def _parameter(name: str, description: str, schema: Document) -> Document:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _header_parameters() -> list[Document]:
    return [
        {
            "name": DEADLINE,
            "in": "header",
            "description": "Milliseconds that the client will wait, from the head of its request on.",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        },
        {
            "name": SOURCE,
            "in": "header",
            "description": "Who is asking, a camera or a tenant: sources get fair shares of a busy model.",
            "schema": {"type": "string", "maxLength": MAX_SOURCE_CHARS},
        },
        {
            "name": LATEST,
            "in": "header",
            "description": "1: a newer picture of the same source takes its place while it waits.",
            "schema": {"type": "string", "enum": ["0", "1"]},
        },
    ]


def _request_body() -> Document:
    text = {"type": "string", "contentEncoding": "base64", "description": "a picture, or a data: URL of one"}
    file = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "array", "items": file, "minItems": 1, "maxItems": MAX_PICTURES}},
        "description": "Options may stand here as well, as fields of the form.",
    }
    many = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_PICTURES}
    json = {"oneOf": [_object({"image": text}), _object({"images": many})]}
    return {
        "required": True,
        "description": "One picture or several; its own bytes say what format it has.",
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
    if drawn:
        for kind in draw.FORMATS:
            content[f"image/{kind}"] = {"schema": {"type": "string", "format": "binary"}}
    good = {
        "description": "The answer, in pixels of the picture as it is seen. Several pictures give a list in "
        "their order; where one failed, its place holds the error.",
        "headers": {"Server-Timing": {"description": "Milliseconds by part.", "schema": {"type": "string"}}},
        "content": content,
    }
    return {"200": good, **{status: {"$ref": f"#/components/responses/E{status}"} for status in _REFUSALS}}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> Document:
    error = {
        "type": "object",
        "title": "Why there is no answer",
        "properties": {
            "error": {"type": "string", "description": "one sentence"},
            "reason": {"type": "string", "description": "a word for programs, which stays the same"},
            "field": {"type": "string", "description": "what in the request it is about"},
            "predicted_ms": {"type": "number", "description": "how long it would have taken"},
            "retry_after_s": {"type": "number", "description": "when to try again"},
        },
        "required": ["error", "reason"],
    }
    status = {"type": "integer", "description": "the HTTP status that it would have had alone"}
    alone: Document = {"allOf": [_ref("Error"), {"properties": {"status": status}, "required": ["status"]}]}
    return {
        **{kind.form.__name__: kind.schema() for kind in tasks.kinds().values()},
        "Error": error,
        "PictureError": alone,
    }


def _responses() -> Document:
    content = {"application/json": {"schema": _ref("Error")}}
    return {
        f"E{status}": {"description": description, "content": content}
        for status, description in _REFUSALS.items()
    }


def _for_programs(catalog: Catalog, *, with_keys: bool) -> bytes:
    return orjson.dumps(openapi(catalog, with_keys=with_keys))


def _for_people(catalog: Catalog, *, with_keys: bool) -> bytes:
    return docs_page(openapi(catalog, with_keys=with_keys))


_PROGRAMS = {with_keys: partial(_for_programs, with_keys=with_keys) for with_keys in (False, True)}
_PEOPLE = {with_keys: partial(_for_people, with_keys=with_keys) for with_keys in (False, True)}


def describe(service: Service, exchange: Exchange, _variables: Variables) -> None:
    page = service.pages.read(service.door.catalog, _PROGRAMS[service.asks_for_keys])
    exchange.respond(200, JSON_FIELDS, page)


def read(service: Service, exchange: Exchange, _variables: Variables) -> None:
    page = service.pages.read(service.door.catalog, _PEOPLE[service.asks_for_keys])
    exchange.respond(200, _PAGE_FIELDS, page)


def docs_page(document: Document) -> bytes:
    info = document["info"]
    operations = [(path, item["post"]) for path, item in document["paths"].items()]
    parts = [
        f"<h1>{_text(info['title'])}</h1>",
        f"<p>{_text(info['summary'])} {_text(info['description'])} "
        '<a href="openapi.json">openapi.json</a> is this page for programs; '
        '<a href="/">the console</a> shows the server at work.</p>',
        _models(document["x-carpool-models"]),
        *(_section(path, operation) for path, operation in operations),
        _errors(document["components"]),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(info['title'])}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>"
    )
    return page.encode(errors="replace")


def _text(words: object) -> str:
    """Escaped, with what stands between backquotes as code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(str(words)))


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _models(models: list[Document]) -> str:
    if not models:
        return "<p>No model here takes pictures now.</p>"
    rows = [[_code(model["name"]), _text(model["version"]), _text(model["task"])] for model in models]
    return f"<h2>Models</h2>{_table(('model', 'version', 'task'), rows)}"


def _code(words: object) -> str:
    return f"<code>{html.escape(str(words))}</code>"


def _section(path: str, operation: Document) -> str:
    name = operation["operationId"]
    parts = [
        f'<section><h2 id="{html.escape(name)}"><span class="verb">POST</span> {_code(path)}</h2>',
        f"<p>{_text(operation['summary'])}. {_text(operation.get('description', ''))}</p>",
        _table(("option", "where", "value", ""), map(_option, operation["parameters"])),
    ]
    if "{" not in path:
        parts.append(_form(path, operation))
        parts.append(f"<pre>curl -s -F file=@picture.jpg http://HOST:PORT{html.escape(path)}</pre>")
    answer = operation["responses"]["200"]["content"]
    examples = answer["application/json"]["examples"].items()
    parts += [
        f"<details><summary>What comes back: {_text(kind)}</summary>{_example(shown)}</details>"
        for kind, shown in examples
    ]
    pictures = [kind for kind in answer if kind.startswith("image/")]
    if pictures:
        listed = ", ".join(map(_code, pictures))
        parts.append(
            f"<p>Or the picture with the answer drawn in, by <code>overlay=1</code> or Accept: {listed}.</p>"
        )
    return "".join(parts) + "</section>"


def _example(example: Document) -> str:
    return f"<pre>{html.escape(json.dumps(example['value'], indent=2, ensure_ascii=False))}</pre>"


def _form(path: str, operation: Document) -> str:
    drawn = any(parameter["name"] == "overlay" for parameter in operation["parameters"])
    draw = '<label><input type="checkbox" name="overlay" value="1"> draw the answer</label> ' if drawn else ""
    return (
        f'<form method="post" action="{html.escape(path)}" enctype="multipart/form-data">'
        f'<label>Picture <input type="file" name="file" required></label> {draw}'
        "<button>Send</button></form>"
    )


def _option(parameter: Document) -> list[str]:
    return [
        _code(parameter["name"]),
        _text(parameter["in"]),
        _text(_values(parameter["schema"])),
        _text(parameter["description"]),
    ]


def _values(schema: Document) -> str:
    """What a value may be, in words."""
    if "enum" in schema:
        words = ", ".join(f"`{value}`" for value in schema["enum"])
    elif "minimum" in schema:
        words = f"{schema['type']} from {schema['minimum']} to {schema['maximum']}"
    else:
        words = str(schema["type"])
    return words + (f"; `{json.dumps(schema['default'])}` without it" if "default" in schema else "")


def _errors(components: Document) -> str:
    statuses = [[name[1:], _text(answer["description"])] for name, answer in components["responses"].items()]
    error = components["schemas"]["Error"]["properties"]
    fields = [[_code(name), _text(field["description"])] for name, field in error.items()]
    return (
        "<section><h2>Errors</h2><p>Every error has the same form.</p>"
        f"{_table(('field', ''), fields)}{_table(('status', ''), statuses)}</section>"
    )
