"""Many requests become one batch, and one answer becomes many. Buffers are made once and used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from carpool.engine.work import InBatch, Outcome, Work
from carpool.errors import CarpoolError, ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec


class Collator:
    """Gathers inputs into the buffers of one instance and checks what the model answered."""

    def __init__(self, signature: Signature, largest: int) -> None:
        self._signature = signature
        self._largest = largest
        self._buffers: dict[str, Array] = {}

    def gather(self, works: Sequence[InBatch]) -> Mapping[str, Array]:
        """The inputs of all these requests, one behind the other along the batch dimension."""
        if len(works) == 1:
            return {name: _aligned(array) for name, array in works[0].inputs.items()}
        return {name: self._stack(name, [work.inputs[name] for work in works]) for name in works[0].inputs}

    def _stack(self, name: str, parts: list[Array]) -> Array:
        spec = self._signature.input_named[name]
        if spec.datatype is Datatype.BYTES or -1 in spec.shape:
            return np.concatenate(parts)
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = np.empty((self._largest, *spec.shape), spec.datatype.dtype)
            self._buffers[name] = buffer
        filled = 0
        for part in parts:
            buffer[filled : filled + len(part)] = part
            filled += len(part)
        return buffer[:filled]

    def check(self, outputs: Mapping[str, Array], wanted: Sequence[str], images: int) -> None:
        """The model's answer must be what was declared: clients rely on it."""
        for name in wanted:
            if name not in outputs:
                raise ModelError(f'{self._signature.model} did not answer the output "{name}"')
            self._check_output(self._signature.output_named[name], outputs[name], images)

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
                f'{model} answered the output "{spec.name}" with shape {list(array.shape)}, '
                f"declared is {list(expected)}"
            )
        if array.dtype != spec.datatype.dtype:
            declared = spec.datatype.value
            raise ModelError(
                f'{model} answered the output "{spec.name}" as {array.dtype}, declared is {declared}'
            )


def answer_each(
    _first: int, works: Sequence[Work], outputs: Mapping[str, Array], errors: Mapping[int, CarpoolError]
) -> list[Outcome]:
    """The `Answer` for requests that say themselves where their rows go."""
    return [
        Outcome(error=errors[number])
        if number in errors
        else Outcome(outputs=rows if work.place is None else work.place(rows))
        for number, (work, rows) in enumerate(zip(works, _split(outputs, works), strict=True))
    ]


def _split(outputs: Mapping[str, Array], works: Sequence[Work]) -> list[Mapping[str, Array]]:
    """Each request's rows, only the outputs it asked for, without copying."""
    if len(works) == 1:  # also where there are no rows, but one answer to one request
        return [_chosen(outputs, works[0])]
    parts: list[Mapping[str, Array]] = []
    start = 0
    for work in works:
        end = start + work.images
        parts.append({name: array[start:end] for name, array in _chosen(outputs, work).items()})
        start = end
    return parts


def _chosen(outputs: Mapping[str, Array], work: Work) -> Mapping[str, Array]:
    return {name: outputs[name] for name in work.wanted} if work.wanted else outputs


def _aligned(array: Array) -> Array:
    """Runtimes want aligned, contiguous memory; a body received in place may lie at any byte."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()
