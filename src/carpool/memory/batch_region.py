"""Tensors in memory that two processes share: one writes a batch and says where each lies, the other reads.

A region grows as batches ask for it, up to a bound, and is used again for the next one. It can never shrink,
so that neither side can be hurt by what the other does to it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carpool.errors import ModelError
from carpool.memory.layout import aligned
from carpool.types import Array, Datatype

MAX_BYTES = 1 << 30
_FIRST_BYTES = 1 << 16
_DTYPES = {datatype.dtype.str: datatype.dtype for datatype in Datatype}
_STRINGS = Datatype.BYTES.dtype.str
_LENGTH = struct.Struct("<I")

WrittenTensor = tuple[str, str, Sequence[int], int, int]  # name, dtype, shape, offset, bytes


class BatchRegion:
    """Holds `fd`, a memory file that the other process has mapped too; the side that writes it grows it."""

    def __init__(self, fd: int, limit: int = MAX_BYTES) -> None:
        self.fd = fd
        self._limit = limit
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str) -> BatchRegion:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _FIRST_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd)

    def write(self, tensors: Mapping[str, Array]) -> list[WrittenTensor]:
        """Copies the tensors in, over those of the last batch, and says where they are."""
        packed = {name: _packed(name, array) for name, array in tensors.items()}
        places: list[WrittenTensor] = []
        end = 0
        for name, (dtype, array) in packed.items():
            offset = aligned(end)
            end = offset + array.nbytes
            places.append((name, dtype, tensors[name].shape, offset, array.nbytes))
        memory = self._reserve(end)
        for (_, _, _, offset, _), (_, array) in zip(places, packed.values(), strict=True):
            np.ndarray(array.shape, array.dtype, memory, offset)[...] = array
        return places

    def read(self, places: Sequence[Sequence[Any]]) -> dict[str, Array]:
        """The tensors where they lie, to be used before the next batch is written; strings are copies. One
        place is a `WrittenTensor`, or the list that JSON made of it."""
        memory = self._mapped()
        return {
            name: _array(memory, dtype, tuple(shape), offset, size)
            for name, dtype, shape, offset, size in places
        }

    def close(self) -> None:
        """Closes the region, while arrays from `read` keep the memory until they are gone themselves."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reserve(self, size: int) -> mmap.mmap:
        if size > self._limit:
            raise ModelError(f"the batch's tensors take {size} bytes, more than the {self._limit} allowed")
        if size > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, min(self._limit, 1 << (size - 1).bit_length()))
        return self._mapped()

    def _mapped(self) -> mmap.mmap:
        size = os.fstat(self.fd).st_size
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.fd, size)
        return self._map


def _packed(name: str, array: Array) -> tuple[str, Array]:
    """The dtype that the reader will see, and the bytes: strings become one array, each behind its length."""
    if array.dtype.kind in "OSU":
        return _STRINGS, np.frombuffer(b"".join(_encoded(name, item) for item in array.ravel()), np.uint8)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype.str not in _DTYPES:
        raise ModelError(f"{name!r} is an array of {array.dtype}, which the v2 protocol does not have")
    return native.dtype.str, native


def _encoded(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        item = item.encode()
    if not isinstance(item, bytes):
        raise ModelError(f"{name!r} holds a {type(item).__name__} where numbers, text or bytes belong")
    return _LENGTH.pack(len(item)) + item


def _array(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> Array:
    """Raises ValueError where the place cannot be right: the process that named it runs foreign code."""
    count = math.prod(shape)
    if any(dim < 0 for dim in shape) or not 0 <= offset <= offset + size <= len(memory):
        raise ValueError(f"no tensor can lie at {offset} with {size} bytes and the shape {shape}")
    kind = _DTYPES[dtype]
    if kind.hasobject:
        return _strings(memory[offset : offset + size], count).reshape(shape)
    if count * kind.itemsize != size:
        raise ValueError(f"{size} bytes cannot hold the shape {shape}")
    return np.ndarray(shape, kind, memory, offset)


def _strings(data: bytes, count: int) -> Array:
    if count > len(data) // _LENGTH.size:
        raise ValueError(f"{len(data)} bytes cannot hold {count} strings")
    strings = np.empty(count, dtype=object)
    start = 0
    for index in range(count):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        strings[index] = data[start : start + length]
        start += length
    if start != len(data):
        raise ValueError(f"{count} strings end at byte {start} of {len(data)}")
    return strings
