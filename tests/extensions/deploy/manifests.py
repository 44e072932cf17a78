"""Manifests, read; and custom resources held against the schemas of their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def strict(schema: Any) -> Any:
    """Nothing that is not declared, as a server with strict validation has it."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not open_ended:
        made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def problems(document: dict[str, Any]) -> list[str]:
    """Of a custom resource whose definition is kept here."""
    schema = strict(json.loads((SCHEMAS / f"{document['kind'].lower()}.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft7Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that a custom resource describes, which its schema here leaves open."""
    spec = document.get("spec", {})
    templates: list[dict[str, Any]] = []
    if document["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        templates = [group["template"]["spec"] for group in groups]
    elif document["kind"] == "ServingRuntime":
        templates = [{key: spec[key] for key in ("containers", "volumes")}]
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    return [{**head, "spec": template} for template in templates]
