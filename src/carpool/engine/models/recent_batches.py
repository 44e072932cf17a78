"""The batches of the last seconds, for whoever shows what a model does now."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

RECENT_S = 10  # long enough for a mean that does not flicker, short enough to follow a surge


class RecentSize(NamedTuple):
    images: int
    batches: int
    seconds: float  # of one batch, on average


class RecentBatches:
    """Counts by the second, so that the past falls off at the end and memory stays bounded."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        self._cells: deque[tuple[int, dict[int, list[float]]]] = deque(maxlen=RECENT_S)

    def add(self, images: int, seconds: float, now: float) -> None:
        """A batch took so long."""
        second = int(now)
        if not self._cells or self._cells[-1][0] != second:
            self._cells.append((second, {}))
        found = self._cells[-1][1].setdefault(images, [0, 0.0])
        found[0] += 1
        found[1] += seconds

    def sizes(self, now: float) -> list[RecentSize]:
        """Every size that was run, the smallest first."""
        sums: dict[int, list[float]] = {}
        for second, cell in self._cells:
            if second <= now - RECENT_S:
                continue
            for images, (batches, seconds) in cell.items():
                found = sums.setdefault(images, [0, 0.0])
                found[0] += batches
                found[1] += seconds
        return [RecentSize(images, int(n), total / n) for images, (n, total) in sorted(sums.items())]
