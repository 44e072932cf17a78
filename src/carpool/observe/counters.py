"""Holds the shared table of counters: every process adds to its own block, and a scrape sums them all.

    directory │ block 0: row 0 (the server), rows 1…256 (model versions) │ block 1 │ … │ exemplars │ history

No locks: a block has one writer, one thread of one process. An aligned float64 is written in one store, so a
reader sees it before or after, never half. A block outlives its process; the successor adds to what it finds.

A row can change its model, and then gets the next generation: a writer that takes the row clears its own
cells, and a reader skips the blocks that still hold an older one. So no process writes into another's block.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from carpool.errors import ConfigError, DeadlineExceeded, ModelError, Refused, Replaced, Unavailable
from carpool.observe import columns
from carpool.observe.columns import (
    FAILURE_SECONDS,
    FAILURES,
    GENERATION,
    OFFERED,
    SHED,
    WIDTH,
    Column,
    HistogramColumns,
)
from carpool.observe.exemplars import EXEMPLAR_BYTES, Exemplar, Exemplars, read_exemplars
from carpool.observe.shared_history import HISTORY_BYTES, SharedHistory

Buffer: TypeAlias = bytearray | mmap | memoryview

MODEL_ROWS: Final = 256
_RECORD: Final = 320  # whole cache lines
_HEAD: Final = struct.Struct("<qIH")  # generation, checksum, bytes of text
_TEXT = _RECORD - _HEAD.size
DIRECTORY_BYTES: Final = MODEL_ROWS * _RECORD
_HEADS = np.dtype(  # what says at once which records are empty: most are, and a model has a row for each step
    {"names": ["generation", "length"], "formats": ["<i8", "<u2"], "offsets": [0, 12], "itemsize": _RECORD}
)
_MOST_LIVES = np.iinfo(np.int64).max


class CounterRow(NamedTuple):
    """Describes a row and which of its lives is meant: small enough to send to every process."""

    row: int
    generation: int


class Directory:
    """Records which row belongs to which model version: one record per row, but none for row 0, the server's.

    Only the engine may `assign` and `retire`. It lies in the shared table, so that a restarted engine finds
    its models' rows again and goes on adding there.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._heads: npt.NDArray[np.void] = np.frombuffer(view, _HEADS)

    def assign(self, model: str, version: str) -> CounterRow:
        """Returns the row of this model version; a free one when it has none yet."""
        taken = self.live()
        known = _slot_of(taken, model, version)
        if known is not None:
            return known
        text = f"{model}\0{version}".encode()
        if len(text) > _TEXT:
            raise ConfigError(f"the name of a model must be shorter than {_TEXT - 24} bytes: {model[:40]}…")
        if len(taken) == MODEL_ROWS:
            raise Unavailable(f"{MODEL_ROWS} model versions are loaded, which is the limit")
        # The row with the fewest lives so far: a late request of a retired model then rarely meets a new one.
        lives = self._heads["generation"].copy()
        lives[[slot.row - 1 for slot in taken]] = _MOST_LIVES
        row = int(lives.argmin()) + 1
        slot = CounterRow(row, int(lives[row - 1]) + 1)
        self._write(slot.row, slot.generation, text)
        return slot

    def retire(self, model: str, version: str) -> None:
        """Frees the row: its counts leave the metrics page, as they do when Triton unloads a model."""
        slot = self.find(model, version)
        if slot is not None:
            self._write(slot.row, slot.generation, b"")

    def find(self, model: str, version: str) -> CounterRow | None:
        return _slot_of(self.live(), model, version)

    def live(self) -> dict[CounterRow, tuple[str, str]]:
        """Returns the rows that are taken, each in its life of now, with its model and version.

        A record that is being written counts as free; so does one whose engine died while writing it.
        """
        found = {}
        for index in np.flatnonzero(self._heads["length"]).tolist():
            start = index * _RECORD
            record = bytes(self._view[start : start + _RECORD])
            generation, checksum, length = _HEAD.unpack_from(record)
            text = record[_HEAD.size : _HEAD.size + length]
            if text and checksum == _checksum(generation, text):
                model, _, version = text.decode().partition("\0")
                found[CounterRow(index + 1, generation)] = (model, version)
        return found

    def _write(self, index: int, generation: int, text: bytes) -> None:
        start = (index - 1) * _RECORD
        head = _HEAD.pack(generation, _checksum(generation, text), len(text))
        record = (head + text).ljust(_RECORD, b"\0")
        self._view[start : start + _RECORD] = record


