"""Who may use a GPU when: batches side by side, captures alone, large batches' computing in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class Turns:
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


class Mark(Protocol):
    """An event of the device. Who waits for it waits for what was recorded until then, not for more."""

    def record(self, stream: Any) -> None: ...


class Waiting(Protocol):
    """A stream: what is launched on it later begins after the mark. No thread waits."""

    def wait_event(self, event: Any) -> None: ...


class Order:
    """Batches that fill a GPU by themselves compute there one after the other, in the order of their launch.

    At the same time they would slow each other down. Only the computing is in order: what a stream copies and
    decodes before, and copies back after, runs beside the computing of others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Mark | None = None  # the end of the computing that was launched last

    def launch(self, stream: Waiting, end: Mark, compute: Callable[[], object]) -> None:
        """`compute` only launches. `end` is this stream's own, and is used for each of its batches."""
        with self._lock:  # somebody in between would wait for a mark that is not made yet
            if self._last is not None and self._last is not end:
                stream.wait_event(self._last)
            compute()
            end.record(stream)
            self._last = end

    def leave(self, end: Mark) -> None:
        """Its stream has nothing under way, and comes no more."""
        with self._lock:
            if self._last is end:
                self._last = None


_turns: dict[int, Turns] = {}
_orders: dict[int, Order] = {}
_lock = threading.Lock()


def turns_of(gpu: int) -> Turns:
    with _lock:
        return _turns.setdefault(gpu, Turns())


def order_of(gpu: int) -> Order:
    with _lock:
        return _orders.setdefault(gpu, Order())
