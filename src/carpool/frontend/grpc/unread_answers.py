"""Answers of streams that wait for their clients: how many bytes they are, and who is cut off.

A client that grants no window, or does not read its socket, makes its answers wait. One that takes next to
nothing for a while is cut off. When all together have more waiting than a bound, so is whoever has taken
nothing for longest: who reads a large answer makes progress, and who only holds memory does not.
"""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from carpool.frontend.http.limits import Limits

MOST_UNREAD = 256 << 20
"""Bytes of answers that wait, of all streams of a front end together."""


class Reader(Protocol):
    """One stream."""

    @property
    def taken(self) -> int:
        """Bytes that went out to it, ever."""

    def cut(self) -> None:
        """Free what waits for it, and end it. It has left then."""


class _Waiting:
    __slots__ = ("bytes", "since", "taken")

    def __init__(self, taken: int, now: float) -> None:
        self.bytes = 0
        self.taken = taken  # when it last made progress, which was at `since`
        self.since = now


class UnreadAnswers:
    """Of the loop's thread. As in HTTP, a client must take `progress` bytes within `patience_s`."""

    def __init__(self, most: int = MOST_UNREAD, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._progress = limits.min_progress_bytes
        self.patience_s = limits.write_timeout_s
        self.most = most
        self._waiting: dict[Reader, _Waiting] = {}
        self.total = 0

    def add(self, reader: Reader, size: int) -> None:
        """So many bytes more wait for it. It may be cut off then, or others are."""
        waiting = self._waiting.get(reader)
        if waiting is None:
            waiting = self._waiting[reader] = _Waiting(reader.taken, monotonic())
        waiting.bytes += size
        self.total += size
        if self.total > self.most:
            self._make_room(monotonic())

    def written(self, reader: Reader, size: int) -> None:
        waiting = self._waiting.get(reader)
        if waiting is None:
            return
        waiting.bytes -= size
        self.total -= size
        if not waiting.bytes:
            del self._waiting[reader]

    def left(self, reader: Reader) -> None:
        """Nothing waits for it any more."""
        waiting = self._waiting.pop(reader, None)
        if waiting is not None:
            self.total -= waiting.bytes

    def sweep(self, now: float) -> None:
        """Cut off who takes too little for too long."""
        self._look(now)
        for reader, waiting in list(self._waiting.items()):
            if now - waiting.since >= self.patience_s:
                reader.cut()

    def _look(self, now: float) -> None:
        for reader, waiting in self._waiting.items():
            if reader.taken - waiting.taken >= self._progress:
                waiting.taken, waiting.since = reader.taken, now

    def _make_room(self, now: float) -> None:
        self._look(now)
        stalest = sorted(self._waiting.items(), key=lambda one: (one[1].since, -one[1].bytes))
        for reader, _ in stalest:
            if self.total <= self.most:
                return
            reader.cut()
