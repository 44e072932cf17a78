"""Who may use a GPU when: batches side by side, captures alone, large batches' computing in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from carpool.errors import ModelError

# ---- who holds how much of a device's memory, and whether one more model fits, told before it is tried
# One ledger for each device of this process: memory belongs to the device, whichever engine asks for it.

SHARE = 0.9  # of what is free when the first model comes, where nobody says how much we may take


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
_limit: list[int] = []  # bytes that somebody set for every device, or nothing


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
    if ledger is None:  # a CPU, whose memory nobody counts
        return _MOST_PICTURES // _PICTURES_SHARE
    size = min(_MOST_PICTURES, ledger.room // _PICTURES_SHARE)
    ledger.hold(room_for_pictures, "images between steps", size)
    return size


def in_words(size: int) -> str:
    if size >= 10**9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 10**5 else f"{size} bytes"


# ---- who may use a GPU when: batches side by side, captures alone, large batches' computing in a row


class GpuTurns:
    """Batches run side by side on one GPU; a capture has it alone, for some milliseconds.

    While a graph is captured, other threads may not do what a capture forbids (allocate, wait for the whole
    device), and what decoders do inside is not ours to know. So every instance holds its own lock for each
    batch, which nobody contends, and whoever captures takes them all.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []
        self._door = threading.Lock()

    def join(self) -> threading.Lock:
        lock = threading.Lock()
        with self._door:
            self._locks.append(lock)
        return lock

    def leave(self, lock: threading.Lock) -> None:
        with self._door, suppress(ValueError):
            self._locks.remove(lock)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._door:
            held = list(self._locks)
            for lock in held:
                lock.acquire()
            try:
                yield
            finally:
                for lock in held:
                    lock.release()


class Order:
    """Batches that fill a GPU by themselves compute there one after the other, in the order of their launch.

    At the same time they would slow each other down. Only the computing is in order: what a stream copies and
    decodes before, and copies back after, runs beside the computing of others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None  # the end of the computing that was launched last

    def launch(self, stream: Any, end: Any, compute: Callable[[], object]) -> None:
        """`compute` only launches. `end` is this stream's own event, and is used for each of its batches. Who
        waits for an event waits for what was recorded until then, not for more; no thread waits."""
        with self._lock:  # somebody in between would wait for a mark that is not made yet
            if self._last is not None and self._last is not end:
                stream.wait_event(self._last)
            compute()
            end.record(stream)
            self._last = end

    def leave(self, end: Any) -> None:
        """Its stream has nothing under way, and comes no more."""
        with self._lock:
            if self._last is end:
                self._last = None


_turns: dict[int, GpuTurns] = {}
_orders: dict[int, Order] = {}


def turns_of(gpu: int) -> GpuTurns:
    with _lock:
        return _turns.setdefault(gpu, GpuTurns())


def order_of(gpu: int) -> Order:
    with _lock:
        return _orders.setdefault(gpu, Order())
