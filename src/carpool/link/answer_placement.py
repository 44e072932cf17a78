"""The way of one answer into its slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import mmap

import numpy as np
import orjson

from carpool.errors import CarpoolError, ModelError
from carpool.link.records import AS_DECLARED, INLINE, LISTED
from carpool.link.served_template import ServedTemplate
from carpool.memory.places import Place, end_of, line_up
from carpool.types import DATATYPES, Array, Signature, Tensor
from carpool.wire.codec import to_binary
from carpool.wire.v2 import Buffer

COPIED_AT_ONCE = 64 * 1024
"""Bytes to copy without letting other threads run: shorter than waiting for one's turn again, if they do."""

_NOTHING: Mapping[str, Array] = {}


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
            if size <= COPIED_AT_ONCE and row.flags.c_contiguous:
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
