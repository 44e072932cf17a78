"""What is counted: every column of the shared table, declared once.

One row of the table belongs to one model version, row 0 to the server itself. All cells are float64: counts
are exact up to 2**53, sums of seconds keep their microseconds for years, and the hot path needs one view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

from carpool.core.job import Reason

Column = NewType("Column", int)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Adjacent cells: one per upper bound, one for everything above, then the sum of what was observed."""

    first: Column
    bounds: tuple[float, ...]
    sum: Column

    @property
    def buckets(self) -> slice:
        return slice(self.first, self.sum)


class _Layout:
    """Hands out columns in order and remembers which of them are not simply summed."""

    def __init__(self) -> None:
        self.width = 0
        self.maxima: list[int] = []
        self.gauges: list[int] = []

    def counter(self) -> Column:
        self.width += 1
        return Column(self.width - 1)

    def latest(self) -> Column:
        """A value that only grows, where the largest of all processes counts."""
        column = self.counter()
        self.maxima.append(column)
        return column

    def gauge(self, *, largest: bool = False) -> Column:
        """A value of the moment: it ends with its process. Those of several add up, or the largest counts."""
        column = self.latest() if largest else self.counter()
        self.gauges.append(column)
        return column

    def by_word(self, words: Iterable[str]) -> dict[str, Column]:
        return {word: self.counter() for word in words}

    def histogram(self, bounds: tuple[float, ...]) -> Histogram:
        first = self.counter()
        for _ in bounds:
            self.counter()
        return Histogram(first, bounds, self.counter())


SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0),
)
"""The promises people make (20, 30, 50, 100, 200 ms…) are bounds: the share that kept one is then exact.
So are those of Triton's own histogram, which is read from the same cells."""

BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

FAILURE_WORDS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
SHED_WORDS = tuple(reason.value for reason in Reason)
PROCESS_WORDS = ("engine", "http", "grpc", "worker")

_layout = _Layout()

GENERATION = _layout.counter()
"""Which life of the row this block's cells belong to: first, so that a reader meets it before them."""

# A model version, counted where the request is answered. Successes are the observations of REQUEST_SECONDS.
REQUEST_SECONDS = _layout.histogram(SECONDS_BOUNDS)
DECODE_SECONDS = _layout.histogram(SECONDS_BOUNDS)
POST_SECONDS = _layout.histogram(SECONDS_BOUNDS)
FAILURES: Mapping[str, Column] = _layout.by_word(FAILURE_WORDS)
FAILURE_SECONDS = _layout.counter()
SHED: Mapping[str, Column] = _layout.by_word(SHED_WORDS)

# A model version, counted by the engine.
QUEUE_SECONDS = _layout.histogram(SECONDS_BOUNDS)
INFER_SECONDS = _layout.histogram(SECONDS_BOUNDS)
BATCH_SIZE = _layout.histogram(BATCH_BOUNDS)
INPUT_SECONDS = _layout.counter()
OUTPUT_SECONDS = _layout.counter()
LAST_INFERENCE_MS = _layout.latest()
PENDING = _layout.gauge()
SATURATION = _layout.gauge(largest=True)
SPEED_RATIO = _layout.gauge(largest=True)
LOAD_SECONDS = _layout.gauge(largest=True)
SLO_SECONDS = _layout.gauge(largest=True)
OUT_OF_MEMORY = _layout.counter()
SPARE: Mapping[str, Column] = _layout.by_word(("ran", "skipped"))

# The server.
UP = _layout.gauge()  # of the engine 1; of the supervisor -1 while that engine stands still
CONNECTIONS = _layout.gauge()
BYTES_RECEIVED = _layout.counter()
BYTES_SENT = _layout.counter()
RESTARTS: Mapping[str, Column] = _layout.by_word(PROCESS_WORDS)

WIDTH = _layout.width
MAXIMA = tuple(_layout.maxima)
GAUGES = tuple(_layout.gauges)
