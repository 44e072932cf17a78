"""Which row of the table belongs to which model version: written by the engine, read by everyone.

It lies in the shared table, so that a restarted engine finds its models' rows again and goes on adding there.
"""

from __future__ import annotations

import struct
import zlib
from mmap import mmap
from typing import NamedTuple, TypeAlias

from carpool.errors import ConfigError, Unavailable

Buffer: TypeAlias = bytearray | mmap | memoryview

MODEL_ROWS = 256
_RECORD = 320  # whole cache lines
_HEAD = struct.Struct("<qIH")  # generation, checksum, bytes of text
_TEXT = _RECORD - _HEAD.size
DIRECTORY_BYTES = MODEL_ROWS * _RECORD


class Slot(NamedTuple):
    """A row and which of its lives is meant: small enough to send to every process."""

    row: int
    generation: int


class _Entry(NamedTuple):
    generation: int
    name: tuple[str, str] | None  # model and version; None is a free row


class Directory:
    """One record per row. Row 0 is the server's and has none. Only the engine may `assign` and `retire`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def assign(self, model: str, version: str) -> Slot:
        """The row of this model version; a free one when it has none yet."""
        known = self.find(model, version)
        if known is not None:
            return known
        text = f"{model}\0{version}".encode()
        if len(text) > _TEXT:
            raise ConfigError(f"the name of a model must be shorter than {_TEXT - 24} bytes: {model[:40]}…")
        # The row with the fewest lives so far: a late request of a retired model then rarely meets a new one.
        free = [(entry.generation, index) for index, entry in self._entries() if entry.name is None]
        if not free:
            raise Unavailable(f"{MODEL_ROWS} model versions are loaded, which is the limit")
        generation, index = min(free)
        self._write(index, generation + 1, text)
        return Slot(index, generation + 1)

    def retire(self, model: str, version: str) -> None:
        """Frees the row: its counts leave the metrics page, as they do when Triton unloads a model."""
        slot = self.find(model, version)
        if slot is not None:
            self._write(slot.row, slot.generation, b"")

    def find(self, model: str, version: str) -> Slot | None:
        for slot, name in self.live().items():
            if name == (model, version):
                return slot
        return None

    def live(self) -> dict[Slot, tuple[str, str]]:
        return {
            Slot(index, entry.generation): entry.name
            for index, entry in self._entries()
            if entry.name is not None
        }

    def _entries(self) -> list[tuple[int, _Entry]]:
        return [(index, self._read(index)) for index in range(1, MODEL_ROWS + 1)]

    def _write(self, index: int, generation: int, text: bytes) -> None:
        start = (index - 1) * _RECORD
        head = _HEAD.pack(generation, _checksum(generation, text), len(text))
        record = (head + text).ljust(_RECORD, b"\0")
        self._view[start : start + _RECORD] = record

    def _read(self, index: int) -> _Entry:
        """A record that is being written counts as free; so does one whose engine died while writing it."""
        start = (index - 1) * _RECORD
        record = bytes(self._view[start : start + _RECORD])
        generation, checksum, length = _HEAD.unpack_from(record)
        text = record[_HEAD.size : _HEAD.size + length]
        if not text or checksum != _checksum(generation, text):
            return _Entry(generation, None)
        model, _, version = text.decode().partition("\0")
        return _Entry(generation, (model, version))


def _checksum(generation: int, text: bytes) -> int:
    return zlib.crc32(text, generation & 0xFFFFFFFF)
