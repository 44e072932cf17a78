"""The front end's templates: what requests have in common is said to the engine once, then only its number.

Clients repeat themselves and parsed heads are cached, so the same objects come back with almost every
request: the first look goes by their identity. A head that was parsed anew is compared by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import orjson

from carpool.core.front_load import Outside
from carpool.link.door import ModelEntry
from carpool.link.records import MAX_TEMPLATES, RESET, TEMPLATE, to_engine
from carpool.memory.places import Place, declared_places, end_of
from carpool.wire.v2 import RequestHead, TensorHead

_UNKNOWN_OUTPUT_BYTES = 4096  # for a first answer whose size cannot be told

Key: TypeAlias = tuple[int, int, int, bool]
Found: TypeAlias = tuple["Template", object, object]
"""With the objects it was found by: while they are kept, their ids are theirs."""


class Template:
    """One family of requests: how many input bytes they have, and where their outputs will lie."""

    __slots__ = ("capacity", "entry", "extent", "number", "outside", "places")

    def __init__(
        self,
        number: int,
        entry: ModelEntry,
        heads: Sequence[TensorHead],
        head: RequestHead,
        outside: Outside,
    ) -> None:
        self.number = number
        self.entry = entry
        self.outside = outside  # what clients of its model wait beyond the engine's account
        self.extent = max((tensor.offset + tensor.size for tensor in heads), default=0)
        wanted = [output.name for output in head.outputs]
        self.places: list[Place] | None = declared_places(entry.signature, wanted, head.batch)
        self.capacity = _UNKNOWN_OUTPUT_BYTES if self.places is None else end_of(self.places)


class Templates:
    """Those that the engine at the other end of one link knows. `send` takes records for it."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._next = 1
        self._by_identity: dict[Key, Found] = {}
        self._by_value: dict[object, Template] = {}
        self._outside: dict[int, Outside] = {}  # by the model's key: no more than there are templates

    def find(self, entry: ModelEntry, head: RequestHead) -> Template | None:
        """The hot path: nothing for a head that was not learnt, or with an entry of another engine."""
        key = (id(head.inputs), id(head.outputs), entry.key, head.encoded)
        found = self._by_identity.get(key)
        return found[0] if found is not None and found[0].entry is entry else None

    def learn(self, entry: ModelEntry, head: RequestHead) -> Template:
        """For a head whose tensors are all in the tail: found by its objects from now on."""
        template = self.match(entry, head, head.inputs)
        if len(self._by_identity) >= MAX_TEMPLATES:
            self._by_identity.clear()
        key = (id(head.inputs), id(head.outputs), entry.key, head.encoded)
        self._by_identity[key] = (template, head.inputs, head.outputs)
        return template

    def match(self, entry: ModelEntry, head: RequestHead, heads: Sequence[TensorHead]) -> Template:
        """The template with these values; the engine is told when there was none."""
        value = (
            entry.key,
            tuple((t.name, t.datatype, t.shape, t.offset, t.size, t.framed) for t in heads),
            tuple(output.name for output in head.outputs),
            head.encoded,
        )
        template = self._by_value.get(value)
        if template is not None and template.entry is entry:
            return template
        if len(self._by_value) >= MAX_TEMPLATES:
            self._by_identity.clear()
            self._by_value.clear()
            self._outside.clear()
            self._send(to_engine(RESET, 0))
        outside = self._outside.setdefault(entry.key, Outside())
        template = Template(self._next, entry, heads, head, outside)
        self._next += 1
        self._by_value[value] = template
        self._send(to_engine(TEMPLATE, template.number, _describe(entry, head, heads)))
        return template


def _describe(entry: ModelEntry, head: RequestHead, heads: Sequence[TensorHead]) -> bytes:
    document = {
        "key": entry.key,
        "inputs": [(t.name, t.datatype.value, t.shape, t.offset, t.size, t.framed) for t in heads],
        "wanted": [output.name for output in head.outputs],
        "encoded": head.encoded,
    }
    return orjson.dumps(document)
