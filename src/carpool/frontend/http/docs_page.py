"""What describes the picture routes: the OpenAPI document for programs, and `/docs`, the same as a page to
read, made here, without scripts or other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from functools import partial
from importlib import resources
from typing import Any

import orjson

from carpool.frontend.http.document_handlers import Variables
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.openapi import openapi
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.link.door import Catalog

Document = dict[str, Any]

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
        *(_operation(path, operation) for path, operation in operations),
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


def _operation(path: str, operation: Document) -> str:
    name = operation["operationId"]
    parts = [
        f'<section><h2 id="{html.escape(name)}"><span class="verb">POST</span> {_code(path)}</h2>',
        f"<p>{_text(operation['summary'])}. {_text(operation.get('description', ''))}</p>",
        _table(("option", "where", "value", ""), map(_parameter, operation["parameters"])),
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


def _parameter(parameter: Document) -> list[str]:
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
