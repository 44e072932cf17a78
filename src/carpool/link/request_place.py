"""This module has the way of one answer into its slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import mmap

import numpy as np

from carpool.errors import CarpoolError, ModelError
from carpool.link.records import AS_DECLARED, INLINE, LISTED, MAX_PART_BYTES
from carpool.link.templates import ServedTemplate
from carpool.memory.layout import TensorPlace, end_of, line_up, list_places
from carpool.types import Array, Signature, Tensor
from carpool.wire.codec import to_binary
from carpool.wire.v2 import Buffer

COPIED_AT_ONCE = 64 * 1024
"""Bytes to copy without letting other threads run: shorter than waiting for one's turn again, if they do."""

_OF_STEPS = "ensemble"
_NO_MEMORY = mmap(-1, 1)
_NOTHING: Mapping[str, Array] = {}


class RequestPlace:
    """Describes where one request lies, and the way of its outputs to where its front end reads them.

    An instance in this process calls it, in the model's thread; nothing that is wrong with an output leaves
    it as an exception, since the others of the batch have no part in it: `error` then holds what the client
    is answered with. An instance in the runner sends the numbers there, and notes what comes back.
    """

    __slots__ = (
        "_busy",
        "_closed",
        "arena",
        "call",
        "capacity",
        "error",
        "form",
        "held",
        "memory",
        "most",
        "offset",
        "output",
        "payload",
        "template",
    )

    def __init__(
        self,
        template: ServedTemplate,
        memory: mmap,
        offset: int,
        output: int,
        capacity: int,
        most: int,
        call: int = 0,
        arena: int = 0,
    ) -> None:
        """Inputs from `offset` on, outputs from `output` on for `capacity` bytes; an answer that does not fit
        there may take `most`. `arena` is the number of the memory, for a process that maps it too."""
        self.call = call
        self.template = template
        self.memory = memory
        self.arena = arena
        self.offset = offset
        self.output = output
        self.capacity = capacity
        self.most = most
        self.form: int | None = None  # of the outputs; None until it ran
        self.payload: bytes | bytearray = b""
        self.error: CarpoolError | None = None
        self.held = False  # the runner may still write there; of the loop's thread
        self._busy = False  # written by the thread that runs the batch only
        self._closed = False  # written by the loop's thread only

    def close(self) -> bool:
        """Nothing may be written from here on; False while the runner or the model's thread still does.

        A batch that took too long is answered while its thread lives, and by the time that thread comes back
        the memory can be another's. No lock is needed, since each side says what it does before it looks at
        the other: the thread sets `_busy`, then reads `_closed`; we set `_closed`, then read `_busy`. Under
        the interpreter lock these four happen in one order, and in each at least one side sees the other.
        """
        self._closed = True
        return not (self._busy or self.held)

    def forget(self) -> None:
        """Gives up the memory, which is not needed any more: it goes when its front end does."""
        self._closed = True
        self.memory, self.error = _NO_MEMORY, None

    def __call__(self, rows: Mapping[str, Array]) -> Mapping[str, Array]:
        """Always nothing: what was to be answered is on its way to the front end."""
        self._busy = True
        try:
            if not self._closed and not self._copied_as_declared(rows):
                self._copy_as_found(rows)
        except CarpoolError as error:
            self.error = error
        except Exception as fault:  # whatever a model's code left in an array
            self.error = ModelError(f"the model's outputs cannot be sent: {fault}")
        finally:
            self._busy = False
        return _NOTHING

    def part(self, rows: Mapping[str, Array]) -> bytes:
        """One answer of several, as its record carries it; outputs that it does not have are left out. Raises
        ModelError."""
        names = [name for name in self.template.outputs if name in rows]
        payload = _inline(*self._lined_up(names, rows), min(self.most, MAX_PART_BYTES))
        if len(payload) > MAX_PART_BYTES:  # with the list of them
            raise ModelError(f"the outputs take more than the {MAX_PART_BYTES} bytes that a response may")
        return bytes(payload)

    def _copied_as_declared(self, rows: Mapping[str, Array]) -> bool:
        places = self.template.places
        if places is None or not self.capacity:
            return False
        memory = self.memory
        for name, datatype, shape, offset, size in places:
            row = rows.get(name)
            if row is None or row.shape != shape or row.dtype != datatype.dtype:
                return False
            if offset + size > self.capacity:
                return False
            start = self.output + offset
            if size <= COPIED_AT_ONCE and row.flags.c_contiguous:
                memory[start : start + size] = row.data
            else:
                np.ndarray(shape, datatype.dtype, memory, start)[...] = row
        self.form = AS_DECLARED
        return True

    def _copy_as_found(self, rows: Mapping[str, Array]) -> None:
        entry = self.template.entry
        assert entry is not None  # else it was not submitted
        names = self.template.outputs
        if entry.published.platform == _OF_STEPS:  # its steps may leave some out
            names = [name for name in names if name in rows]
        places, buffers = self._lined_up(names, rows)
        if end_of(places) <= self.capacity:
            self._write(places, buffers)
        else:
            self.payload = _inline(places, buffers, self.most)
            self.form = INLINE

    def _lined_up(
        self, names: Sequence[str], rows: Mapping[str, Array]
    ) -> tuple[Sequence[TensorPlace], Sequence[Buffer]]:
        entry = self.template.entry
        assert entry is not None  # else it was not submitted
        tensors = [_tensor(name, rows, entry.signature) for name in names]
        buffers = [to_binary(tensor) for tensor in tensors]
        places = line_up(
            (tensor.name, tensor.datatype, tensor.shape, len(buffer))
            for tensor, buffer in zip(tensors, buffers, strict=True)
        )
        return places, buffers

    def _write(self, places: Sequence[TensorPlace], buffers: Sequence[Buffer]) -> None:
        view = memoryview(self.memory)
        for place, buffer in zip(places, buffers, strict=True):
            _put(buffer, view, self.output + place.offset)
        self.payload = list_places(places)
        self.form = LISTED


