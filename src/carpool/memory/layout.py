"""Defines where tensors and files lie in shared memory: the one place that says so, for all who read or write
it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from mmap import mmap
from struct import Struct
from typing import NamedTuple

import numpy as np
import orjson

from carpool.types import DATATYPES, Array, Datatype, Signature

ALIGNMENT = 64


class TensorPlace(NamedTuple):
    """Describes one tensor of an answer, `offset` bytes into the output slot."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    offset: int
    size: int


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def line_up(tensors: Iterable[tuple[str, Datatype, tuple[int, ...], int]]) -> list[TensorPlace]:
    """One behind the other, each on a boundary of 64 bytes; the last number of a tensor is its size."""
    places: list[TensorPlace] = []
    position = 0
    for name, datatype, shape, size in tensors:
        places.append(TensorPlace(name, datatype, shape, position, size))
        position = aligned(position + size)
    return places


def end_of(places: Sequence[TensorPlace]) -> int:
    return max((place.offset + place.size for place in places), default=0)


def declared_places(signature: Signature, wanted: Sequence[str], images: int) -> list[TensorPlace] | None:
    """Returns the outputs in the order asked for, or None when their sizes depend on what the model finds."""
    specs = [signature.output_named[name] for name in wanted] if wanted else signature.outputs
    if any(spec.datatype is Datatype.BYTES or -1 in spec.shape for spec in specs):
        return None
    shapes = [(images, *spec.shape) if signature.max_batch else spec.shape for spec in specs]
    return line_up(
        (spec.name, spec.datatype, shape, math.prod(shape) * spec.datatype.size)
        for spec, shape in zip(specs, shapes, strict=True)
    )


def answer_size(signature: Signature, body: int) -> int:
    """Returns the bytes that the outputs will take for so many bytes of inputs; as many again, where only the
    model knows."""
    images = 1
    fixed = all(spec.datatype.size and -1 not in spec.shape for spec in signature.inputs)
    if signature.max_batch and fixed:
        each = sum(math.prod(spec.shape) * spec.datatype.size for spec in signature.inputs)
        images = min(signature.max_batch, -(-body // max(1, each)))
    places = declared_places(signature, (), images)
    return body if places is None else end_of(places)


_length = Struct("<Q")
FILE_AT = _length.size
"""Where the file begins, in bytes from the start of the slot."""
ENCODED = "encoded"
"""The shape of requests that are image files: they are never in a batch with tensors."""
CUTS = "cuts"
"""And of those that are parts of pictures which are on the device: see `picture_leases`."""


def write_length(view: memoryview, length: int) -> None:
    _length.pack_into(view, 0, length)


def write_file(view: memoryview, data: bytes | bytearray | memoryview) -> None:
    _length.pack_into(view, 0, len(data))
    view[FILE_AT : FILE_AT + len(data)] = data


def find_file(memory: mmap | memoryview, offset: int) -> tuple[int, int]:
    """Returns where the file begins and ends. The length is not believed: ValueError where it reaches beyond
    the memory."""
    (length,) = _length.unpack_from(memory, offset)
    start = offset + FILE_AT
    if length > len(memory) - start:
        raise ValueError(f"a file of {length} bytes reaches beyond its memory")
    return start, start + length


def bind_file(memory: mmap | memoryview, offset: int) -> Array:
    """Returns the file where it lies. Raises as `find_file`."""
    start, end = find_file(memory, offset)
    return np.ndarray((end - start,), np.uint8, memory, start)


def list_places(places: Sequence[TensorPlace]) -> bytes:
    """Writes the places for a side that cannot derive them from the model's signature."""
    return orjson.dumps([(p.name, p.datatype.value, p.shape, p.offset, p.size) for p in places])


def read_places(payload: bytes | bytearray | memoryview) -> list[TensorPlace]:
    """Returns what `list_places` wrote."""
    return [
        TensorPlace(name, DATATYPES[datatype], tuple(shape), offset, size)
        for name, datatype, shape, offset, size in orjson.loads(payload)
    ]
