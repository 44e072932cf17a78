"""The engine's copy of a template, checked against the model, and the way of one answer into its slot."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import orjson

from carpool.engine.work import ENCODED
from carpool.errors import CarpoolError, ModelError
from carpool.servers.door import ModelEntry
from carpool.servers.link.places import Place, declared_places, end_of, line_up
from carpool.servers.link.records import (
    AS_DECLARED,
    INLINE,
    LISTED,
    MAX_SOURCE_CHARS,
    MAX_TEMPLATE_BYTES,
    ProtocolError,
)
from carpool.servers.slot_files import FILE_AT, bind_file
from carpool.types import DATATYPES, Array, Datatype, RequestedOutput, RequestOptions, Signature, Tensor
from carpool.wire.tensors import to_binary
from carpool.wire.v2 import Buffer, RequestHead, TensorHead, bind, check_head

_COPIED_AT_ONCE = 64 * 1024
"""Bytes to copy without letting other threads run: shorter than waiting for one's turn again, if they do."""

_CHECKED = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these


_NOTHING: Mapping[str, Array] = {}


class ServedTemplate:
    """What the requests of one family have in common. `entry` is None when its model is not served now."""

    def __init__(self, document: Mapping[str, Any], entry: ModelEntry | None) -> None:
        self.key: int = document["key"]
        self.entry = entry
        self.heads = [_read_tensor(listed) for listed in document["inputs"]]
        self.extent = max((head.offset + head.size for head in self.heads), default=0)
        self.plain = not any(head.datatype in _CHECKED for head in self.heads)
        self.arrays = [(head.name, head.shape, head.datatype.dtype, head.offset) for head in self.heads]
        self.wanted: tuple[str, ...] = tuple(document["wanted"])
        self.priority: int = document["priority"]
        self.timeout: float = document["timeout"]
        self.source: str = document["source"]
        self.latest: bool = document["latest"]
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


def read_template(payload: bytes, entries: Mapping[int, ModelEntry]) -> ServedTemplate:
    """Believes nothing: whatever is wrong with it is a `ProtocolError`."""
    try:
        if len(payload) > MAX_TEMPLATE_BYTES:
            raise ValueError("it is too long")
        document = orjson.loads(payload)
        _check_options(document)
        return ServedTemplate(document, entries.get(document["key"]))
    except (KeyError, TypeError, ValueError, OverflowError, CarpoolError) as error:
        raise ProtocolError(f"a template that cannot be right: {error}") from error


def _check_options(document: Mapping[str, Any]) -> None:
    if type(document["key"]) is not int or type(document["priority"]) is not int or document["priority"] < 0:
        raise ValueError("key or priority")
    timeout, source = document["timeout"], document["source"]
    if type(timeout) is not float or not 0.0 <= timeout < math.inf:
        raise ValueError("timeout")
    if type(source) is not str or len(source) > MAX_SOURCE_CHARS:
        raise ValueError("source")
    if type(document["latest"]) is not bool:
        raise ValueError("latest")
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
    if not any(-1 in spec.shape for spec in signature.inputs):
        return None
    return tuple(sorted((head.name, head.shape[1:] if signature.max_batch else head.shape) for head in heads))