def _put(buffer: Buffer, view: memoryview, start: int) -> None:
    """Copies a long one without the interpreter lock."""
    size = len(buffer)
    if size <= COPIED_AT_ONCE:
        view[start : start + size] = buffer
    else:
        np.frombuffer(view, np.uint8, size, start)[:] = np.frombuffer(buffer, np.uint8)


def put_inline(payload: bytes | bytearray, memory: mmap, start: int) -> bytes:
    """Copies outputs that did not fit their slot to where there is room for them, without the interpreter
    lock. Returns the list of them."""
    first = 4 + int.from_bytes(payload[:4], "little")
    _put(memoryview(payload)[first:], memoryview(memory), start)
    return bytes(payload[4:first])


def inline_size(payload: bytes | bytearray) -> int:
    """Returns how many bytes the outputs in a payload take."""
    return len(payload) - 4 - int.from_bytes(payload[:4], "little")


def _inline(places: Sequence[TensorPlace], buffers: Sequence[Buffer], most: int) -> bytearray:
    head = list_places(places)
    size = end_of(places)
    if size > most:
        raise ModelError(f"the outputs take {size} bytes, more than the {most} that a response may")
    first = 4 + len(head)
    payload = bytearray(first + size)
    payload[:first] = len(head).to_bytes(4, "little") + head
    view = memoryview(payload)
    for place, buffer in zip(places, buffers, strict=True):
        _put(buffer, view, first + place.offset)
    return payload


def _tensor(name: str, rows: Mapping[str, Array], signature: Signature) -> Tensor:
    row = rows.get(name)
    owner = f"output '{name}'"
    if row is None:
        raise ModelError(f"the model gave no {owner}", field=owner)
    datatype = signature.output_named[name].datatype
    if row.dtype != datatype.dtype:
        raise ModelError(f"{owner} is {row.dtype}, but {datatype.value} was declared", field=owner)
    return Tensor(name, datatype, row.shape, row)
