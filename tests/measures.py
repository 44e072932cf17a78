"""The figures by which features are separated from the server: today's, and the goal of each.

A test fails when a figure is worse than today's, and also when it is better and this file does not say so.
tests/test_measures.py compares them with the code, tests/live/test_what_is_loaded.py with running servers.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from arrows import OUTSIDE, feature_of

WORSE_OR_BETTER = "raise no figure of tests/measures.py, and lower what is better now"

PACKAGE = Path(__file__).parents[1] / "src" / "carpool"

# By process layout: files and lines of the package that all processes of a server of one plain ONNX model
# have loaded after 20 requests. The goals are 200 files with 38,000 lines, and 43,000 lines with gRPC.
LOADED: Mapping[str, tuple[int, int]] = {"HTTP": (214, 39_200), "HTTP and gRPC": (231, 44_450)}
LINES_UNSAID = 400
"""So many lines fewer than LOADED says are no failure: files change for other reasons, too."""

# By record: its fields. The goals are 8, 10, 10 and 20.
FIELDS: Mapping[str, int] = {"Ask": 8, "ModelEntry": 10, "Catalog": 10, "Work": 20}

# Groups of files that import each other, type-only imports included.
CIRCLES = 0

# By feature: the server's files with its words in identifiers. The goal is 0.
NAMED: Mapping[str, int] = {}

WORDS: Mapping[str, str] = {
    "cache": "cache caches cached caching",
    "cameras": "camera cameras",
    "cascades": "cascade cascades",
    "deploy": "helm kubernetes",
    "drift": "drift drifts",
    "ensembles": "ensemble ensembles",
    "pipelines": "pipeline pipelines",
    "ray": "ray",
    "recording": "recording",
    "registry": "registry registries mlflow",
    "rollout": "rollout rollouts canary shadow mirror mirrors mirrored mirroring candidate candidates",
    "sequences": "sequence sequences sequenced",
    "spare work": "spare",
    "streams": "decoupled generate",
    "text": "chat tokenizer transformers",
    "torch": "torch",
    "torchserve": "torchserve mar",
    "tracing": "trace traces tracer tracing otel span spans",
}
"""By feature, the words that name it."""

ALLOWED = {
    *("Sequence", "MutableSequence"),  # of collections.abc
    *("cache", "lru_cache", "cache_clear", "cached_property"),  # of functools
    *("path_importer_cache", "use_listings_cache"),  # of sys and of fsspec
    *("cache_dir", "cache_secret"),  # the folder of everything that a server retains
    *("trace", "trace_context", "TraceContext"),  # of the W3C, and of Python's own tools
    *("span", "trace_id", "span_id"),  # of the W3C and of OpenMetrics; Python's matches have a `span`, too
    *("InferenceTrace", "_trace"),  # of Triton's Python models
    *("TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END"),
    "using_decoupled_model_transaction_policy",
    *("decoupled", "sequence_id", "sequence_start", "sequence_end", "sequence_batching"),  # Triton's
    *("ensemble_scheduling", "trace_setting", "TraceSetting", "response_cache"),
}
"""Identifiers that others gave."""

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def file_of(module: str) -> Path | None:
    """Returns the file of a module of the package, if it has one."""
    path = PACKAGE.parent / module.replace(".", "/")
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def of_the_server() -> Iterator[Path]:
    """Yields the files that every model's requests may pass: no feature's, none of pictures, no verb's."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = str(path.relative_to(PACKAGE))
        if not inside.startswith(("extensions/", "vision/", *OUTSIDE)) and not feature_of(inside):
            yield path


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), *([other] if other else ()))
            case ast.ImportFrom(module=str(name)):
                yield from name.split(".")


def features_in(names: Iterator[str]) -> set[str]:
    """Returns the features that identifiers name."""
    parts = {part.lower() for name in names if name not in ALLOWED for part in _PARTS.findall(name)}
    return {feature for feature, words in WORDS.items() if parts & set(words.split())}


def named() -> dict[str, list[str]]:
    """Returns by feature the server's files that name it."""
    found: dict[str, list[str]] = {feature: [] for feature in WORDS}
    for path in of_the_server():
        for feature in features_in(identifiers(ast.parse(path.read_text("utf-8")))):
            found[feature].append(str(path.relative_to(PACKAGE)))
    return {feature: files for feature, files in found.items() if files}


def fields() -> dict[str, int]:
    from carpool.engine.run.batch import Work
    from carpool.link.catalog import Catalog, ModelEntry
    from carpool.link.engine_client import Ask

    slots = [name for kind in Work.__mro__ for name in kind.__dict__.get("__slots__", ())]
    return {
        "Ask": len(Ask._fields),
        "ModelEntry": len(dataclasses.fields(ModelEntry)),
        "Catalog": len(dataclasses.fields(Catalog)),
        "Work": len(slots),
    }
