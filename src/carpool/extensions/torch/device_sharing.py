"""Who may use a GPU when: batches side by side, captures alone, large batches' computing in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_lock = threading.Lock()


class GpuTurns:
    """Batches run side by side on one GPU; a capture has it alone, for some milliseconds.

    While a graph is captured, other threads may not do what a capture forbids (allocate, wait for the whole
    device), and what decoders do inside is not known here. So every instance holds its own lock for each
    batch, which is uncontended, and a thread that captures takes all of them.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []
        self._engine = threading.Lock()

    def join(self) -> threading.Lock:
        lock = threading.Lock()
        with self._engine:
            self._locks.append(lock)
        return lock

    def leave(self, lock: threading.Lock) -> None:
        with self._engine, suppress(ValueError):
            self._locks.remove(lock)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._engine:
            held = list(self._locks)
            for lock in held:
                lock.acquire()
            try:
                yield
            finally:
                for lock in held:
                    lock.release()

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Lets batches run, and no capture begin: what waits for the whole device would spoil one."""
        with self._engine:
            yield


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
        with self._lock:  # another thread in between would wait for an event that is not recorded yet
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
