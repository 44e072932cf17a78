"""The inputs of several requests become those of a batch, and its outputs are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np

from carpool.errors import CarpoolError, ModelError, without_stack
from carpool.link.templates import RequestForm
from carpool.memory.client_files import RegionReads
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.wire.strings import unpacked_or_empty


class InExtras(Protocol):
    """Describes what few requests have."""

    @property
    def details(self) -> bytes:
        """Returns the id and parameters of the request in JSON, for a model that receives them."""

    @property
    def reads(self) -> RegionReads | None:
        """Returns where its inputs are, if they are not in the memory of `inputs` yet."""


class InBatch(Protocol):
    """Describes a request as the batch that it is part of sees it."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Returns arrays, or what its backend has made of them (`Gathers.view`); the batch dimension
        included."""

    @property
    def images(self) -> int: ...

    @property
    def form(self) -> RequestForm: ...

    @property
    def extras(self) -> InExtras: ...


class Collator:
    """Gathers inputs into the buffers of one instance and checks what the model answered."""

    def __init__(self, signature: Signature, largest: int) -> None:
        self._signature = signature
        self._largest = largest
        self._buffers: dict[str, Array] = {}

    def gather(self, works: Sequence[InBatch], errors: dict[int, CarpoolError]) -> Mapping[str, Array]:
        """Returns the inputs of these requests, one behind the other along the batch dimension. Those whose
        client has taken its memory away are zeros, and `errors` says so by their index."""
        if len(works) == 1:
            return alone(works[0], 0, errors)
        return {name: self._stack(name, works, errors) for name in works[0].inputs}

    def _stack(self, name: str, works: Sequence[InBatch], errors: dict[int, CarpoolError]) -> Array:
        spec = self._signature.input_named[name]
        if spec.datatype is Datatype.BYTES or -1 in spec.shape:
            return np.concatenate([_fetched(work, name, i, errors) for i, work in enumerate(works)])
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = np.empty((self._largest, *spec.shape), spec.datatype.dtype)
            self._buffers[name] = buffer
        filled = 0
        for index, work in enumerate(works):
            part = work.inputs[name]
            rows = buffer[filled : filled + len(part)]
            if work.extras.reads is None or len(rows) < len(part):  # which no batch has: it raises
                rows[...] = part
            else:  # straight from the client's memory: the one copy there is
                _read(work.extras.reads, name, rows, index, errors)
            filled += len(part)
        return buffer[:filled]

    def check(
        self, outputs: Mapping[str, Array], wanted: Sequence[str], images: int, *, apart: bool = False
    ) -> None:
        """The model's answer must be what was declared: clients rely on it. As in Triton, an answer to one
        request `apart` from others may have an empty output of any shape, where the length is not declared.
        """
        for name in wanted:
            if name not in outputs:
                raise ModelError(f'{self._signature.model} did not return the output "{name}"')
            spec, array = self._signature.output_named[name], outputs[name]
            empty = apart and not array.size and -1 in spec.shape and array.dtype == spec.datatype.dtype
            if not empty:
                self._check_output(spec, array, images)

    def _check_output(self, spec: TensorSpec, array: Array, images: int) -> None:
        batched = self._signature.max_batch > 0
        expected = (images, *spec.shape) if batched else spec.shape
        if array.shape == expected and array.dtype == spec.datatype.dtype:
            return
        fits = len(array.shape) == len(expected) and all(
            want in (-1, got) for want, got in zip(expected, array.shape, strict=True)
        )
        model = self._signature.model
        if not fits:
            raise ModelError(
                f'{model} returned the output "{spec.name}" with shape {list(array.shape)}, but '
                f"{list(expected)} is declared"
            )
        if array.dtype != spec.datatype.dtype:
            declared = spec.datatype.value
            raise ModelError(
                f'{model} returned the output "{spec.name}" as {array.dtype}, declared is {declared}'
            )


def _lies_well(array: Array) -> bool:
    """Runtimes want aligned, contiguous memory; a body received in place may lie at any byte."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def alone(work: InBatch, index: int, errors: dict[int, CarpoolError]) -> dict[str, Array]:
    """The inputs of one request, where they lie if they may; what cannot be read ends it."""
    inputs: dict[str, Array] = {}
    for name, array in work.inputs.items():
        if work.extras.reads is not None or work.form.packed:
            array = _fetched(work, name, index, errors)
            if index in errors:
                break
        inputs[name] = array if _lies_well(array) else array.copy()
    return inputs


def _fetched(work: InBatch, name: str, index: int, errors: dict[int, CarpoolError]) -> Array:
    """Returns an input, in memory of its own if it was in the client's: the slot that was put aside for it
    may be another's by now, if this batch took too long."""
    array: Array = work.inputs[name]
    if work.form.packed:
        return unpacked_or_empty(array, index, errors)
    if work.extras.reads is not None:
        array = np.empty(array.shape, array.dtype)
        _read(work.extras.reads, name, array, index, errors)
    return array


class InTurn(Iterator[Mapping[str, Array]]):
    """The inputs of requests that run one by one: what is copied first is copied when its turn comes, so that
    it is still in the caches when the model reads it. Each copy has memory of its own, which an answer may
    go on using; the allocator gives it that of one before it. Those that cannot be read are left out, and
    `errors` says so by their index.

    Unlike a generator it goes on behind what it raised for. The loop's thread takes the inputs of works only
    from a batch that it has given up: those whose turn is still to come then fail, which is not reported.
    """

    def __init__(self, works: Sequence[InBatch]) -> None:
        self._works = works
        self.next = 0
        self.errors: dict[int, CarpoolError] = {}
        self.copying = 0.0  # seconds

    def __next__(self) -> Mapping[str, Array]:
        while self.next < len(self._works):
            index = self.next
            work = self._works[index]
            self.next = index + 1
            if (
                work.extras.reads is None
                and not work.form.packed
                and all(map(_lies_well, work.inputs.values()))
            ):
                return work.inputs
            start = monotonic()
            inputs = alone(work, index, self.errors)
            self.copying += monotonic() - start
            if index not in self.errors:
                return inputs
        raise StopIteration


def inputs_of(works: Sequence[InBatch], errors: dict[int, CarpoolError]) -> list[Mapping[str, Any]]:
    """Returns the inputs of each of them, wherever they are."""
    return [
        work.inputs
        if work.extras.reads is None and not work.form.packed
        else {name: _fetched(work, name, index, errors) for name in work.inputs}
        for index, work in enumerate(works)
    ]


def _read(reads: RegionReads, name: str, into: Array, index: int, errors: dict[int, CarpoolError]) -> None:
    """Reads one input; what is wrong with one request's memory is no affair of the others in its batch."""
    try:
        reads.into(name, into)
    except CarpoolError as error:
        into.fill(0)
        errors[index] = without_stack(error)
