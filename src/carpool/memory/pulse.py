"""Signs of life: each process counts up its cell of shared memory, and others see when it stands still.

What counts is the thread whose health is meant, the loop's: a process that was stopped, that swaps or whose
interpreter lock is held does not count, and is of no use either. Only its owner writes to a cell,
eight aligned bytes at once, and readers ask no more than whether it has changed: nothing has to be locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from mmap import mmap
from time import monotonic

BEAT_S = 0.2
STALE_S = 1.0
"""A process that stands still for so long is not ready, and gets no new work."""
HOPELESS_S = 1.5
"""After so long, the requests that wait for the process are answered."""
START_S = 120.0
"""For a process to begin: what it imports may come from a slow disk, and holds its interpreter lock."""
_CELL_BYTES = 8
_MOST_BETWEEN_LOOKS_S = 3 * BEAT_S


def pulse_bytes(cells: int) -> int:
    return cells * _CELL_BYTES


class Pulses:
    """Holds pulses over a buffer of `pulse_bytes` zeros that all processes share."""

    def __init__(self, buffer: bytearray | mmap) -> None:
        self._cells = memoryview(buffer).cast("B").cast("Q")

    def beat(self, cell: int) -> None:
        self._cells[cell] += 1

    def read(self, cell: int) -> int:
        """0: it has not begun."""
        return self._cells[cell]

    def clear(self, cell: int) -> None:
        """Another process is to take this cell; the one before has ended."""
        self._cells[cell] = 0


class Watch:
    """Measures how long another process has stood still, in time that this one was awake itself.

    A look that comes late counts as one that did not: after the whole machine was suspended, every clock has
    moved and no process is to blame.
    """

    def __init__(self, read: Callable[[], int], now: Callable[[], float] = monotonic) -> None:
        self._read = read
        self._now = now
        self._seen = 0
        self._looked = now()
        self._still = 0.0

    @property
    def begun(self) -> bool:
        return self._seen != 0

    def look(self) -> float:
        """Returns how long the pulse has been still, and must be called every `BEAT_S`."""
        now, value = self._now(), self._read()
        between = min(now - self._looked, _MOST_BETWEEN_LOOKS_S)
        self._looked = now
        if value != self._seen:
            self._seen, self._still = value, 0.0
        else:
            self._still += between
        return self._still


class Beats:
    """Calls these every `BEAT_S` on the loop, from now until it is stopped."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._beat)  # first: a call that raises stops nothing
        for call in self._calls:
            call()

    def stop(self) -> None:
        self._timer.cancel()
