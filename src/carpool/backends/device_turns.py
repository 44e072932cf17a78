"""Who may use a GPU when: batches side by side, captures alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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


_turns: dict[int, Turns] = {}
_lock = threading.Lock()


def turns_of(gpu: int) -> Turns:
    with _lock:
        return _turns.setdefault(gpu, Turns())