def _slot_of(taken: Mapping[CounterRow, tuple[str, str]], model: str, version: str) -> CounterRow | None:
    return next((slot for slot, name in taken.items() if name == (model, version)), None)


def _checksum(generation: int, text: bytes) -> int:
    return zlib.crc32(text, generation & 0xFFFFFFFF)


Cells: TypeAlias = Sequence[float]

_CELL: Final = 8
_STRIDE: Final = (WIDTH + 7) // 8 * 8  # whole cache lines, so that two processes never share one
_BLOCK = (MODEL_ROWS + 1) * _STRIDE
_MAXIMA = list(columns.MAXIMA)
_GAUGES = list(columns.GAUGES)


def table_bytes(blocks: int) -> int:
    """The size of the buffer for so many processes; it must start out as zeros."""
    return DIRECTORY_BYTES + blocks * (_BLOCK * _CELL + EXEMPLAR_BYTES) + HISTORY_BYTES


class Row:
    """Holds one process's cells of one row. Take it once and keep it: this is the hot path."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells

    def add(self, column: Column, amount: float = 1.0) -> None:
        self._cells[column] += amount

    def set(self, column: Column, value: float) -> None:
        """Sets a cell, for gauges."""
        self._cells[column] = value

    def observe(self, histogram: HistogramColumns, value: float, times: int = 1) -> None:
        """The same value for each of several requests has the price of one."""
        if not value > 0.0:  # also catches NaN: one of those would stay in the sum for ever
            value = 0.0
        cells = self._cells
        cells[histogram.first + bisect_left(histogram.bounds, value)] += times
        cells[histogram.sum] += value * times

    def observe_each(self, histogram: HistogramColumns, values: Iterable[float]) -> None:
        """Observes several at once, which mostly fall into the same few bounds."""
        bounds, counts, total = histogram.bounds, [0] * (len(histogram.bounds) + 1), 0.0
        for value in values:
            if not value > 0.0:
                value = 0.0
            counts[bisect_left(bounds, value)] += 1
            total += value
        cells = self._cells
        for place, count in enumerate(counts, histogram.first):
            if count:
                cells[place] += count
        cells[histogram.sum] += total

    def add_batch(
        self,
        images: int,
        queued: Sequence[float],
        *,
        input_s: float,
        infer_s: float,
        output_s: float,
        ended_ms: float,
    ) -> None:
        """Counts one execution that succeeded. `queued` is each request's wait in seconds, `ended_ms` is Unix
        time.

        As in Triton, every request is charged the whole time of its batch, not its share.
        """
        requests = len(queued)
        self.observe_each(columns.QUEUE_SECONDS, queued)
        self.observe(columns.INFER_SECONDS, infer_s, requests)
        self.observe(columns.BATCH_SIZE, images)
        cells = self._cells
        cells[columns.INPUT_SECONDS] += input_s * requests
        cells[columns.OUTPUT_SECONDS] += output_s * requests
        cells[columns.LAST_INFERENCE_MS] = ended_ms


class Block:
    """Holds the part of the table that one process writes. `server` is its row for what belongs to no
    model."""

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells
        self.server = Row(cells[:WIDTH])

    def row(self, slot: CounterRow) -> Row:
        """Returns this block's cells for a model version, cleared when they still hold another's counts."""
        start = slot.row * _STRIDE
        cells = self._cells[start : start + WIDTH]
        if cells[GENERATION] != slot.generation:
            cells[GENERATION] = 0.0  # readers look away until the row is clean
            for column in range(GENERATION + 1, WIDTH):
                cells[column] = 0.0
            cells[GENERATION] = slot.generation
        return Row(cells)

    def clear_gauges(self) -> None:
        """Forgets what was true only for the process that held this block before."""
        rows = np.frombuffer(self._cells.cast("B")).reshape(MODEL_ROWS + 1, _STRIDE)
        rows[:, _GAUGES] = 0.0


@dataclass(frozen=True, slots=True)
class ModelCells:
    model: str
    version: str
    cells: Cells
    step: str = ""  # of a model that is made of several
    slot: CounterRow = field(default_factory=lambda: CounterRow(0, 0))


class Table:
    """Holds the whole table, over a buffer of `table_bytes` that all processes share."""

    def __init__(self, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        self.blocks = (len(view) - DIRECTORY_BYTES - HISTORY_BYTES) // (_BLOCK * _CELL + EXEMPLAR_BYTES)
        if self.blocks < 1:
            raise ValueError(f"a table of counters takes at least {table_bytes(1)} bytes, not {len(view)}")
        self.directory = Directory(view[:DIRECTORY_BYTES])
        exemplars = DIRECTORY_BYTES + self.blocks * _BLOCK * _CELL
        self._view = view[DIRECTORY_BYTES:exemplars]
        history = table_bytes(self.blocks) - HISTORY_BYTES
        self._exemplars = view[exemplars:history]
        self.history = SharedHistory(view[history : history + HISTORY_BYTES])
        self._cells: npt.NDArray[np.float64] = np.frombuffer(self._view).reshape(
            self.blocks, MODEL_ROWS + 1, _STRIDE
        )

    def block(self, index: int) -> Block:
        """Returns the block to write to. Its gauges are cleared: the process that set them is gone.

        The supervisor takes the block of a dead process for this effect alone.
        """
        if not 0 <= index < self.blocks:
            raise IndexError(f"the table has {self.blocks} blocks, so there is no number {index}")
        start = index * _BLOCK
        block = Block(self._view.cast("d")[start : start + _BLOCK])
        block.clear_gauges()
        return block

    def block_exemplars(self, index: int) -> Exemplars:
        """Returns those of the process that has the block of this number."""
        start = index * EXEMPLAR_BYTES
        return Exemplars(self._exemplars[start : start + EXEMPLAR_BYTES])

    def exemplars(self) -> Mapping[tuple[int, int, int], Exemplar]:
        """By row, generation and column: `ModelCells.slot` has the first two."""
        return read_exemplars(self._exemplars)

    def server(self) -> Cells:
        return self._merged([CounterRow(0, 0)])[0]

    def models(self) -> list[ModelCells]:
        return self._rows(steps=False)

    def steps(self) -> list[ModelCells]:
        """Returns those of steps: their rows have the step's name behind the version."""
        return self._rows(steps=True)

    def _rows(self, *, steps: bool) -> list[ModelCells]:
        live = {slot: name for slot, name in self.directory.live().items() if ("\0" in name[1]) is steps}
        merged = self._merged(list(live))
        found = []
        for (slot, (model, version)), cells in zip(live.items(), merged, strict=True):
            number, _, step = version.partition("\0")
            found.append(ModelCells(model, number, cells, step, slot))
        return found

    def cells(self, slot: CounterRow) -> Cells:
        return self._merged([slot])[0]

    def _merged(self, slots: Sequence[CounterRow]) -> list[list[float]]:
        """Returns the rows over all blocks, without the cells that belong to another generation."""
        rows = [slot.row for slot in slots]
        cells = self._cells[:, rows, :WIDTH]  # a copy: one look at numbers that others are changing
        cells[cells[:, :, GENERATION] != np.array([slot.generation for slot in slots], np.float64)] = 0.0
        total = cells.sum(axis=0)
        total[:, _MAXIMA] = cells[:, :, _MAXIMA].max(axis=0)
        return cast(list[list[float]], total.tolist())


