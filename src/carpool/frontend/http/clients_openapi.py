"""Routes that clients of other servers know, and streams of text, as the OpenAPI document has them: OpenAI's
for text of pictures, Triton's generate, and TorchServe's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = dict[str, Any]

EVENTS = (
    'Server-sent events: data: {"text": …, "index": n} for each piece, then the whole response with '
    '"done": true. An error after the first piece is an event, too'
)
_ANSWERS = (
    'Server-sent events: data: {"model_name": …, "model_version": …, "<output>": …} for each '
    "response. An error after the first is the last event"
)
_PARAMETER: Document = {"type": ["string", "number", "boolean"]}
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


def chat_paths(models: Sequence[str]) -> Document:
    """Describes the routes of a server whose models for text these are."""
    named: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    who = {"x-carpool-models": list(models)}
    one = _get("one_model", "One of the models that write text from images")
    return {
        "/v1/chat/completions": {"post": _completions(named) | who},
        "/v1/models": {"get": _get("list_models", "The models that write text from images") | who},
        "/v1/models/{model}": {"get": one | {"parameters": [in_path(named)]} | who},
    }


def in_path(schema: Document, name: str = "model", description: str = "The model.") -> Document:
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def generate_paths(models: Sequence[str], refusals: Document) -> Document:
    """Describes Triton's extension, which asks any model. `refusals` are the answers that are errors."""
    named: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    version = in_path({"type": "string"}, "version", "Its version.")
    paths: Document = {}
    for where, parameters in (("", [in_path(named)]), ("/versions/{version}", [in_path(named), version])):
        for name in ("generate", "generate_stream"):
            operation = _generate(name, refusals) | {"parameters": parameters}
            if where:
                operation["operationId"] += "_of_version"
            paths[f"/v2/models/{{model}}{where}/{name}"] = {"post": operation}
    return paths


def _generate(name: str, refusals: Document) -> Document:
    answer: Document = {
        "type": "object",
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string", "description": "the request's, if it had one"},
        },
        "required": ["model_name", "model_version"],
        "description": "and an output in each other field: its one element, or the list of its elements",
    }
    as_json = {"application/json": {"schema": answer}}
    as_events = {"text/event-stream": {"schema": {"type": "string", "description": _ANSWERS}}}
    streams = name == "generate_stream"
    fields: Document = {
        "type": "object",
        "properties": {
            "id": {"type": ["string", "number", "boolean"]},
            "parameters": {"type": "object", "additionalProperties": _PARAMETER},
        },
        "description": "an input in the field of its name: one element, or the list of its elements; other "
        "fields are parameters",
    }
    summary = "Call any model, with an event per response" if streams else "Call any model with one response"
    return {
        "operationId": name,
        "summary": summary,
        "description": "For models that write text from images, the input may be an image in base64.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": fields}}},
        "responses": {
            "200": {"description": summary + ".", "content": as_events if streams else as_json},
            **refusals,
        },
    }


def ping_path() -> Document:
    content = {"application/json": {"schema": {"type": "object", "required": ["status"]}}}
    answers = {"200": "Healthy", "503": "Unhealthy: the server is starting or stopping"}
    return {
        "operationId": "ping",
        "summary": "Whether the server is ready, in TorchServe's format",
        "responses": {code: {"description": why, "content": content} for code, why in answers.items()},
    }


def _completions(named: Document) -> Document:
    limit: Document = {"type": "integer", "minimum": 1}
    flag: Document = {"type": "boolean", "default": False}
    asked = {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": named,
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object"},
                "description": "one of the user has a part of the type image_url, whose url is a data: URL",
            },
            "max_completion_tokens": limit,
            "max_tokens": limit,
            "stream": flag,
            "stream_options": {"type": "object", "properties": {"include_usage": flag}},
        },
    }
    good: Document = {
        "description": "A chat.completion; with `stream`, events of chat.completion.chunk, then [DONE].",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
    return {
        "operationId": "chat_completions",
        "summary": "Text from one image, in OpenAI's format",
        "description": "Greedy decoding, one response, no tools. Other settings are rejected by name.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {"200": good, **_refused(_REFUSALS)},
    }


def _get(name: str, summary: str) -> Document:
    good = {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}}
    some = {status: _REFUSALS[status] for status in ("401", "404")}
    return {"operationId": name, "summary": summary, "responses": {"200": good, **_refused(some)}}


def _refused(these: Mapping[str, str]) -> Document:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": why, "content": content} for status, why in these.items()}
