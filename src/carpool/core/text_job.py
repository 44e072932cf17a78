"""What steps.py is told and what it answers: answers to be written, and the work that this is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carpool.core.job import INFINITY, NEW, JobState, Reason


@dataclass(frozen=True, slots=True)
class TextPromise:
    """The first token within `ttft` seconds, each further one within `per_token`, all within `slo`."""

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
    """One answer to be written. Whoever offers it may leave something in `payload`."""

    __slots__ = (
        *("arrived", "deadline", "decoder", "first_at", "first_due", "limit", "payload", "slot"),
        *("state", "tokens"),
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
        self.state: JobState = NEW
        self.payload = payload

    def __repr__(self) -> str:
        return f"TextJob(arrived={self.arrived:g}, slot={self.slot}, tokens={self.tokens}, {self.state.name})"


class Encode(NamedTuple):
    """Encode these together; each has a slot, into which its decoder takes what comes out."""

    jobs: tuple[TextJob, ...]
    started: float
    encoder: int = 0


class Step(NamedTuple):
    """One token for each of these: slots 0 to `width` - 1 are run, whether somebody has them or not."""

    jobs: tuple[TextJob, ...]
    width: int
    started: float
    decoder: int = 0


class TextGivenUp(NamedTuple):
    """One that was accepted and will not be answered, or not to its end."""

    job: TextJob
    reason: Reason
    takes: float = 0.0  # seconds until its first token, for one that was late for that


@dataclass(slots=True)
class StepDecision:
    """Do this, or look again at that time, or (neither) idle until something happens."""

    work: Encode | Step | None = None
    look_again: float | None = None
    given_up: list[TextGivenUp] = field(default_factory=list)


class Boundary(NamedTuple):
    """After a step: whose answers are whole, and who was cut off because his time was up."""

    done: Sequence[TextJob]
    given_up: Sequence[TextGivenUp]
