"""Defines what is counted: every column of the shared table, declared once.

One row of the table belongs to one model version, row 0 to the server itself. All cells are float64: counts
are exact up to 2**53, sums of seconds keep their microseconds for years, and the hot path needs one view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType, TypeAlias

from carpool.core.job import Reason
from carpool.extension import Columns
from carpool.extensions import installed

Column = NewType("Column", int)


@dataclass(frozen=True, slots=True)
class HistogramColumns:
    """Describes adjacent cells: one per upper bound, one for everything above, then the sum of what was
    observed."""

    first: Column
    bounds: tuple[float, ...]
    sum: Column

    @property
    def buckets(self) -> slice:
        return slice(self.first, self.sum)


Counted: TypeAlias = "Column | HistogramColumns | dict[str, Column]"


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
        """Declares a value that only grows, where the largest of all processes counts."""
        column = self.counter()
        self.maxima.append(column)
        return column

    def gauge(self, *, largest: bool = False) -> Column:
        """A value of the moment: it ends with its process. Those of several add up, or the largest counts."""
        column = self.latest() if largest else self.counter()
        self.gauges.append(column)
        return column

    def by_word(self, words: Iterable[str], *, gauges: bool = False) -> dict[str, Column]:
        return {word: self.gauge() if gauges else self.counter() for word in words}

    def counted(self, columns: Columns) -> Counted:
        """Lays out what an extension counts."""
        if columns.kind == "histogram":
            given = columns.bounds
            return self.histogram(BOUNDS[given] if isinstance(given, str) else given)
        if columns.kind == "state":
            return {word: Column(place) for place, word in enumerate(columns.words)}
        if columns.words:
            return {word: self._one(columns.kind) for word in columns.words}
        return self._one(columns.kind)

    def _one(self, kind: str) -> Column:
        return self.counter() if kind == "counter" else self.gauge(largest=kind == "largest")

    def histogram(self, bounds: tuple[float, ...]) -> HistogramColumns:
        first = self.counter()
        for _ in bounds:
            self.counter()
        return HistogramColumns(first, bounds, self.counter())


SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0),
)
"""The promises people make (20, 30, 50, 100, 200 ms…) are bounds: the share that kept one is then exact.
So are those of Triton's own histogram, which is read from the same cells."""

BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

BOUNDS: Mapping[str, tuple[float, ...]] = {"seconds": SECONDS_BOUNDS, "images": BATCH_BOUNDS}
"""As extensions name them."""

FAILURE_WORDS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
SHED_WORDS = tuple(reason.value for reason in Reason)
PROCESS_WORDS = (
    *("engine", "http", "grpc", "worker"),
    *(process.name for extension in installed().values() for process in extension.processes),
)
MODEL_STATES: Mapping[str, int] = {"ready": 0, "loading": 1, "unloading": 2, "failed": 3, "unloaded": 4}
"""Not in the table: a model that failed has no row. Their places in what is read for the metrics page."""
FAN_OUT_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0)

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
OFFERED = _layout.counter()  # images; what comes to the engine is counted there

# A model version, counted by the engine.
QUEUE_SECONDS = _layout.histogram(SECONDS_BOUNDS)
INFER_SECONDS = _layout.histogram(SECONDS_BOUNDS)
BATCH_SIZE = _layout.histogram(BATCH_BOUNDS)
INPUT_SECONDS = _layout.counter()
OUTPUT_SECONDS = _layout.counter()
LAST_INFERENCE_MS = _layout.latest()
PENDING = _layout.gauge()
SATURATION = _layout.gauge(largest=True)
CAPACITY = _layout.gauge(largest=True)
LOAD = _layout.gauge(largest=True)  # one more than that: 0 is for a model whose capacity is not known
SPEED_RATIO = _layout.gauge(largest=True)
LOAD_SECONDS = _layout.gauge(largest=True)
RUN_MEMORY = _layout.gauge(largest=True)
SLO_SECONDS = _layout.gauge(largest=True)
UNBATCHED = _layout.gauge(largest=True)
OUT_OF_MEMORY = _layout.counter()
COMPILED_SIZES: Mapping[str, Column] = _layout.by_word(("compiled", "plain"), gauges=True)
BACKGROUND: Mapping[str, Column] = _layout.by_word(("ran", "skipped"))

# A step of a model that is made of several, which has a row of its own. Its phases are counted as those of a
# model: the queue, the batch, and in POST_SECONDS the time between its source's end and its own beginning.
FAN_OUT = _layout.histogram(FAN_OUT_BOUNDS)
STEP_LATER = _layout.gauge(largest=True)
STEP_WASTED = _layout.counter()
STEP_PHASES: Mapping[str, HistogramColumns] = {
    "between": POST_SECONDS,
    "queue": QUEUE_SECONDS,
    "infer": INFER_SECONDS,
}

# The server.
UP = _layout.gauge()  # of the engine 1; of the supervisor -1 while that engine stands still
CONNECTIONS = _layout.gauge()
BYTES_RECEIVED = _layout.counter()
BYTES_SENT = _layout.counter()
RESTARTS: Mapping[str, Column] = _layout.by_word(PROCESS_WORDS)

OF_EXTENSIONS: Mapping[tuple[str, str], Counted] = {
    (extension.name, columns.name): _layout.counted(columns)
    for extension in installed().values()
    for columns in extension.columns
}
"""By the extension's name and the name that it has given."""


def by_word(extension: str, name: str) -> Mapping[str, Column]:
    """Returns the columns of an extension that has one for each word."""
    found = OF_EXTENSIONS[extension, name]
    assert isinstance(found, dict)
    return found


def single(extension: str, name: str) -> Column:
    """Returns the one column of an extension under this name."""
    found = OF_EXTENSIONS[extension, name]
    assert isinstance(found, int)
    return Column(found)


def histogram(extension: str, name: str) -> HistogramColumns:
    """Returns the histogram of an extension under this name."""
    found = OF_EXTENSIONS[extension, name]
    assert isinstance(found, HistogramColumns)
    return found


def summed(extension: str, source: str) -> tuple[Column, ...]:
    """Returns the columns of an extension whose cells add up to `source`: its column under a name, or as
    `name=word+word` those of some words."""
    name, _, words = source.partition("=")
    if not words:
        return (single(extension, name),)
    found = by_word(extension, name)
    return tuple(found[word] for word in words.split("+"))


WIDTH = _layout.width
MAXIMA = tuple(_layout.maxima)
GAUGES = tuple(_layout.gauges)
