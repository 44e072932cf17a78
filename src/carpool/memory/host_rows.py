"""What an encoder in a process of its own hands over to decoders in another: rows in memory that both map.

The memory belongs to the decoders' process, in equal pieces, one for each picture. It names the pieces that
the encoder may write to and hands none of them out again before the encoder has answered or is dead, and what
was read from it is gone. So an encoder that dies leaves behind whatever was handed over, and the next one
writes to the same memory.
"""

from __future__ import annotations

import fcntl
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carpool.memory.arena import map_memory
from carpool.memory.layout import aligned
from carpool.types import Array

_MOST_BYTES = 1 << 32  # of all pieces


@dataclass(frozen=True, slots=True)
class RowForm:
    """What comes out of an encoder for one picture: up to `most` rows, each of this shape."""

    datatype: str
    row_bytes: int
    most: int
    shape: tuple[int, ...]

    def check(self, item_bytes: int, pieces: int) -> None:
        """ValueError for what no encoder makes: it was told by a process that may be broken."""
        sound = self.most > 0 and item_bytes > 0 and all(dim > 0 for dim in self.shape)
        if not sound or self.row_bytes != item_bytes * math.prod(self.shape):
            raise ValueError(f"no rows can be of the form {self}")
        if pieces * self.piece_bytes > _MOST_BYTES:
            raise ValueError(f"the rows of {pieces} pictures are more than the {_MOST_BYTES} bytes allowed")

    @property
    def piece_bytes(self) -> int:
        return aligned(self.most * self.row_bytes)


def create_rows() -> int:
    """A memory file without memory yet, which can grow and never shrink: how much is needed the encoder says
    that maps it, and that is started first."""
    fd = os.memfd_create("carpool-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class HostRows:
    """The rows of numpy; other libraries have `item_bytes`, `_flat` and `_formed` of their own."""

    told: Mapping[str, Any] = {}

    def __init__(self, form: RowForm, file: int) -> None:
        """Over a file that is long enough. It stays mapped for as long as anybody reads it."""
        self._form = form
        self._memory = map_memory(file)
        self._pieces = len(self._memory) // form.piece_bytes

    @classmethod
    def grown(cls, form: RowForm, file: int, pieces: int) -> HostRows:
        form.check(cls.item_bytes(form.datatype), pieces)
        os.ftruncate(file, pieces * form.piece_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(form, file)

    @staticmethod
    def item_bytes(datatype: str) -> int:
        """0 where there is no such datatype."""
        try:
            found = np.dtype(datatype)
        except TypeError:
            return 0
        return 0 if found.hasobject else found.itemsize

    def put(self, pieces: Sequence[int], encoded: Sequence[Any]) -> list[int]:
        """In the encoder's process. The number of rows of each; they are there when it returns."""
        for piece, rows in zip(pieces, encoded, strict=True):
            self._view(piece, len(rows))[...] = self._flat(rows)
        return [len(rows) for rows in encoded]

    def rows(self, piece: int, count: int, left: Callable[[], object]) -> Any:
        """In the decoders' process: where they lie. `left` is called when nobody has them any more, in
        whichever thread that happens and whatever that is at: it must not wait for a lock."""
        view = self._view(piece, count)
        weakref.finalize(view, left).atexit = False
        return self._formed(view, (count, *self._form.shape))

    def _view(self, piece: int, count: int) -> Array:
        if not (0 <= piece < self._pieces and 0 < count <= self._form.most):
            raise ValueError(f"piece {piece} of {self._pieces} cannot have {count} rows")
        offset, size = piece * self._form.piece_bytes, count * self._form.row_bytes
        return np.ndarray((size,), np.uint8, self._memory, offset)

    def _flat(self, rows: Any) -> Array:
        return np.ascontiguousarray(rows).view(np.uint8).ravel()

    def _formed(self, view: Array, shape: tuple[int, ...]) -> Any:
        return view.view(self._form.datatype).reshape(shape)
