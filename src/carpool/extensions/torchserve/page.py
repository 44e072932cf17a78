"""Describes TorchServe's routes for /openapi.json."""

from __future__ import annotations

from carpool.frontend.http.openapi import Document, in_path, predict_operation
from carpool.link.catalog import Catalog


def paths(catalog: Catalog) -> Document:
    """Describes the same as `predict`, in other words: both methods, and the version in the path."""
    asked = predict_operation(catalog)
    asked |= {
        "summary": "Call one model as TorchServe's clients do",
        "description": "A classifier answers `{label: probability}`, a detector `[{label: box, score}]`.",
    }
    answer = {"application/json": {"schema": {"type": ["object", "array"]}}}
    good = {"description": "In the format of TorchServe's own handlers.", "content": answer}
    asked["responses"] = {**asked["responses"], "200": good}
    model, version, *rest = asked["parameters"]
    in_place = in_path({"type": "string"}, "version", "Its version.")
    found: Document = {"/ping": {"get": _ping()}}
    for path, name, first in (
        ("/predictions/{model}", "", [model, version]),
        ("/predictions/{model}/{version}", "_of_version", [model, in_place]),
    ):
        found[path] = {
            verb: asked | {"operationId": f"prediction{name}_{verb}", "parameters": [*first, *rest]}
            for verb in ("post", "put")
        }
    return found


def _ping() -> Document:
    content = {"application/json": {"schema": {"type": "object", "required": ["status"]}}}
    answers = {"200": "Healthy", "503": "Unhealthy: the server is starting or stopping"}
    return {
        "operationId": "ping",
        "summary": "Whether the server is ready, in TorchServe's format",
        "responses": {code: {"description": why, "content": content} for code, why in answers.items()},
    }
