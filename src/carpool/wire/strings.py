"""Reads tensors of BYTES: each element stands behind its length in 4 bytes.

Arrays of strings have an object for each element, of which four bytes, or none once they are compressed, make
one. So those who only pass a tensor on check it without making any, and a model's own thread unpacks it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from carpool.errors import CarpoolError, InvalidInput
from carpool.types import Array
from carpool.wire.head import Buffer, TensorHead

_LENGTH = struct.Struct("<I")
STEP: Final = 1 << 16
"""Elements that are checked, or strings that are written, between two looks at whether a caller waits."""

Between: TypeAlias = Callable[[], None]
"""Is called between the steps of what may take long, in its thread. What it raises ends that: the client no
longer waits."""


def go_on() -> None:
    """Ends nothing."""


def check_strings(
    head: TensorHead, view: Buffer, owner: str, model: str = "", between: Between = go_on
) -> None:
    """Checks that the bytes are as many elements as the shape says. Makes none of them."""
    if not head.framed:
        return
    most = math.prod(head.shape)
    count, position, end = 0, 0, len(view)
    length_at = _LENGTH.unpack_from
    while position + 4 <= end and count <= most:
        position += 4 + length_at(view, position)[0]
        if position > end:
            break
        count += 1
        if not count % STEP:
            between()
    if position != end or count != most:
        raise _wrong_count(head, count, end, owner, model)


def split_strings(head: TensorHead, view: Buffer, owner: str, model: str = "") -> Array:
    """Returns the elements, and makes an object of each. Raises `InvalidInput` as `check_strings` does, also
    where a client writes to these bytes meanwhile."""
    if not head.framed:
        return as_strings([bytes(view)], head.shape)
    elements: list[bytes] = []
    most = math.prod(head.shape)
    position, end = 0, len(view)
    while position + 4 <= end and len(elements) <= most:
        start = position + 4
        position = start + _LENGTH.unpack_from(view, position)[0]
        if position > end:
            break
        elements.append(bytes(view[start:position]))
    if position != end or len(elements) != most:
        raise _wrong_count(head, len(elements), end, owner, model)
    return as_strings(elements, head.shape)


def _wrong_count(head: TensorHead, count: int, size: int, owner: str, model: str) -> InvalidInput:
    whose = f" for model '{model}'" if model else ""
    most = math.prod(head.shape)
    found = f"got {count}" if count <= most else "got more"
    return InvalidInput(
        f"expected {most} string elements for inference {owner}{whose},"
        f" {found} in {size} bytes, each with its length in 4 bytes before it",
        field=f"{owner}.data",
    )


def as_strings(elements: list[bytes], shape: tuple[int, ...]) -> Array:
    data = np.empty(len(elements), dtype=object)
    data[:] = elements
    return data.reshape(shape)


_NdArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_NOT_UNPACKED: Array = np.array(NotImplemented, object)  # what no model takes for a string


class PackedStrings(np.ndarray[Any, np.dtype[Any]]):
    """Stands for a tensor of BYTES that is still as it came: its shape and datatype are right, its elements
    are there when it is unpacked. It may be reshaped, and not cut."""

    _packed: tuple[TensorHead, memoryview] | None = None

    @classmethod
    def of(cls, head: TensorHead, view: memoryview) -> PackedStrings:
        found = np.broadcast_to(_NOT_UNPACKED, head.shape).view(cls)
        found._packed = head, view
        return found

    def __array_finalize__(self, base: object) -> None:
        self._packed = getattr(base, "_packed", None)

    @property
    def nbytes(self) -> int:  # numpy would count what is not there
        return len(self.packed)

    @property
    def packed(self) -> memoryview:
        """Returns the bytes that it came as."""
        assert self._packed is not None
        return self._packed[1]

    def unpacked(self) -> Array:
        """Returns its elements. In the thread that needs them; raises `InvalidInput`."""
        assert self._packed is not None
        head, view = self._packed
        return split_strings(head, view, f"input '{head.name}'").reshape(self.shape)


def unpacked(array: Array) -> Array:
    """Returns an array of elements, whatever it was."""
    return array.unpacked() if isinstance(array, PackedStrings) else array


def unpacked_or_empty(array: Array, index: int, errors: dict[int, CarpoolError]) -> Array:
    """Does the same for one request of a batch: what cannot be unpacked is empty, and `errors` says so."""
    try:
        return unpacked(array)
    except CarpoolError as error:
        error.__traceback__ = None
        errors[index] = error
        return np.full(array.shape, b"", object)
