"""What the console polls: catalogue and shared counters in one document, without asking the engine."""

from __future__ import annotations

import time
from typing import Any

import orjson

from carpool import __version__
from carpool.frontend.documents import Document
from carpool.link.door import Catalog, Door, IndexEntry, ModelEntry
from carpool.observe.counters import MODEL_ROWS, Table
from carpool.observe.statistics import BOUNDS, model_counts, server_counts

_FRESH_S = 0.5  # however many pages are open, the counters are summed twice a second at most
_LONGEST_REASON = 300
_MOST_MODELS = MODEL_ROWS


class LivePage:
    """One per front end. What it says is at most half a second old."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._started = time.monotonic()
        self._made_at = -_FRESH_S
        self._made = b""

    def read(self, door: Door) -> bytes:
        now = time.monotonic()
        if now - self._made_at >= _FRESH_S:
            self._made = orjson.dumps(self.document(door, now))
            self._made_at = now
        return self._made

    def document(self, door: Door, now: float) -> Document:
        catalog = door.catalog
        lines = sorted(catalog.index, key=_by_name)
        counts = {(row.model, row.version): row.cells for row in self._table.models()}
        models = []
        for line in lines[:_MOST_MODELS]:
            cells = counts.get((line.name, line.version))
            known = None if cells is None else model_counts(cells)
            models.append(_model(catalog, line) | {"counts": known})
        return {
            "time": time.time(),
            "clock": now,  # monotonic: what rates are taken over
            "bounds": BOUNDS,
            "server": {
                "version": __version__,
                "uptime_s": round(now - self._started, 3),
                "ready": door.serving and catalog.ready and catalog.able,
                "serving": door.serving,
                **server_counts(self._table.server()),
            },
            "models": models,
            "left_out": max(0, len(lines) - _MOST_MODELS),
        }


def with_profile(page: bytes, profile: Document | None) -> bytes:
    """The same page for somebody who looks at one model: the rest of it is shared, and written once."""
    return b'%b,"profile":%b}' % (page[:-1], orjson.dumps(profile))


def _by_name(line: IndexEntry) -> tuple[str, int, str]:
    return line.name, len(line.version), line.version  # numbers in their order


def _model(catalog: Catalog, line: IndexEntry) -> dict[str, Any]:
    """A line of the index, with what is known about it once it serves."""
    said = {"name": line.name, "version": line.version, "state": line.state}
    reason = line.reason[:_LONGEST_REASON]
    entry = catalog.entries.get((line.name, line.version))
    if entry is None:
        return {**said, "reason": reason}
    return {
        **said,
        "reason": reason,
        "newest": catalog.newest.get(entry.name) is entry,
        "task": _task(entry),
        "platform": entry.platform,
        "mode": entry.mode,
        "slo_ms": None if entry.slo is None else round(entry.slo * 1e3, 3),
        "max_batch": entry.signature.max_batch,
        "choices": list(entry.choices),
    }


def _task(entry: ModelEntry) -> str | None:
    """What the model does with a picture; None for one that takes only tensors."""
    return None if entry.vision is None else str(entry.vision["task"])
