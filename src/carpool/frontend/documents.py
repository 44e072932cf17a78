"""The v2 protocol's documents, which HTTP and gRPC share, as pure functions of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from carpool.errors import InvalidInput, NotFound
from carpool.link.door import Catalog, IndexEntry, ModelEntry
from carpool.types import TensorSpec
from carpool.wire.head import shorten

Document = dict[str, Any]

EXTENSIONS = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)
"""Only what always works: clients switch features on by this list. The catalogue adds what settings allow."""

_READY = "READY"


def server_metadata(version: str, catalog: Catalog) -> Document:
    extensions = [*EXTENSIONS, *catalog.extensions]
    return {"name": catalog.server_name, "version": version, "extensions": extensions}


def health(catalog: Catalog, *, ready: bool) -> Document:
    return {"ready": ready, "models": sorted(catalog.newest)}


def picture_tasks(catalog: Catalog) -> dict[str, str]:
    """The task of every model that takes pictures, by name, in the order in which they were configured."""
    return {
        line.name: str(entry.vision["task"])
        for line in catalog.index
        if (entry := catalog.newest.get(line.name)) is not None and entry.vision is not None
    }


def promises(catalog: Catalog) -> dict[str, float]:
    """What each model promises, in milliseconds, where it promises: a promise may have grown at loading."""
    return {name: entry.slo * 1e3 for name, entry in catalog.newest.items() if entry.slo is not None}


def model_metadata(catalog: Catalog, entry: ModelEntry) -> Document:
    signature = entry.signature
    return {
        "name": entry.name,
        "versions": served_versions(catalog, entry.name),
        "platform": entry.platform,
        "inputs": _tensors(signature.inputs, signature.max_batch),
        "outputs": _tensors(signature.outputs, signature.max_batch),
    }


def served_versions(catalog: Catalog, name: str) -> list[str]:
    versions = [version for model, version in catalog.entries if model == name]
    return sorted(versions, key=lambda version: (len(version), version))  # numbers in their order


def region_status(catalog: Catalog, name: str = "") -> list[Document]:
    """One registered region of shared memory, or all of them."""
    if name and name not in catalog.regions:
        raise NotFound(f"Unable to find system shared memory region: {shorten(name)}")
    return [
        {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
        for region in catalog.regions.values()
        if name in ("", region.name)
    ]


def index(lines: Iterable[IndexEntry], *, only_ready: bool) -> list[Document]:
    """The repository index; a reason is given only where there is one, as in Triton."""
    return [_index_line(line) for line in lines if line.state == _READY or not only_ready]


def wants_only_ready(body: bytes | bytearray) -> bool:
    """What the body of an index request asks for; it may be empty."""
    if not body.strip():
        return False
    try:
        document = orjson.loads(memoryview(body))
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request is not valid JSON: {error.msg}", field="body") from None
    ready = document.get("ready", False) if type(document) is dict else None
    if type(ready) is not bool:
        raise InvalidInput('the request must be like {"ready": true}', field="ready")
    return ready


def _tensors(specs: Sequence[TensorSpec], max_batch: int) -> list[Document]:
    return [
        {"name": spec.name, "datatype": spec.datatype.value, "shape": spec.full_shape(max_batch)}
        for spec in specs
    ]


def _index_line(line: IndexEntry) -> Document:
    if not line.state:
        return {"name": line.name}  # never loaded
    document = {"name": line.name, "version": line.version, "state": line.state}
    if line.reason:
        document["reason"] = line.reason
    return document
