"""Describes one request of the generator, and what became of all of them: counted, merged, and written to a
file."""

from __future__ import annotations

import csv
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import ceil, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.load.token_times import Streamed


class Kind(Enum):
    """Every request that was due is one of these at the end."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the server said no: overload, a deadline, not ready
    FAILED = "failed"  # an error, a broken connection, an answer that is none
    TIMED_OUT = "timed-out"  # this client stopped waiting
    UNANSWERED = "unanswered"  # still open when the run was over


class Timing(NamedTuple):
    """Where the server says the time went, in seconds, and how many images shared the batch."""

    queue: float  # from the last byte of the request
    infer: float
    batch: int
    post: float | None = None  # None: it does not say

    @property
    def inside(self) -> float | None:
        """Returns all the time that the server reports, if it does. Decoding is in the queue: that counts
        from arrival."""
        return None if self.post is None else self.queue + self.infer + self.post


class Answer(NamedTuple):
    """Describes what a client reports of one request; `reason` is a word for everything but an answer."""

    kind: Kind
    reason: str = ""
    timing: Timing | None = None
    stream: Streamed | None = None


PLAIN_ANSWER = Answer(Kind.ANSWERED)


def failed(reason: str) -> Answer:
    return Answer(Kind.FAILED, reason)


@dataclass(slots=True, eq=False)
class Ticket:
    """Represents one request on its way. Times are seconds from the start of the run."""

    number: int
    intended: float
    phase: int = 0
    images: int = 1
    source: str = ""
    started: float = 0.0  # when the generator got to it
    sent: float | None = None  # when its first byte was handed to a connection
    done: bool = False
    handle: object = None  # the client's own: what to let go of if the request is abandoned


Tell = Callable[[Ticket, Answer], None]
"""Called once for each ticket, unless it was let go before."""
Clock = Callable[[], float]
"""Seconds from the start of the run."""


class Target(Protocol):
    """Represents a client of one server. To be used on one event loop."""

    name: str  # for people: the address and what is asked there

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        """Get ready for about `expected` requests at once."""

    def send(self, ticket: Ticket) -> None:
        """Send it now, or when there is a connection; `ticket.sent` is set to when that was."""

    def let_go(self, ticket: Ticket) -> None:
        """Abandons a request whose answer is no longer wanted."""

    async def close(self) -> None: ...

    def facts(self) -> dict[str, int]:
        """Returns numbers of its own for the report, like how many connections there were."""


_GROWTH = 1.01
_PER_BUCKET = 1 / log(_GROWTH)
_SMALLEST = 1e-6  # a microsecond: everything below it is one bucket

RELATIVE_ERROR = sqrt(_GROWTH) - 1


class Histogram:
    """Counts values of 0 or more. Count, mean, least and most are exact, percentiles within
    `RELATIVE_ERROR`."""

    __slots__ = ("buckets", "count", "least", "most", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = float("inf")
        self.most = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if value < 0:
            value = 0.0
        index = int(log(value / _SMALLEST) * _PER_BUCKET) + 1 if value > _SMALLEST else 0
        buckets = self.buckets
        buckets[index] = buckets.get(index, 0) + 1
        self.count += 1
        self.total += value
        if value > self.most:
            self.most = value
        if value < self.least:
            self.least = value

    def merge(self, other: Histogram) -> None:
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self.least = min(self.least, other.least)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Returns the smallest value that `share` of all values do not exceed; 0 if there are none."""
        return self.percentiles([share])[0]

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """Returns percentiles for shares that rise."""
        found = []
        seen = 0
        ordered = iter(sorted(self.buckets.items()))
        index = 0
        for share in shares:
            rank = min(max(1, ceil(share * self.count)), self.count)
            while seen < rank:
                index, count = next(ordered)
                seen += count
            middle = _SMALLEST * _GROWTH ** (index - 0.5) if index else _SMALLEST
            found.append(min(max(middle, self.least), self.most) if self.count else 0.0)
        return found


SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """All zero if there was nothing to measure: see `count`."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


def spread(histogram: Histogram, scale: float) -> Spread:
    values = [value * scale for value in histogram.percentiles(SHARES.values())]
    named = dict(zip(SHARES, (round(value, 4) for value in values), strict=True))
    mean, most = round(histogram.mean * scale, 4), round(histogram.most * scale, 4)
    return Spread(histogram.count, mean, **named, max=most)


def milliseconds(histogram: Histogram) -> Spread:
    return spread(histogram, 1e3)


class _Counts:
    """Holds numbers, counters and histograms, each of which can be added to its like."""

    def merge(self, other: Self) -> None:
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
            elif isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                getattr(self, name).merge(value)


class Slice(_Counts):
    """Describes what happened in a short while, by the clock: for a live display."""

    def __init__(self) -> None:
        self.offered = 0
        self.answered = 0
        self.good = 0
        self.refused = 0
        self.failed = 0  # and everything else that went wrong
        self.response = Histogram()


class Tally(_Counts):
    """Counts the requests of one phase, whenever they ended. Every one that was offered is in one of five
    counts."""

    def __init__(self) -> None:
        self.offered = 0
        self.sent = 0
        self.answered = 0
        self.good = 0  # answered within the SLO
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.timed_out = 0
        self.unanswered = 0
        self.images = 0  # of those answered
        self.response = Histogram()  # of those answered, from the intended time
        self.service = Histogram()  # of those answered, from the time they were sent
        self.refusal = Histogram()  # of those refused, from the intended time
        self.start_lag = Histogram()  # from the intended time until the generator got to it
        self.send_lag = Histogram()  # from the intended time until it was sent
        self.queue = Histogram()
        self.infer = Histogram()
        self.outside = Histogram()  # of the service time, what the server does not know of
        self.batch = Histogram()
        self.tokens = 0  # pieces of streams, of those answered
        self.first_token = Histogram()  # from the intended time
        self.token_interval = Histogram()  # from a piece to the next

    def start(self, ticket: Ticket) -> None:
        self.offered += 1
        self.start_lag.add(ticket.started - ticket.intended)

    def end(self, ticket: Ticket, now: float, answer: Answer, slo: float | None) -> bool:
        """Returns whether it was answered in time."""
        if ticket.sent is not None:
            self.sent += 1
            self.send_lag.add(ticket.sent - ticket.intended)
        response = now - ticket.intended
        if answer.kind is Kind.ANSWERED:
            self._answer(ticket, now, answer, response)
            if slo is None or response <= slo:
                self.good += 1
                return True
        elif answer.kind is Kind.REFUSED:
            self.refused[answer.reason] += 1
            self.refusal.add(response)
        elif answer.kind is Kind.FAILED:
            self.failed[answer.reason] += 1
        elif answer.kind is Kind.TIMED_OUT:
            self.timed_out += 1
        else:
            self.unanswered += 1
        return False

    def _answer(self, ticket: Ticket, now: float, answer: Answer, response: float) -> None:
        self.answered += 1
        self.images += ticket.images
        self.response.add(response)
        service = now - (ticket.intended if ticket.sent is None else ticket.sent)
        self.service.add(service)
        if answer.stream is not None and answer.stream.times:
            times = answer.stream.times
            self.tokens += len(times)
            self.first_token.add(times[0] - ticket.intended)
            for one, other in pairwise(times):
                self.token_interval.add(other - one)
        timing = answer.timing
        if timing is not None:
            self.queue.add(timing.queue)
            self.infer.add(timing.infer)
            self.batch.add(timing.batch)
            if timing.inside is not None:
                self.outside.add(service - timing.inside)


Record = Callable[[Ticket, float, Answer], None]

_TIMED_OUT = Answer(Kind.TIMED_OUT)
_UNANSWERED = Answer(Kind.UNANSWERED)


class Ledger:
    """Counts a request once, however many ends it seems to have."""

    def __init__(
        self, phases: int, *, slo: float | None, timeout: float, record: Record | None = None
    ) -> None:
        self.tallies = [Tally() for _ in range(phases)]
        self.open = 0
        self.last_answer = 0.0
        self._slo = slo
        self._timeout = timeout
        self._record = record
        self._waiting: deque[Ticket] = deque()  # in the order of their intended times; some have ended
        self._slice = Slice()

    def start(self, ticket: Ticket, now: float) -> None:
        """The generator got to a request that was due."""
        ticket.started = now
        self.open += 1
        self._slice.offered += 1
        self.tallies[ticket.phase].start(ticket)
        self._waiting.append(ticket)

    def end(self, ticket: Ticket, now: float, answer: Answer) -> bool:
        """Returns whether this was its end: what comes after a timeout is of no interest any more."""
        if ticket.done:
            return False
        ticket.done = True
        self.open -= 1
        good = self.tallies[ticket.phase].end(ticket, now, answer, self._slo)
        self._watch(ticket, now, answer, good)
        if self._record is not None:
            self._record(ticket, now, answer)
        return True

    def expire(self, now: float) -> list[Ticket]:
        """Those whose time is up, ended as timed out; to be called often."""
        found = []
        while self._waiting and (self._waiting[0].done or now - self._waiting[0].intended >= self._timeout):
            ticket = self._waiting.popleft()
            if self.end(ticket, now, _TIMED_OUT):
                found.append(ticket)
        return found

    def abandon(self, now: float) -> list[Ticket]:
        """Ends the requests that are still open as unanswered, and returns them."""
        found = [ticket for ticket in self._waiting if self.end(ticket, now, _UNANSWERED)]
        self._waiting.clear()
        return found

    def cut(self) -> Slice:
        """Returns what happened since the last cut."""
        done, self._slice = self._slice, Slice()
        return done

    def _watch(self, ticket: Ticket, now: float, answer: Answer, good: bool) -> None:
        seen = self._slice
        if answer.kind is Kind.ANSWERED:
            self.last_answer = now
            seen.answered += 1
            seen.good += good
            seen.response.add(now - ticket.intended)
        elif answer.kind is Kind.REFUSED:
            seen.refused += 1
        else:
            seen.failed += 1


COLUMNS = (
    *("number", "phase", "intended_s", "sent_s", "ended_s", "outcome", "reason", "source", "images"),
    *("queue_ms", "infer_ms", "batch"),
)
SUFFIXES = (".jsonl", ".csv")


@contextmanager
def request_log(path: Path) -> Iterator[Record]:
    """Writes JSON lines or CSV, by the name of the file. Call what it yields with every request that ends."""
    if path.suffix not in SUFFIXES:
        raise InvalidInput(f"--save must name a .jsonl or .csv file, not {path}")
    try:
        file = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise InvalidInput(f"--save: cannot write {path}: {error.strerror or error}") from None
    with file:
        table = csv.writer(file) if path.suffix == ".csv" else None
        if table is not None:
            table.writerow(COLUMNS)

        def record(ticket: Ticket, now: float, answer: Answer) -> None:
            timing = answer.timing
            times: tuple[float | None, ...] = (None, None, None)
            if timing is not None:
                times = round(timing.queue * 1e3, 3), round(timing.infer * 1e3, 3), timing.batch
            sent = None if ticket.sent is None else round(ticket.sent, 6)
            began = (ticket.number, ticket.phase, round(ticket.intended, 6), sent, round(now, 6))
            row = (*began, answer.kind.value, answer.reason, ticket.source, ticket.images, *times)
            if table is not None:
                table.writerow(row)
            else:
                file.write(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n")

        yield record
