"""Where tensors lie in a slot: both sides know it from the model's signature, so usually nobody says it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from carpool.types import Datatype, Signature

ALIGNMENT = 64


class Place(NamedTuple):
    """One tensor of an answer, `offset` bytes into the output slot."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    offset: int
    size: int


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def line_up(tensors: Iterable[tuple[str, Datatype, tuple[int, ...], int]]) -> list[Place]:
    """One behind the other, each on a boundary of 64 bytes; the last number of a tensor is its size."""
    places: list[Place] = []
    position = 0
    for name, datatype, shape, size in tensors:
        places.append(Place(name, datatype, shape, position, size))
        position = aligned(position + size)
    return places


def end_of(places: Sequence[Place]) -> int:
    return max((place.offset + place.size for place in places), default=0)


def declared_places(signature: Signature, wanted: Sequence[str], images: int) -> list[Place] | None:
    """The outputs in the order asked for, or None when their sizes depend on what the model finds."""
    specs = [signature.output_named[name] for name in wanted] if wanted else signature.outputs
    if any(spec.datatype is Datatype.BYTES or -1 in spec.shape for spec in specs):
        return None
    shapes = [(images, *spec.shape) if signature.max_batch else spec.shape for spec in specs]
    return line_up(
        (spec.name, spec.datatype, shape, math.prod(shape) * spec.datatype.size)
        for spec, shape in zip(specs, shapes, strict=True)
    )
