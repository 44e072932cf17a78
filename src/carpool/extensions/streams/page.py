"""Describes Triton's generate for /openapi.json."""

from __future__ import annotations

from carpool.frontend.http.openapi import Document, in_path, refusals
from carpool.frontend.http.task_models import in_order
from carpool.link.catalog import Catalog

_ANSWERS = (
    'Server-sent events: data: {"model_name": …, "model_version": …, "<output>": …} for each '
    "response. An error after the first is the last event"
)
_PARAMETER: Document = {"type": ["string", "number", "boolean"]}


def paths(catalog: Catalog) -> Document:
    """Describes Triton's extension, which asks any model."""
    models = [entry.name for entry in in_order(catalog)]
    named: Document = {"type": "string", **({"enum": list(models)} if models else {})}
    version = in_path({"type": "string"}, "version", "Its version.")
    found: Document = {}
    for where, parameters in (("", [in_path(named)]), ("/versions/{version}", [in_path(named), version])):
        for name in ("generate", "generate_stream"):
            operation = _generate(name, refusals()) | {"parameters": parameters}
            if where:
                operation["operationId"] += "_of_version"
            found[f"/v2/models/{{model}}{where}/{name}"] = {"post": operation}
    return found


def _generate(name: str, refused: Document) -> Document:
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
            **refused,
        },
    }
