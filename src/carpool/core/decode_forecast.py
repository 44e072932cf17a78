"""Foresees when a picture that comes now will be decoded.

Pictures wait for a few threads that share their cores with everything else on the machine. So what counts is
the wall time that decoding takes now, with whatever neighbours there are, not what it would take alone.
"""

from __future__ import annotations

from math import exp
from typing import Final

DECODE_WEIGHT: Final = 0.15
DECODE_MOST: Final = 4.0
DECODE_SURPRISE: Final = 0.2
DECODE_MEMORY_S: Final = 0.5
"""One picture moves what decoding is thought to take by so much of the difference, and counts at most as four
times what was thought: some ten pictures show a neighbour that starts or ends, and one picture that takes a
hundred times as long as the others does not shut the gate. One that came later than foreseen moves the next
forecast by a fifth of that, and half a second later most of it is forgotten: a gate that was shut for it
would never learn that it is over."""


class _DecodeKind:
    """Holds what is known of pictures that take about as long: they are under way, and how long they take."""

    __slots__ = ("busy", "pace", "running", "surprise", "surprised")

    def __init__(self) -> None:
        self.pace = 0.0  # seconds for a weight of 1, in one thread
        self.busy = 0  # threads
        self.running = 0.0  # weight
        self.surprise = 0.0  # how much later than foreseen they were decoded lately
        self.surprised = 0.0  # when


class DecodeForecast:
    """Learns what decoding takes, from every picture. `weight` is how much work one is, in any unit.

    Pictures above `long` leave a thread to the others, of which there are at least two (`threads` for short
    ones). Each kind has a forecast of its own: who sends short ones neither waits for the long ones that run
    beside them nor is surprised when those take longer.
    """

    __slots__ = ("_kinds", "_long", "_threads")

    def __init__(self, threads: int, long: float = float("inf")) -> None:
        self._threads = threads
        self._long = long
        self._kinds = (_DecodeKind(), _DecodeKind())

    def began(self, weight: float) -> None:
        kind = self._kinds[weight > self._long]
        kind.running += weight
        kind.busy += 1

    def ended(self, weight: float, seconds: float) -> None:
        kind = self._kinds[weight > self._long]
        kind.running -= weight
        kind.busy -= 1
        pace = seconds / weight
        if kind.pace:
            # One that takes for ever says little of the next; if they all do, so will the forecast.
            pace = kind.pace + DECODE_WEIGHT * (min(pace, DECODE_MOST * kind.pace) - kind.pace)
        kind.pace = pace

    def came_true(self, weight: float, foreseen: float, taken: float, now: float) -> None:
        """It was said to take so many seconds until it is there, and took that many."""
        kind = self._kinds[weight > self._long]
        surprise = self._surprise_at(kind, now)
        gap = taken - foreseen
        if gap > surprise:
            surprise += DECODE_SURPRISE * (gap - surprise)
        kind.surprise, kind.surprised = surprise, now

    def _surprise_at(self, kind: _DecodeKind, now: float) -> float:
        since = now - kind.surprised
        return kind.surprise * exp(-since / DECODE_MEMORY_S) if since > 0.0 else kind.surprise

    def seconds(self, weight: float, ahead: float, now: float) -> float:
        """Returns the seconds until one that comes now is decoded, with work of the weight `ahead` before
        it."""
        short, long = self._kinds
        kind = self._kinds[weight > self._long]
        beside = 0 if self._threads > 1 else 1  # threads of which short ones have no use
        if kind is short:
            threads = max(1, self._threads - max(0, long.busy - beside))
            before = ahead + short.running / 2 if ahead or short.busy >= threads else 0.0
        else:
            threads = max(1, self._threads - 1)
            full = long.busy >= threads or short.busy + long.busy >= self._threads + beside
            before = ahead + (short.running + long.running) / 2 if ahead or full else 0.0
        pace = kind.pace or short.pace or long.pace
        return (before / threads + weight) * pace + self._surprise_at(kind, now)
