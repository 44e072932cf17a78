"""Describes OpenAI's routes for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.frontend.http.openapi import Document, in_path, with_tasks
from carpool.link.catalog import Catalog
from carpool.vision.tasks.written import TEXT_TASKS

_REFUSALS: Mapping[str, str] = {
    "400": "A field is not supported; `param` names it.",
    "401": "The key is missing or not known.",
    "403": "The key is not for this model.",
    "404": "There is no such model, or it writes no text from images.",
    "429": "Rejected, to meet the SLO of accepted requests; retry after `Retry-After`.",
    "503": "Loading, stopping, or out of memory for requests; retry.",
    "504": "The deadline passed before there was a response.",
}
_ERROR: Document = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"], "description": "a stable word for programs"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def paths(catalog: Catalog) -> Document:
    """Describes the routes of a server with the models of this catalogue."""
    models = [entry.name for entry, task in with_tasks(catalog) if task in TEXT_TASKS]
    named: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    who = {"x-carpool-models": list(models)}
    one = _get("one_model", "One of the models that write text from images")
    return {
        "/v1/chat/completions": {"post": _completions(named) | who},
        "/v1/responses": {"post": _responses(named) | who},
        "/v1/models": {"get": _get("list_models", "The models that write text from images") | who},
        "/v1/models/{model}": {"get": one | {"parameters": [in_path(named)]} | who},
    }


_LIMIT: Document = {"type": "integer", "minimum": 1}
_FLAG: Document = {"type": "boolean", "default": False}


def _completions(named: Document) -> Document:
    messages: Document = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object"},
        "description": "one of the user has a part of the type image_url, whose url is a data: URL",
    }
    options = {"type": "object", "properties": {"include_usage": _FLAG}}
    more = {"max_completion_tokens": _LIMIT, "max_tokens": _LIMIT, "stream": _FLAG, "stream_options": options}
    good = "A chat.completion; with `stream`, events of chat.completion.chunk, then [DONE]."
    return _writes("chat_completions", "", {"model": named, "messages": messages}, more, good)


def _responses(named: Document) -> Document:
    given: Document = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object"},
        "description": "messages; one of the user has a part of the type input_image, whose image_url is a "
        "data: URL",
    }
    more = {"instructions": {"type": "string"}, "max_output_tokens": _LIMIT, "stream": _FLAG}
    good = "A response; with `stream`, events from response.created to response.completed."
    return _writes("responses", ", as a response", {"model": named, "input": given}, more, good)


def _writes(name: str, form: str, needed: Document, more: Document, good: str) -> Document:
    asked = {"type": "object", "required": [*needed], "properties": {**needed, **more}}
    answer: Document = {
        "description": good,
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
    return {
        "operationId": name,
        "summary": f"Text from one image, in OpenAI's format{form}",
        "description": "Greedy decoding, one response, no tools. Other settings are rejected by name.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {"200": answer, **_refused(_REFUSALS)},
    }


def _get(name: str, summary: str) -> Document:
    good = {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}}
    some = {status: _REFUSALS[status] for status in ("401", "404")}
    return {"operationId": name, "summary": summary, "responses": {"200": good, **_refused(some)}}


def _refused(these: Mapping[str, str]) -> Document:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": why, "content": content} for status, why in these.items()}
