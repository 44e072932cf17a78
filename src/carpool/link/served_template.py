"""The engine's copy of a template, checked against the model; a model's own process has one too."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from mmap import mmap
from typing import Any

import numpy as np
import orjson

from carpool.errors import CarpoolError
from carpool.link.door import ModelEntry
from carpool.link.records import MAX_TEMPLATE_BYTES, ProtocolError
from carpool.memory.places import Place, declared_places
from carpool.memory.slot_files import ENCODED, FILE_AT, bind_file
from carpool.types import DATATYPES, Array, Datatype, RequestedOutput, RequestOptions, Signature
from carpool.wire.v2 import RequestHead, TensorHead, bind, check_head

_CHECKED = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these

_identities = count(1)


class ServedTemplate:
    """What the requests of one family have in common. `entry` is None when its model is not served now."""

    def __init__(self, document: Mapping[str, Any], entry: ModelEntry | None, payload: bytes) -> None:
        self.key: int = document["key"]
        self.identity = next(_identities)
        self.payload = payload  # what it was read from, for a process that has to know it too
        self.entry = entry
        self.heads = [_read_tensor(listed) for listed in document["inputs"]]
        self.extent = max((head.offset + head.size for head in self.heads), default=0)
        self.plain = not any(head.datatype in _CHECKED for head in self.heads)
        self.arrays = [(head.name, head.shape, head.datatype.dtype, head.offset) for head in self.heads]
        self.wanted: tuple[str, ...] = tuple(document["wanted"])
        self.encoded: bool = document["encoded"]
        self.images = 1
        self.shape: Hashable = None
        self.outputs: list[str] = []
        self.places: list[Place] | None = None
        if entry is not None:
            self._fit(entry.signature)

    def _fit(self, signature: Signature) -> None:
        """The same check that the front end has made: a batch is no place to find out that it was not."""
        if self.encoded:
            self._fit_file(signature)
            return
        if len({head.name for head in self.heads}) != len(self.heads):
            raise ValueError("an input twice")
        requested = [RequestedOutput(name, binary=True) for name in self.wanted]
        head = RequestHead("", self.heads, requested, RequestOptions(), True, self.extent)
        self.images = check_head(head, signature).batch
        self.shape = _batch_shape(self.heads, signature)
        self.outputs = list(self.wanted) or [spec.name for spec in signature.outputs]
        self.places = declared_places(signature, self.wanted, self.images)

    def _fit_file(self, signature: Signature) -> None:
        vision = self.entry.vision if self.entry is not None else None
        if vision is None or not vision["encoded"]:
            raise ValueError("the model takes no files")
        if [(head.name, head.offset, head.size) for head in self.heads] != [(vision["input"][0], 0, FILE_AT)]:
            raise ValueError("inputs of a file")
        self.shape = ENCODED
        self.outputs = list(self.wanted) or [spec.name for spec in signature.outputs]
        self.places = declared_places(signature, self.wanted, self.images)

    def bind(self, memory: mmap, offset: int) -> dict[str, Array]:
        """The inputs where they lie. Raises `InvalidInput` for bytes that are no tensor of that type."""
        if self.encoded:
            try:
                return {self.heads[0].name: bind_file(memory, offset)}
            except ValueError as error:
                raise ProtocolError(str(error)) from None
        if self.plain:
            return {
                name: np.ndarray(shape, dtype, memory, offset + start)
                for name, shape, dtype, start in self.arrays
            }
        view = memoryview(memory)[offset : offset + self.extent]
        return {tensor.name: tensor.data for tensor in bind(self.heads, view)}


def read_template(payload: bytes, entry_of: Callable[[int], ModelEntry | None]) -> ServedTemplate:
    """Believes nothing: whatever is wrong with it is a `ProtocolError`."""
    try:
        if len(payload) > MAX_TEMPLATE_BYTES:
            raise ValueError("it is too long")
        document = orjson.loads(payload)
        _check_options(document)
        return ServedTemplate(document, entry_of(document["key"]), payload)
    except (KeyError, TypeError, ValueError, OverflowError, CarpoolError) as error:
        raise ProtocolError(f"a template that cannot be right: {error}") from error


def _check_options(document: Mapping[str, Any]) -> None:
    if type(document["key"]) is not int:
        raise ValueError("key")
    if not all(type(name) is str for name in document["wanted"]):
        raise ValueError("wanted")
    if type(document["encoded"]) is not bool:
        raise ValueError("encoded")


def _read_tensor(listed: Sequence[Any]) -> TensorHead:
    name, datatype, shape, offset, size, framed = listed
    if any(type(number) is not int or number < 0 for number in (*shape, offset, size)):
        raise ValueError(f"shape, offset or size of {name!r}")
    head = TensorHead(name, DATATYPES[datatype], tuple(shape), offset, size, framed=bool(framed))
    if head.datatype is not Datatype.BYTES and size != math.prod(shape) * head.datatype.size:
        raise ValueError(f"size of {name!r}")
    if not framed and head.datatype is Datatype.BYTES and math.prod(shape) != 1:
        raise ValueError(f"shape of {name!r}")
    return head


def _batch_shape(heads: Sequence[TensorHead], signature: Signature) -> Hashable:
    """What must be equal to share a batch; None for a model whose requests are all alike."""
    if not any(spec.optional or -1 in spec.shape for spec in signature.inputs):
        return None
    return tuple(sorted((head.name, head.shape[1:] if signature.max_batch else head.shape) for head in heads))
