"""Writes what can be read of a server: the v2 protocol's documents, which HTTP and gRPC share, as pure
functions of the catalogue; and what the console polls, of the shared counters and of the profiles that
are on display."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

import orjson

from carpool import __version__
from carpool.errors import CarpoolError, InvalidInput, NotFound
from carpool.link.catalog import Catalog, IndexEntry, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.observe.counters import MODEL_ROWS, Cells, Table
from carpool.observe.shared_history import KEPT_S
from carpool.observe.statistics import (
    BOUNDS,
    model_counts,
    server_counts,
    step_counts,
)
from carpool.types import TensorSpec
from carpool.wire.head import shorten

Document = dict[str, Any]
Shown: TypeAlias = Callable[[ModelEntry, Cells | None], tuple[Document, Document]]
"""Returns what extensions show of a version, and of its counters."""

EXTENSIONS = (
    "classification",
    "sequence",
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
_FRESH_S = 0.5  # however many pages are open, the counters are summed twice a second at most
_LONGEST_REASON = 300
_MOST_MODELS = MODEL_ROWS
_PROFILE_FRESH_S = 1.5
_PATIENCE_S = 5.0
_MOST_KEPT = 64  # models that pages looked at last

_Known: TypeAlias = tuple[int, str, str]
"""A model's key, name and version: an engine that was restarted gives the same keys to others."""


def server_metadata(version: str, catalog: Catalog) -> Document:
    extensions = [*EXTENSIONS, *catalog.server.extensions]
    return {"name": catalog.server.name, "version": version, "extensions": extensions}


def health(catalog: Catalog, *, ready: bool) -> Document:
    return {"ready": ready, "models": sorted(catalog.newest)}


def picture_tasks(catalog: Catalog) -> dict[str, str]:
    """Returns the task of every model that takes pictures, by name, in the order in which they were
    configured."""
    return {
        line.name: str(entry.vision["task"])
        for line in catalog.index
        if (entry := catalog.newest.get(line.name)) is not None and entry.vision is not None
    }


def promises(catalog: Catalog) -> dict[str, float]:
    """What each model promises, in milliseconds, where it promises: a promise may have grown at loading."""
    return {
        name: entry.batching.slo * 1e3
        for name, entry in catalog.newest.items()
        if entry.batching.slo is not None
    }


def assumptions(catalog: Catalog) -> dict[str, str]:
    """Returns what nothing says about how models see pixels, by name, for those of which something is
    missing."""
    found = {name: (entry.vision or {}).get("assumed", ()) for name, entry in catalog.newest.items()}
    return {name: ", ".join(keys) for name, keys in found.items() if keys}


def unbatched(catalog: Catalog) -> dict[str, str]:
    """Returns why the requests of models never share a batch, by name, where no setting says so."""
    return {name: why for name, entry in catalog.newest.items() if (why := entry.signature.unbatched)}


def versions_of(catalog: Catalog) -> dict[str, str]:
    """Returns the versions that are served of each model, by name, as a person reads them."""
    return {name: ", ".join(served_versions(catalog, name)) for name in catalog.newest}


def failures(catalog: Catalog) -> dict[str, str]:
    """Returns why models that should serve do not, by name."""
    return {
        line.name: line.reason
        for line in catalog.index
        if line.name not in catalog.newest and line.word == "failed"
    }


def model_metadata(catalog: Catalog, entry: ModelEntry) -> Document:
    signature = entry.signature
    return {
        "name": entry.name,
        "versions": served_versions(catalog, entry.name),
        "platform": entry.published.platform,
        "inputs": _tensors(signature.inputs, signature.max_batch),
        "outputs": _tensors(signature.outputs, signature.max_batch),
    }


def model_config(_catalog: Catalog, entry: ModelEntry) -> Document:
    """Returns its settings, with what was chosen for it at loading and why as a parameter more."""
    if not entry.published.choices:
        return dict(entry.published.config)
    why = {"carpool_choices": {"string_value": "\n".join(entry.published.choices)}}
    return {**entry.published.config, "parameters": {**entry.published.config.get("parameters", {}), **why}}


def served_versions(catalog: Catalog, name: str) -> list[str]:
    versions = [version for model, version in catalog.entries if model == name]
    return sorted(versions, key=lambda version: (len(version), version))  # numbers in their order


