"""Says whose work is done next, of what waits for a thread or a turn.

Work waits by client, and each client's in its order. Start-time fair queueing: each client has had some
seconds of work, counted from where the least served stood when it came. The client that had least goes first.
Clients that are about even are one queue, in which the most urgent goes first: those who ask for little keep
the order of their deadlines. A client that has had its part of the time rests (`Accounts.rest_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from carpool.core.job import INFINITY

T = TypeVar("T")

EVEN_S = 0.05
"""Seconds of work by which two clients may differ and count as even."""


class _Line(Generic[T]):
    """Holds what one client waits for."""

    __slots__ = ("heap", "running", "served", "weight")

    def __init__(self, served: float) -> None:
        self.heap: list[tuple[float, int, T, float]] = []  # urgency, arrival, what it is, its weight
        self.served = served  # seconds of work, on the scale of all lines
        self.running = 0
        self.weight = 0.0  # of what waits


class FairQueue(Generic[T]):
    """`alive` says of an item whether it is still wanted: the others are passed over. `rest_s` says for how
    many seconds a client is to rest at a time: until then, others go first."""

    def __init__(
        self, alive: Callable[[T], object], rest_s: Callable[[str, float], float] | None = None
    ) -> None:
        self._alive = alive
        self._rest_s = rest_s
        self.rests_s = INFINITY  # seconds until the first client has rested, of those that `pop` passed over
        self._lines: dict[str, _Line[T]] = {}
        self._number = 0
        self._floor = 0.0  # where a client begins that comes anew

    def push(self, client: str, urgency: float, item: T, weight: float = 0.0) -> None:
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(self._floor)
        self._number += 1
        line.weight += weight
        heappush(line.heap, (urgency, self._number, item, weight))

    def pop(self, may: Callable[[T], bool] | None = None, now: float = 0.0) -> tuple[str, T] | None:
        """Returns the next item that is wanted and `may` begin now, and whose it is. Call `ended` for it
        later."""
        self.rests_s = INFINITY
        first: list[tuple[float, float, int, str]] = []  # of each client: how much it had, and how urgent
        for client in list(self._lines):
            line = self._lines[client]
            heap = line.heap
            while heap and not self._alive(heap[0][2]):
                heappop(heap)
            if not heap:
                if not line.running and line.served <= self._floor:
                    del self._lines[client]
            elif (may is None or may(heap[0][2])) and (
                self._rest_s is None or self._has_rested(self._rest_s(client, now))
            ):
                first.append((line.served, heap[0][0], heap[0][1], client))
        if not first:
            return None
        served, _, _, chosen = min(first)
        if len(first) > 1:
            chosen = min(first, key=lambda one: (one[0] > served + EVEN_S, one[1:]))[3]
        self._floor = max(self._floor, served)
        line = self._lines[chosen]
        line.running += 1
        _, _, item, weight = heappop(line.heap)
        line.weight -= weight
        return chosen, item

    def _has_rested(self, rest_s: float) -> bool:
        if rest_s > 0.0:
            self.rests_s = min(self.rests_s, rest_s)
        return rest_s <= 0.0

    def left(self, client: str, weight: float) -> None:
        """Notes that so much of what waited is not wanted any more."""
        line = self._lines.get(client)
        if line is not None:
            line.weight -= weight

    def ended(self, client: str, seconds: float) -> None:
        """What was begun took so long."""
        line = self._lines.get(client)
        if line is not None:
            line.running -= 1
            line.served += seconds

    def running(self, client: str) -> int:
        """Returns how much of a client's was begun and has not ended."""
        line = self._lines.get(client)
        return 0 if line is None else line.running

    def served(self, client: str, seconds: float) -> None:
        """So much was done for a client besides."""
        line = self._lines.get(client)
        if line is not None:
            line.served += seconds

    def ahead(self, client: str, weight: float) -> float:
        """Returns the weight of what waits and comes before so much more of this client's: its own, and of
        each other client's as much as this client then has."""
        line = self._lines.get(client)
        before = 0.0 if line is None else line.weight
        mine = before + weight
        for name, other in self._lines.items():
            if name != client:
                before += other.weight if other.weight < mine else mine
        return before

    def waiting(self, client: str) -> int:
        """Returns how many of a client's items wait and are wanted."""
        line = self._lines.get(client)
        return 0 if line is None else sum(1 for entry in line.heap if self._alive(entry[2]))

    def compact(self) -> None:
        """Forget what is not wanted any more and would keep its memory."""
        for line in self._lines.values():
            line.heap = [entry for entry in line.heap if self._alive(entry[2])]
            heapify(line.heap)

    def __iter__(self) -> Iterator[T]:
        """Returns all that wait, by urgency."""
        entries = sorted(
            (entry[:2], index, client)
            for client, line in self._lines.items()
            for index, entry in enumerate(line.heap)
        )
        return iter([self._lines[client].heap[index][2] for _, index, client in entries])

    def clear(self) -> None:
        self._lines.clear()
