"""The engine's catalogue as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import orjson

from carpool.link.door import Catalog, IndexEntry, ModelEntry
from carpool.memory.client_files import Region
from carpool.types import DATATYPES, Signature, TensorSpec


def write_catalog(catalog: Catalog) -> bytes:
    listed = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
    entries = {entry.key: entry for entry in listed}
    document = {
        "ready": catalog.ready,
        "entries": [_entry(entry) for entry in entries.values()],
        "served": [entry.key for entry in catalog.entries.values()],
        "newest": {name: entry.key for name, entry in catalog.newest.items()},
        "index": [tuple(line) for line in catalog.index],
        "leaving": [entry.key for entry in catalog.leaving],
        "down": list(catalog.down),
        "regions": [astuple(region) for region in catalog.regions.values()],
        "logging": catalog.logging,
        "tracing": catalog.tracing,
        "extensions": list(catalog.extensions),
        "server_name": catalog.server_name,
        "loading": catalog.loading,
    }
    return orjson.dumps(document)


def read_catalog(number: int, payload: bytes, known: Mapping[int, ModelEntry]) -> Catalog:
    """`known` are this engine's entries so far. Those that did not change are kept, the very objects: parsed
    heads and templates hang on to them."""
    document = orjson.loads(payload)
    entries = {}
    for listed in document["entries"]:
        key = listed["key"]
        kept = known.get(key)
        unchanged = kept is not None and kept.config == listed["config"]
        entries[key] = kept if kept is not None and unchanged else _read_entry(listed)
    served = [entries[key] for key in document["served"]]
    return Catalog(
        number=number,
        ready=document["ready"],
        entries={(entry.name, entry.version): entry for entry in served},
        newest={name: entries[key] for name, key in document["newest"].items()},
        index=[IndexEntry(*line) for line in document["index"]],
        leaving=[entries[key] for key in document["leaving"]],
        down=frozenset(document["down"]),
        regions={region[1]: Region(*region) for region in document["regions"]},
        logging=document["logging"],
        tracing=document["tracing"],
        extensions=document["extensions"],
        server_name=document["server_name"],
        loading=document["loading"],
    )


def _entry(entry: ModelEntry) -> dict[str, Any]:
    signature = entry.signature
    return {
        "key": entry.key,
        "name": entry.name,
        "version": entry.version,
        "model": signature.model,
        "inputs": [_spec(spec) for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
        "max_batch": signature.max_batch,
        "platform": entry.platform,
        "mode": entry.mode,
        "slo": entry.slo,
        "config": entry.config,
        "labels": {output: list(labels) for output, labels in entry.labels.items()},
        "row": list(entry.row),
        "vision": entry.vision,
        "choices": list(entry.choices),
    }


def _spec(spec: TensorSpec) -> tuple[str, str, tuple[int, ...], bool]:
    return spec.name, spec.datatype.value, spec.shape, spec.optional


def _read_entry(listed: Mapping[str, Any]) -> ModelEntry:
    signature = Signature(
        listed["model"], _read_specs(listed["inputs"]), _read_specs(listed["outputs"]), listed["max_batch"]
    )
    row, generation = listed["row"]
    return ModelEntry(
        key=listed["key"],
        name=listed["name"],
        version=listed["version"],
        signature=signature,
        platform=listed["platform"],
        mode=listed["mode"],
        slo=listed["slo"],
        config=listed["config"],
        labels=listed["labels"],
        row=(row, generation),
        vision=listed["vision"],
        choices=listed["choices"],
    )


def _read_specs(listed: list[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, DATATYPES[datatype], tuple(shape), optional)
        for name, datatype, shape, optional in listed
    )