_SHEDDING = (Refused, DeadlineExceeded, Unavailable)
_UNWANTED = (asyncio.CancelledError, Replaced)
_BACKENDS = (ModelError, DeadlineExceeded)


def count_failure(row: Row, error: BaseException, seconds: float, unheard: int = 0) -> None:
    """Counts one request that ended in `error`, `seconds` after it arrived, with `unheard` images that the
    engine has not heard of: to refuse them does not mean that they were not asked for."""
    if unheard and isinstance(error, Refused):
        row.add(OFFERED, unheard)
    shed = ""  # the reason when the scheduler chose not to run the request
    if isinstance(error, Replaced):
        shed = "replaced"
    elif isinstance(error, _SHEDDING) and error.reason in SHED:
        shed = error.reason  # by class first: an oversized body and an oversized batch carry the same word
    if isinstance(error, _UNWANTED):
        word = "CANCELED"  # the client left, or its own newer frame took the place
    elif shed or isinstance(error, Refused):
        word = "REJECTED"
    elif isinstance(error, _BACKENDS):
        word = "BACKEND"  # a deadline that is not a shed is an execution that timed out
    else:
        word = "OTHER"
    row.add(FAILURES[word])
    row.add(FAILURE_SECONDS, max(seconds, 0.0))
    if shed:
        row.add(SHED[shed])