def region_status(catalog: Catalog, name: str = "", owner: str = "") -> list[Document]:
    """Returns one registered region of shared memory, or all of them that this holder of a key registered."""
    found: list[Document] = [
        {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
        for region in catalog.regions.values()
        if region.owner == owner and name in ("", region.name)
    ]
    if name and not found:
        raise NotFound(f"Unable to find system shared memory region: {shorten(name)}")
    return found


def index(lines: Iterable[IndexEntry], *, only_ready: bool) -> list[Document]:
    """The repository index; a reason is given only where there is one, as in Triton."""
    return [_index_line(line) for line in lines if line.state == _READY or not only_ready]


def wants_only_ready(body: bytes | bytearray) -> bool:
    """Returns what the body of an index request asks for; it may be empty."""
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


class LivePage:
    """Writes the live page of one front end. What it says is at most half a second old."""

    def __init__(self, table: Table, shown: Shown | None = None) -> None:
        """`shown` says what extensions show."""
        self._table = table
        self._shown = shown
        self._started = time.monotonic()
        self._made_at = -_FRESH_S
        self._made = b""

    def read(self, engine: EngineClient) -> bytes:
        now = time.monotonic()
        if now - self._made_at >= _FRESH_S:
            self._made = orjson.dumps(self.document(engine, now))
            self._made_at = now
        return self._made

    def document(self, engine: EngineClient, now: float) -> Document:
        catalog = engine.catalog
        lines = sorted(catalog.index, key=lambda line: (line.name, len(line.version), line.version))
        counts = {(row.model, row.version): row.cells for row in self._table.models()}
        steps: dict[tuple[str, str], list[Document]] = {}
        for row in self._table.steps():
            steps.setdefault((row.model, row.version), []).append(step_counts(row.step, row.cells))
        models = []
        for line in lines[:_MOST_MODELS]:
            cells = counts.get((line.name, line.version))
            known = None if cells is None else model_counts(cells)
            own: Document = {"steps": listed} if (listed := steps.get((line.name, line.version))) else {}
            entry = catalog.entries.get((line.name, line.version))
            if entry is not None and self._shown is not None:
                of_version, of_counters = self._shown(entry, cells)
                own |= of_version
                known = None if known is None else known | of_counters
            models.append(_model(catalog, line) | {"counts": known} | own)
        return {
            "time": time.time(),
            "clock": now,  # monotonic: what rates are taken over
            "bounds": BOUNDS,
            "server": {
                "version": __version__,
                "uptime_s": round(now - self._started, 3),
                "ready": engine.serving and catalog.ready and catalog.able,
                "serving": engine.serving,
                "loading": catalog.server.loading,
                **server_counts(self._table.server()),
            },
            "models": models,
            "left_out": max(0, len(lines) - _MOST_MODELS),
        }


def with_profile(page: bytes, profile: Document | None) -> bytes:
    """Returns the same page with the profile of the one model that a client displays. The rest of the page is
    shared, and written once."""
    return b'%b,"profile":%b}' % (page[:-1], orjson.dumps(profile))


def with_history(page: bytes, table: Table, after: int, *, senders: bool) -> bytes:
    """Returns the same page with the points since then, for a client that has the earlier ones."""
    points = b",".join(point for _, point in table.history.read(after, with_senders=senders))
    return b'%b,"history":[%b]}' % (page[:-1], points)


def history(table: Table, after: int, seconds: int, *, senders: bool) -> bytes:
    """Returns the points after that number, of so many seconds at most. They are JSON already."""
    points = table.history.read(after, with_senders=senders)
    newest = points[-1][0] if points else 0
    shown = b",".join(point for number, point in points if number > newest - seconds)
    return b'{"every_s":1,"kept_s":%d,"bounds":%b,"points":[%b]}' % (KEPT_S, orjson.dumps(BOUNDS), shown)


def _model(catalog: Catalog, line: IndexEntry) -> dict[str, Any]:
    """Returns a line of the index, with what is known about it once it serves."""
    said = {"name": line.name, "version": line.version, "state": line.state}
    reason = line.reason[:_LONGEST_REASON]
    entry = catalog.entries.get((line.name, line.version))
    if entry is None:
        return {**said, "reason": reason}
    return {
        **said,
        "reason": reason,
        "newest": catalog.newest.get(entry.name) is entry,
        "task": task_of(entry),
        "ask": entry.published.ask,
        "assumed": list((entry.vision or {}).get("assumed", ())),
        "platform": entry.published.platform,
        "mode": entry.batching.mode,
        "slo_ms": None if entry.batching.slo is None else round(entry.batching.slo * 1e3, 3),
        "max_batch": entry.signature.max_batch,
        "choices": list(entry.published.choices),
    }


def task_of(entry: ModelEntry) -> str | None:
    """Returns what the model does with a picture; None for one that takes only tensors."""
    return None if entry.vision is None else str(entry.vision["task"])


def labels_of(entry: ModelEntry) -> Sequence[str]:
    """Returns the names of a model's classes in their order; empty where they have only numbers."""
    labels: Sequence[str] = (entry.vision or {}).get("labels") or ()
    return labels


@dataclass(slots=True)
class _Watched:
    document: Document | None = None
    asked_at: float = float("-inf")
    asking: asyncio.Task[None] | None = None


class ProfileWatch:
    """Watches profiles for one front end, in its loop's thread. No client waits here: its next poll finds
    what came meanwhile."""

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._watched: dict[_Known, _Watched] = {}  # those that were looked at last are last

    def look(self, name: str, version: str) -> Document | None:
        """Returns what the engine last said of a model that serves; None before it said anything, and of
        others."""
        catalog = self._engine.catalog
        entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
        if entry is None or not self._engine.serving:
            return None
        known = (entry.key, entry.name, entry.version)
        found = self._watched[known] = self._watched.pop(known, _Watched())
        if found.asking is None and self._clock() - found.asked_at >= _PROFILE_FRESH_S:
            found.asked_at = self._clock()
            found.asking = asyncio.get_running_loop().create_task(self._ask(entry, found))
        while len(self._watched) > _MOST_KEPT:
            self._forget(next(iter(self._watched)))
        return found.document

    async def _ask(self, entry: ModelEntry, found: _Watched) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                asked = {"name": entry.name, "version": entry.version}
                found.document = await self._engine.ask("profile", asked)
        except (CarpoolError, TimeoutError):
            found.document = None  # it left meanwhile, or the engine did: better nothing than what was
        finally:
            found.asking = None

    def _forget(self, known: _Known) -> None:
        task = self._watched.pop(known).asking
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for known in list(self._watched):
            self._forget(known)
