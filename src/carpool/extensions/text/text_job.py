"""Defines the inputs and results of text_scheduler.py: answers to be written, and the work they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from carpool.core.job import INFINITY, NEW, JobState, Reason

_SWEEP_AT = 64


@dataclass(frozen=True, slots=True)
class TextPromise:
    """Promises the first token within `ttft` seconds, each further one within `per_token`, all within
    `slo`."""

    slots: int  # of each decoder
    max_tokens: int
    ttft: float = INFINITY
    per_token: float = INFINITY
    slo: float = INFINITY
    max_queue: int = 4096  # a bound on memory, far above what the gate lets wait
    encoders: int = 0  # on devices of their own; 0: one device encodes and steps
    decoders: int = 1  # more than one only where encoders are apart

    @property
    def apart(self) -> bool:
        return self.encoders > 0


class TextJob:
    """Represents one answer to be written. The caller that offers it may store a value in `payload`."""

    __slots__ = (
        *("arrived", "deadline", "decoder", "first_at", "first_due", "limit", "payload", "slot"),
        *("state", "ticket", "tokens"),
    )

    def __init__(
        self, arrived: float, limit: int = 0, deadline: float = INFINITY, payload: Any = None
    ) -> None:
        self.arrived = arrived
        self.limit = limit  # tokens; 0: as many as the model may
        self.deadline = deadline  # of the whole answer
        self.first_due = INFINITY
        self.first_at: float | None = None
        self.decoder = self.slot = -1  # which of the decoder's slots
        self.tokens = 0
        self.ticket = 0  # its number in the queue
        self.state: JobState = NEW
        self.payload = payload

    def __repr__(self) -> str:
        return f"TextJob(arrived={self.arrived:g}, slot={self.slot}, tokens={self.tokens}, {self.state.name})"


class TextQueue:
    """Holds the answers that wait, ordered by when their first token is due. One that leaves the queue is
    forgotten at once, together with its picture: only its number stays in the heap, and those are swept."""

    __slots__ = ("_heap", "_jobs", "_last")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # the first of them is in `_jobs`
        self._jobs: dict[int, TextJob] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> TextJob:
        return self._jobs[self._heap[0][1]]

    @property
    def first_due(self) -> float:
        return self._heap[0][0] if self._heap else INFINITY

    def add(self, job: TextJob) -> None:
        self._last += 1
        job.ticket = self._last
        self._jobs[job.ticket] = job
        heappush(self._heap, (job.first_due, job.ticket))

    def pop(self) -> TextJob:
        job = self.first
        self.remove(job)
        return job

    def remove(self, job: TextJob) -> None:
        heap, jobs = self._heap, self._jobs
        del jobs[job.ticket]
        if len(heap) > _SWEEP_AT + 2 * len(jobs):
            heap[:] = [entry for entry in heap if entry[1] in jobs]
            heapify(heap)
        while heap and heap[0][1] not in jobs:
            heappop(heap)


class Encode(NamedTuple):
    """Encode these together; each has a slot, into which its decoder takes what comes out."""

    jobs: tuple[TextJob, ...]
    started: float
    encoder: int = 0


class DecodeStep(NamedTuple):
    """Describes a step, one token for each of `jobs`: slots 0 to `width` - 1 are run, used or free."""

    jobs: tuple[TextJob, ...]
    width: int
    started: float
    decoder: int = 0


class TextGivenUp(NamedTuple):
    """Describes an answer that was accepted and will not be written, or not to its end."""

    job: TextJob
    reason: Reason
    takes: float = 0.0  # seconds until its first token, for one that was late for that


@dataclass(slots=True)
class StepDecision:
    """Do this, or look again at that time, or (neither) idle until something happens."""

    work: Encode | DecodeStep | None = None
    look_again: float | None = None
    given_up: list[TextGivenUp] = field(default_factory=list)


class Boundary(NamedTuple):
    """Reports, after a step, whose answers are whole, and who was cut off because his time was up."""

    done: Sequence[TextJob]
    given_up: Sequence[TextGivenUp]