class Placement:
    """Copies one request's outputs to where its front end reads them. Runs in the model's thread.

    Nothing that is wrong with an output leaves it as an exception: the others of the batch have no part in
    it. `error` then holds what the client is told.
    """

    __slots__ = (
        "_busy",
        "_capacity",
        "_closed",
        "_memory",
        "_most",
        "_offset",
        "_template",
        "call",
        "error",
        "form",
        "payload",
    )

    def __init__(
        self, call: int, template: ServedTemplate, memory: mmap, offset: int, capacity: int, most: int
    ) -> None:
        self.call = call
        self._template = template
        self._memory = memory
        self._offset = offset
        self._capacity = capacity
        self._most = most
        self.form: int | None = None  # None until it ran
        self.payload = b""
        self.error: CarpoolError | None = None
        self._busy = False
        self._closed = False

    def close(self) -> bool:
        """Nothing may be written from here on; False while the model's thread still does.

        A batch that took too long is answered while its thread lives, and by the time that thread comes back
        the memory can be another's. Each side says what it does before it looks at the other: no lock.
        """
        self._closed = True
        return not self._busy

    def __call__(self, rows: Mapping[str, Array]) -> Mapping[str, Array]:
        """Always nothing: what was to be answered is on its way to the front end."""
        self._busy = True
        try:
            if not self._closed and not self._copied_as_declared(rows):
                self._copy_as_found(rows)
        except CarpoolError as error:
            self.error = error
        except Exception as error:  # whatever a model's code left in an array
            self.error = ModelError(f"the model's outputs cannot be sent: {error}")
        finally:
            self._busy = False
        return _NOTHING

    def _copied_as_declared(self, rows: Mapping[str, Array]) -> bool:
        places = self._template.places
        if places is None or not self._capacity:
            return False
        memory = self._memory
        for name, datatype, shape, offset, size in places:
            row = rows.get(name)
            if row is None or row.shape != shape or row.dtype != datatype.dtype:
                return False
            if offset + size > self._capacity:
                return False
            start = self._offset + offset
            if size <= _COPIED_AT_ONCE and row.flags.c_contiguous:
                memory[start : start + size] = row.data
            else:
                np.ndarray(shape, datatype.dtype, memory, start)[...] = row
        self.form = AS_DECLARED
        return True

    def _copy_as_found(self, rows: Mapping[str, Array]) -> None:
        entry = self._template.entry
        assert entry is not None  # else it was not submitted
        tensors = [_tensor(name, rows, entry.signature) for name in self._template.outputs]
        buffers = [to_binary(tensor) for tensor in tensors]
        places = line_up(
            (tensor.name, tensor.datatype, tensor.shape, len(buffer))
            for tensor, buffer in zip(tensors, buffers, strict=True)
        )
        if end_of(places) <= self._capacity:
            self._write(places, buffers)
        else:
            self._send_along(places, buffers)

    def _write(self, places: Sequence[Place], buffers: Sequence[Buffer]) -> None:
        view = memoryview(self._memory)
        for place, buffer in zip(places, buffers, strict=True):
            start = self._offset + place.offset
            view[start : start + place.size] = buffer
        self.payload = _listed(places)
        self.form = LISTED

    def _send_along(self, places: Sequence[Place], buffers: Sequence[Buffer]) -> None:
        size = end_of(places)
        if size > self._most:
            raise ModelError(f"the outputs take {size} bytes, more than the {self._most} that an answer may")
        head = _listed(places)
        payload = bytearray(len(head).to_bytes(4, "little") + head)
        for place, buffer in zip(places, buffers, strict=True):
            payload += bytes(4 + len(head) + place.offset - len(payload))
            payload += buffer
        self.payload = bytes(payload)
        self.form = INLINE


def _tensor(name: str, rows: Mapping[str, Array], signature: Signature) -> Tensor:
    row = rows.get(name)
    owner = f"output '{name}'"
    if row is None:
        raise ModelError(f"the model gave no {owner}", field=owner)
    datatype = signature.output_named[name].datatype
    if row.dtype != datatype.dtype:
        raise ModelError(f"{owner} is {row.dtype}, but {datatype.value} was declared", field=owner)
    return Tensor(name, datatype, row.shape, row)


def _listed(places: Sequence[Place]) -> bytes:
    return orjson.dumps([(p.name, p.datatype.value, p.shape, p.offset, p.size) for p in places])


def read_places(payload: bytes | memoryview) -> list[Place]:
    """The front end's side of `_listed`."""
    return [
        Place(name, DATATYPES[datatype], tuple(shape), offset, size)
        for name, datatype, shape, offset, size in orjson.loads(payload)
    ]
