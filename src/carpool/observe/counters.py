"""The shared table of counters: every process adds to its own block, whoever scrapes sums them all.

    directory │ block 0: row 0 (the server), rows 1…256 (model versions) │ block 1: … │ …

No locks: a block has one writer, one thread of one process. An aligned float64 is written in one store, so a
reader sees it before or after, never half. A block outlives its process; the successor adds to what it finds.

A row can change its model, and then gets the next generation: a writer that takes the row clears its own
cells, and a reader skips the blocks that still hold an older one. So nobody ever writes into another's block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from carpool.observe import columns
from carpool.observe.columns import GENERATION, WIDTH, Column, Histogram
from carpool.observe.directory import DIRECTORY_BYTES, MODEL_ROWS, Buffer, Directory, Slot

Cells: TypeAlias = Sequence[float]

_CELL = 8
_STRIDE = (WIDTH + 7) // 8 * 8  # whole cache lines, so that two processes never share one
_BLOCK = (MODEL_ROWS + 1) * _STRIDE
_MAXIMA = list(columns.MAXIMA)


def table_bytes(blocks: int) -> int:
    """The size of the buffer for so many processes; it must start out as zeros."""
    return DIRECTORY_BYTES + blocks * _BLOCK * _CELL


class Row:
    """One process's cells of one row. Take it once and keep it: this is the hot path."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells

    def add(self, column: Column, amount: float = 1.0) -> None:
        self._cells[column] += amount

    def set(self, column: Column, value: float) -> None:
        """For gauges."""
        self._cells[column] = value

    def observe(self, histogram: Histogram, value: float) -> None:
        if not value > 0.0:  # also catches NaN: one of those would stay in the sum for ever
            value = 0.0
        cells = self._cells
        cells[histogram.first + bisect_left(histogram.bounds, value)] += 1.0
        cells[histogram.sum] += value

    def observe_each(self, histogram: Histogram, values: Iterable[float]) -> None:
        """Several at once, which mostly fall into the same few bounds."""
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

    def observe_repeated(self, histogram: Histogram, value: float, times: int) -> None:
        """The same value for each of several requests, at the price of one."""
        if not value > 0.0:
            value = 0.0
        cells = self._cells
        cells[histogram.first + bisect_left(histogram.bounds, value)] += times
        cells[histogram.sum] += value * times

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
        """One execution that succeeded. `queued` is each request's wait in seconds, `ended_ms` is Unix time.

        As in Triton, every request is charged the whole time of its batch, not its share.
        """
        requests = len(queued)
        self.observe_each(columns.QUEUE_SECONDS, queued)
        self.observe_repeated(columns.INFER_SECONDS, infer_s, requests)
        self.observe(columns.BATCH_SIZE, images)
        cells = self._cells
        cells[columns.INPUT_SECONDS] += input_s * requests
        cells[columns.OUTPUT_SECONDS] += output_s * requests
        cells[columns.LAST_INFERENCE_MS] = ended_ms


class Block:
    """The part of the table that one process writes. `server` is its row for what belongs to no model."""

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells
        self.server = Row(cells[:WIDTH])

    def row(self, slot: Slot) -> Row:
        """This block's cells for a model version, cleared when they still hold another's counts."""
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
        for start in range(0, _BLOCK, _STRIDE):
            for column in columns.GAUGES:
                self._cells[start + column] = 0.0


@dataclass(frozen=True, slots=True)
class ModelCells:
    """A model version and its cells, summed over all processes."""

    model: str
    version: str
    cells: Cells


class Table:
    """The whole table, over a buffer of `table_bytes` that all processes share."""

    def __init__(self, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        self.blocks = (len(view) - DIRECTORY_BYTES) // (_BLOCK * _CELL)
        if self.blocks < 1:
            raise ValueError(f"a table of counters takes at least {table_bytes(1)} bytes, not {len(view)}")
        self.directory = Directory(view[:DIRECTORY_BYTES])
        self._view = view[DIRECTORY_BYTES : table_bytes(self.blocks)]
        self._cells: npt.NDArray[np.float64] = np.frombuffer(self._view).reshape(
            self.blocks, MODEL_ROWS + 1, _STRIDE
        )

    def block(self, index: int) -> Block:
        """The block to write to. Its gauges are cleared: the process that set them is gone.

        The supervisor takes the block of a dead process for this effect alone.
        """
        if not 0 <= index < self.blocks:
            raise IndexError(f"the table has {self.blocks} blocks, so there is no number {index}")
        start = index * _BLOCK
        block = Block(self._view.cast("d")[start : start + _BLOCK])
        block.clear_gauges()
        return block

    def server(self) -> Cells:
        return self._merged([0], np.zeros(1))[0]

    def models(self) -> list[ModelCells]:
        """Every model version that the directory names, in the order of its rows."""
        live = self.directory.live()
        merged = self._merged(
            [slot.row for slot in live], np.array([slot.generation for slot in live], np.float64)
        )
        return [ModelCells(*name, cells) for name, cells in zip(live.values(), merged, strict=True)]

    def cells(self, slot: Slot) -> Cells:
        """One model version's cells, summed over all processes."""
        return self._merged([slot.row], np.array([slot.generation], np.float64))[0]

    def _merged(self, rows: list[int], generations: npt.NDArray[np.float64]) -> list[list[float]]:
        """The rows over all blocks, without the cells that belong to another generation."""
        cells = self._cells[:, rows, :WIDTH]  # a copy: one look at numbers that others are changing
        cells[cells[:, :, GENERATION] != generations] = 0.0
        total = cells.sum(axis=0)
        total[:, _MAXIMA] = cells[:, :, _MAXIMA].max(axis=0)
        merged: list[list[float]] = total.tolist()
        return merged
