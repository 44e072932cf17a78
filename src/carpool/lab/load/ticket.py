"""One request of the generator, what may become of it, and whom it is sent to."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol


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
        """All that the server knows of, if it tells. Decoding is in the queue: that counts from arrival."""
        return None if self.post is None else self.queue + self.infer + self.post


class Answer(NamedTuple):
    """What a client tells of one request; `reason` is a word for everything but an answer."""

    kind: Kind
    reason: str = ""
    timing: Timing | None = None


PLAIN_ANSWER = Answer(Kind.ANSWERED)


def failed(reason: str) -> Answer:
    return Answer(Kind.FAILED, reason)


class Ticket:
    """One request on its way. Times are seconds from the start of the run."""

    __slots__ = ("done", "handle", "images", "intended", "number", "phase", "sent", "source", "started")

    def __init__(
        self, number: int, intended: float, phase: int = 0, images: int = 1, source: str = ""
    ) -> None:
        self.number = number
        self.intended = intended
        self.phase = phase
        self.images = images
        self.source = source
        self.started = intended  # when the generator got to it
        self.sent: float | None = None  # when its first byte was handed to a connection
        self.done = False
        self.handle: object = None  # the client's own: what to let go of if nobody waits any more


Tell = Callable[[Ticket, Answer], None]
"""Called once for each ticket, unless it was let go before."""
Clock = Callable[[], float]
"""Seconds from the start of the run."""


class Target(Protocol):
    """A client of one server. To be used on one event loop."""

    name: str  # for people: the address and what is asked there

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        """Get ready for about `expected` requests at once."""

    def send(self, ticket: Ticket) -> None:
        """Send it now, or when there is a connection; `ticket.sent` is set to when that was."""

    def let_go(self, ticket: Ticket) -> None:
        """Nobody waits for this one any more."""

    async def close(self) -> None: ...

    def facts(self) -> dict[str, int]:
        """Numbers of its own for the report, like how many connections there were."""
