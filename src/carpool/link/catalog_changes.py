"""Writes and reads catalogues on a link: whole for a front end that has just connected, else what changed.

The engine writes each entry once and keeps its JSON; the fields beside the entries are written when their
JSON is another than the last time. A catalogue is a few records in a row: pieces with entries, and a last one
that makes them count. So one large model costs the others nothing when any is loaded, and nothing is parsed
that is known already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import orjson

from carpool.link.catalog import (
    Batching,
    Catalog,
    IndexEntry,
    ModelEntry,
    PublishedModel,
    PublishedServer,
    Traits,
)
from carpool.link.records import CATALOG, CATALOG_PIECE, OK, ProtocolError, to_frontend
from carpool.memory.client_files import Region
from carpool.types import DATATYPES, MAX_ASKED_CLASSES, Signature, TensorSpec

PIECE_BYTES = 1 << 18
"""Of entries in one record. Between two of them a front end does other work."""
_FIELDS = tuple(each.name for each in fields(Catalog) if each.name != "number")


class CatalogWriter:
    """Writes for all front ends of one engine, each of which gets everything from the whole it began with."""

    def __init__(self, catalog: Catalog) -> None:
        self._number = 0
        self._entries: dict[int, tuple[ModelEntry, bytes]] = {}
        self._fields: dict[str, bytes] = {}  # as they were written last: what is in them may be changed
        self.change(catalog)

    def change(self, catalog: Catalog) -> bytes:
        """Returns the records that make the catalogue before this one into it."""
        before, self._number = self._number, catalog.number
        entries = _entries_of(catalog)
        gone = [key for key in self._entries if key not in entries]
        for key in gone:
            del self._entries[key]
        changed: list[int] = []
        for key, entry in entries.items():
            known = self._entries.get(key)
            if known is None or known[0] is not entry:
                self._entries[key] = entry, _json(entry)
                changed.append(key)
        written = {name: _json(_field(catalog, name)) for name in _FIELDS}
        other = {name: text for name, text in written.items() if self._fields.get(name) != text}
        self._fields = written
        return self._records(before, changed, gone, other)

    def whole(self) -> bytes:
        """Returns the records for a front end that knows nothing yet."""
        return self._records(0, self._entries, (), self._fields)

    def _records(
        self, after: int, keys: Iterable[int], gone: Sequence[int], written: Mapping[str, bytes]
    ) -> bytes:
        pieces = list(_pieces(self._entries[key][1] for key in keys))
        last = pieces.pop() if pieces else b"[]"
        said = b",".join(b'"%b":%b' % (name.encode(), text) for name, text in written.items())
        end = b'{"after":%d,"gone":%b,"known":%b,"fields":{%b}}' % (after, _json(gone), last, said)
        number = self._number
        records = [to_frontend(CATALOG_PIECE, number, OK, piece) for piece in pieces]
        return b"".join((*records, to_frontend(CATALOG, number, OK, end)))


def _pieces(written: Iterable[bytes]) -> Iterator[bytes]:
    """Yields JSON lists of entries, each as long as a record may be, or of one entry that is longer."""
    waiting: list[bytes] = []
    size = 0
    for entry in written:
        if waiting and size + len(entry) > PIECE_BYTES:
            yield b"[%b]" % b",".join(waiting)
            waiting, size = [], 0
        waiting.append(entry)
        size += len(entry)
    if waiting:
        yield b"[%b]" % b",".join(waiting)


def _entries_of(catalog: Catalog) -> dict[int, ModelEntry]:
    listed = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
    return {entry.key: entry for entry in listed}


def _field(catalog: Catalog, name: str) -> Any:
    """Returns what is written of it: entries by their keys."""
    if name == "entries":
        return [entry.key for entry in catalog.entries.values()]
    if name == "newest":
        return {model: entry.key for model, entry in catalog.newest.items()}
    if name == "leaving":
        return [entry.key for entry in catalog.leaving]
    return getattr(catalog, name)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=tuple)


class CatalogReader:
    """Reads what one engine writes. Entries that did not change stay the very objects: parsed heads and
    templates hang on to them."""

    def __init__(self) -> None:
        self._number = 0
        self._entries: dict[int, ModelEntry] = {}
        self._fresh: dict[int, ModelEntry] = {}  # they count when all of them are there
        self._fields: dict[str, Any] = {}

    def piece(self, payload: bytes) -> None:
        """Reads some of the entries."""
        self._read(orjson.loads(payload))

    def end(self, number: int, payload: bytes) -> Catalog:
        """Returns the catalogue of this number. Raises `ProtocolError` where it follows one that is not
        known."""
        document = orjson.loads(payload)
        if document["after"] != self._number:
            raise ProtocolError(f"catalogue {number} follows {document['after']}, not {self._number}")
        self._read(document["known"])
        self._entries.update(self._fresh)
        self._fresh = {}
        for key in document["gone"]:
            del self._entries[key]
        self._fields.update(document["fields"])
        self._number = number
        return self._made()

    def _read(self, listed: Iterable[dict[str, Any]]) -> None:
        for one in listed:
            known = self._entries.get(one["key"])
            is_same = known is not None and _compared(known) == _compared_in(one)
            self._fresh[one["key"]] = known if known is not None and is_same else _read_entry(one)

    def _made(self) -> Catalog:
        entries, said = self._entries, self._fields
        served = [entries[key] for key in said["entries"]]
        made = {
            "number": self._number,
            "entries": {(entry.name, entry.version): entry for entry in served},
            "newest": {name: entries[key] for name, key in said["newest"].items()},
            "leaving": [entries[key] for key in said["leaving"]],
            "index": [IndexEntry(*line) for line in said["index"]],
            "down": frozenset(said["down"]),
            "server": PublishedServer(**said["server"]),
            "regions": {name: Region(**region) for name, region in said["regions"].items()},
        }
        return Catalog(**{**said, **made})


def _compared(entry: ModelEntry) -> tuple[object, ...]:
    """Returns what may change of a version under its key."""
    return entry.published.config, list(entry.published.choices), entry.extra


def _compared_in(listed: Mapping[str, Any]) -> tuple[object, ...]:
    published = listed["published"]
    return published["config"], published["choices"], listed["extra"]


def _read_entry(listed: dict[str, Any]) -> ModelEntry:
    signature = listed["signature"]
    inputs, outputs = (_read_specs(signature[side]) for side in ("inputs", "outputs"))
    listed["signature"] = Signature(
        *(signature["model"], inputs, outputs, signature["max_batch"], signature["told"]),
        *(_classes(listed), signature["unbatched"]),
    )
    read = {
        "batching": Batching(**listed["batching"]),
        "traits": Traits(**listed["traits"]),
        "published": PublishedModel(**listed["published"]),
        "row": tuple(listed["row"]),
    }
    return ModelEntry(**{**listed, **read})


def _classes(listed: Mapping[str, Any]) -> int:
    """Returns how many may be asked for of an output."""
    return max((MAX_ASKED_CLASSES, *map(len, listed["published"]["labels"].values())))


def _read_specs(listed: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(spec["name"], DATATYPES[spec["datatype"]], tuple(spec["shape"]), spec["optional"])
        for spec in listed
    )
