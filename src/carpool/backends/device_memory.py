"""Counts who holds how much of a device's memory, and whether one more model fits, before it is tried.

There is one ledger for each device of this process: memory belongs to the device, whichever engine asks for
it.
"""

from __future__ import annotations

import threading
from typing import Any

from carpool.errors import ModelError

SHARE = 0.9  # of what is free when the first model is loaded, where no limit is set


class MemoryLedger:
    """Counts bytes by holder. A model's instances share its weights, and hold their own buffers."""

    def __init__(self, device: str, most: int) -> None:
        self.device = device
        self.most = most
        self._held: dict[object, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self.loading = threading.RLock()  # one at a time: what the device holds more afterwards is this one's

    @property
    def used(self) -> int:
        with self._lock:
            return sum(size for _, size in self._held.values())

    @property
    def room(self) -> int:
        return max(0, self.most - self.used)

    def check(self, model: str, needed: int, what: str) -> None:
        """Raises with the numbers where so much more does not fit."""
        if needed > self.room:
            holders = sorted(self.by_model().items())
            held = ", ".join(f"{name} {in_words(size)}" for name, size in holders) or "no other model"
            raise ModelError(
                f"{model}: {what} {in_words(needed)} on {self.device}, and {in_words(self.room)} of the "
                f"budget of {in_words(self.most)} is left ({held} in use); unload another model, lower "
                "max_batch, or allow more (device_memory_gb)",
                reason="device-memory",
            )

    def hold(self, holder: object, model: str, size: int) -> None:
        with self._lock:
            self._held[holder] = (model, max(0, size))

    def drop(self, holder: object) -> None:
        with self._lock:
            self._held.pop(holder, None)

    def by_model(self) -> dict[str, int]:
        with self._lock:
            sizes: dict[str, int] = {}
            for model, size in self._held.values():
                sizes[model] = sizes.get(model, 0) + size
            return sizes


_ledgers: dict[str, MemoryLedger] = {}
_lock = threading.Lock()
_limit: list[int] = []  # bytes that are set for every device, or empty: no limit is set


def limit_device_memory(gigabytes: float | None) -> None:
    """Applies to devices that no model was loaded on yet; None leaves it to what is free then."""
    with _lock:
        _limit[:] = [] if gigabytes is None else [round(gigabytes * 1e9)]


def ledger_of(device: Any) -> MemoryLedger:
    """Made when the first model comes: whatever others hold of the device then is not ours to give away."""
    with _lock:
        ledger = _ledgers.get(device.name)
        if ledger is None:
            most = _limit[0] if _limit else round(SHARE * device.free())
            device.limit(device.allocated() + most)
            ledger = _ledgers[device.name] = MemoryLedger(device.name, most)
        return ledger


_MOST_PICTURES = 2 << 30
_PICTURES_SHARE = 8  # at most this part of what models leave


def room_for_pictures(device: Any) -> int:
    """Returns the bytes of it for pictures that stay there between the steps of a pipeline. Asked once, when
    the first comes: from then on models have that much less."""
    with _lock:
        ledger = _ledgers.get(str(device))
    if ledger is None:  # a CPU, whose memory is not counted
        return _MOST_PICTURES // _PICTURES_SHARE
    size = min(_MOST_PICTURES, ledger.room // _PICTURES_SHARE)
    ledger.hold(room_for_pictures, "images between steps", size)
    return size


def in_words(size: int) -> str:
    if size >= 10**9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 10**5 else f"{size} bytes"
