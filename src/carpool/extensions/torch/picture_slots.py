"""Keeps pictures on their device between the steps of a pipeline, within a budget.

Each is kept under the token of its lease (memory/picture_leases.py says how that begins and ends). No call
releases a single picture: a thread that needs room checks which leases still stand, and so does another one
every second. With the memory of a front end that is gone, all of its pictures go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from carpool.memory.picture_leases import LeaseSeen

Budget = Callable[[Any], int]
"""Takes a device; how many bytes of it pictures may take."""


class _Kept(NamedTuple):
    lease: LeaseSeen
    pixels: Any
    block: tuple[str, int]  # what its memory is a part of: the device's name, and where


class PictureSlots:
    """Keeps pictures for all threads. A picture that a thread has found stays while the thread refers to it,
    whatever becomes of its lease: then its memory is counted no more, for the time of a batch.

    Pictures that were decoded together share a block of memory, which goes with the last of them: it is
    the block that is counted.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget_of = budget
        self._budgets: dict[str, int] = {}
        self._used: dict[str, int] = {}  # by device
        self._blocks: dict[tuple[str, int], list[int]] = {}  # how many are in it, and its bytes
        self._kept: dict[int, dict[int, _Kept]] = {}  # by arena, and by token
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def bytes_used(self) -> int:
        return sum(self._used.values())

    def open(self, arena: int) -> None:
        """From here on its pictures may be kept."""
        with self._lock:
            self._kept[arena] = {}

    def forget(self, arena: int) -> None:
        """Its front end is gone."""
        with self._lock:
            for kept in self._kept.pop(arena, {}).values():
                self._leave(kept)

    def keep(self, arena: int, lease: LeaseSeen, pixels: Any) -> bool:
        """Keeps a picture; False where there is no room, or it is not needed any more."""
        device = str(pixels.device)
        memory = pixels.untyped_storage()
        block = (device, memory.data_ptr())
        with self._lock:
            there = self._kept.get(arena)
            if there is None or not lease.stands:
                return False
            if (before := there.pop(lease.token, None)) is not None:  # its batch is run again, in halves
                self._leave(before)
            if block not in self._blocks and not self._has_room(device, pixels.device, memory.nbytes()):
                return False
            counted = self._blocks.setdefault(block, [0, memory.nbytes()])
            if not counted[0]:
                self._used[device] = self._used.get(device, 0) + counted[1]
            counted[0] += 1
            there[lease.token] = _Kept(lease, pixels, block)
            return True

    def _has_room(self, device: str, place: Any, size: int) -> bool:
        if device not in self._budgets:
            self._budgets[device] = self._budget_of(place)
        if self._used.get(device, 0) + size > self._budgets[device]:
            self._look()
        return self._used.get(device, 0) + size <= self._budgets[device]

    def find(self, arena: int, token: int) -> Any:
        """Returns its pixels; None if it is not here (any more)."""
        with self._lock:
            kept = self._kept.get(arena, {}).get(token)
        return None if kept is None else kept.pixels

    def look(self) -> None:
        """Let go of all whose leases are over."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        for there in self._kept.values():
            for token in [token for token, kept in there.items() if not kept.lease.stands]:
                self._leave(there.pop(token))

    def _leave(self, kept: _Kept) -> None:
        counted = self._blocks[kept.block]
        counted[0] -= 1
        if not counted[0]:
            self._used[kept.block[0]] -= counted[1]
            del self._blocks[kept.block]
