"""One request as the scheduler sees it, and the words for how it can end."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from carpool.core.constants import CONSTANTS, Constants

if TYPE_CHECKING:
    from carpool.core.queue import Lane

INFINITY: Final = float("inf")

ADDRESS: Final = "\0"
"""In front of an address that stands for a source: no source that a request names begins so."""


class JobState(enum.IntEnum):
    """A job moves down this list and never up."""

    NEW = 0
    OFFERED = 1  # accepted and counted; its picture is still being decoded
    READY = 2  # may run
    RUNNING = 3
    DONE = 4  # its batch has finished
    GONE = 5  # refused, given up or cancelled


# A job's states are named some fifteen times on its way; before Python 3.12, finding one in its enum takes
# ten times as long as finding a plain name.
NEW: Final[JobState] = JobState.NEW
OFFERED: Final[JobState] = JobState.OFFERED
READY: Final[JobState] = JobState.READY
RUNNING: Final[JobState] = JobState.RUNNING
DONE: Final[JobState] = JobState.DONE
GONE: Final[JobState] = JobState.GONE


class Reason(enum.Enum):
    """Names why a job was not run, in stable words that reach the client."""

    CANNOT_FINISH = "cannot-finish"  # even alone it would end after its deadline
    OVERLOAD = "overload"  # it would force batches too small to keep up with the traffic
    OVER_SHARE = "over-share"  # its source already has its fair share of a saturated device
    GIVEN_UP = "given-up"  # accepted, then dropped so that those behind it make it
    DEADLINE = "deadline"  # its deadline passed while it waited
    QUEUE_FULL = "queue-full"
    TIMEOUT = "timeout"  # Triton's queue timeout
    TOO_LARGE = "too-large"  # more images than a batch may hold
    REPLACED = "replaced"  # a newer frame of its source took its place
    RESTARTING = "restarting"  # every instance is gone, and no promise can wait for their replacements

    __hash__ = object.__hash__  # each is there once; by name, as enums do it, counting them is slow


class Job:
    """Whoever offers it may derive from it, or leave something in `payload`: core looks at neither."""

    __slots__ = (
        *("again", "arrived", "deadline", "due", "foreseen", "holder", "images", "lane", "later", "latest"),
        *(
            "outside",
            "payer",
            "payload",
            "priority",
            "probe",
            "promise",
            "rank",
            "ready_at",
            "shape",
            "source",
            "state",
            "timeout",
            "weight",
        ),
    )

    def __init__(
        self,
        arrived: float,
        deadline: float = INFINITY,
        images: int = 1,
        shape: Hashable = None,
        priority: int = 0,
        source: str = "",
        latest: bool = False,
        timeout: float = 0.0,
        outside: float = 0.0,
        payload: Any = None,
    ) -> None:
        self.arrived = arrived
        self.deadline = deadline  # the client's
        self.outside = outside  # seconds that it will wait beside the queue and its batch
        self.later = 0.0  # seconds that are left to the steps after this one, of a pipeline
        self.promise = 0.0  # seconds: the pipeline's SLO, which a step is held against; 0: the model's own
        self.probe = False  # part of a pipeline's probe: it runs whatever is believed of the time it takes
        self.due = deadline  # when its batch must end, for the client to have the answer by its deadline
        self.images = images
        self.shape = shape
        self.priority = priority
        self.source = source
        self.holder = ""  # of the key that came with it: its sources share the key's weight
        # Whose places it takes, and who it is where it names no source: that holder, or else its client's
        # address, which begins with `ADDRESS`; "": not known.
        self.payer = ""
        self.weight = 1.0
        self.latest = latest  # a newer frame of the source takes its place while it waits
        self.timeout = timeout
        self.payload = payload
        self.again = False  # another server has refused it before: it was counted as asked for there
        self.ready_at = -INFINITY  # when its input is expected, for one that is offered before it is there
        self.foreseen = INFINITY  # when its batch was to end, for one that was let in before its input
        self.state = NEW
        self.rank = 0.0  # its place in its queue: a deadline, or the order of arrival
        self.lane: Lane | None = None

    def __repr__(self) -> str:
        times = f"arrived={self.arrived:g}, deadline={self.deadline:g}"
        return f"Job({times}, images={self.images}, {self.state.name})"


SOON: Final = 0.001
"""Seconds: when to come back where nothing is ahead, and the next one has its whole time."""


class Terms(NamedTuple):
    """Lists what one decision about a request was made of: seconds, in the order in which a request meets
    them.

    The request is late where what is `predicted` and the `margin` together exceed its `deadline`, which is
    counted from its arrival as they are.
    """

    deadline: float = INFINITY
    waited: float = 0.0  # from its arrival until the decision
    queue: float = 0.0  # the batches that start before its own
    running: float = 0.0  # what is left of the batch that runs
    input: float = 0.0  # what the wait for its input adds
    batch: float = 0.0  # its own batch
    outside: float = 0.0  # reading the request, and sending the answer
    later: float = 0.0  # what comes after its batch: later steps, or the rest of a text
    spread: float = 0.0  # margin: how far batches may come out above their mean
    doubt: float = 0.0  # margin: how much later than foreseen requests end whose input was still to come

    @property
    def predicted(self) -> float:
        """Seconds from its arrival until the answer is there."""
        before = self.waited + self.queue + self.running + self.input
        return before + self.batch + self.outside + self.later

    @property
    def margin(self) -> float:
        return self.spread + self.doubt

    @property
    def late(self) -> bool:
        return self.predicted + self.margin > self.deadline


NO_TERMS = Terms()


class Refusal(NamedTuple):
    """Describes a rejection: why, when a retry makes sense, and the numbers that it was decided by."""

    reason: Reason
    retry_after: float = 0.0  # seconds; 0: a retry would not help
    waiting: int = 0  # images in the queue
    most: int = 0  # images that may be there, or in one request
    asked: float = 0.0  # images per second: offered to the model, or by the source whose share decided
    answerable: float = 0.0  # images per second: what batches of the best size sustain of that
    room: int = 0  # the largest batch that would meet the deadline
    needed: int = 0  # the batch that the queue needs
    sustained: float = 0.0  # images per second: what batches of `room` sustain
    lag: float = 0.0  # seconds that requests spend before the scheduler knows of them
    most_lag: float = 0.0  # how many of these are accepted
    images: int = 1  # of the request
    terms: Terms = NO_TERMS

    def flat(self) -> tuple[float, ...]:
        """Returns all but the reason as numbers, for other processes."""
        return (*map(float, self[1:-1]), *self.terms)


REFUSAL_NUMBERS = len(Refusal._fields) - 2 + len(Terms._fields)


def refusal_of(reason: Reason, numbers: Sequence[float]) -> Refusal:
    """Returns the refusal whose `flat` form this is."""
    retry_after, waiting, most, asked, answerable, room, needed, sustained, lag, most_lag, images = numbers[
        :11
    ]
    counts = int(waiting), int(most)
    sizes = int(room), int(needed)
    terms = Terms(*numbers[11:])
    return Refusal(
        reason, retry_after, *counts, asked, answerable, *sizes, sustained, lag, most_lag, int(images), terms
    )


class GivenUp(NamedTuple):
    """Describes a job that was accepted and will not run: with the batch that its deadline has room for, the
    one that the queue needs, and the seconds of its own batch where those decided."""

    job: Job
    reason: Reason
    room: int = 0
    needed: int = 0
    batch: float = 0.0


def planned(outside: float, budget: float, constants: Constants = CONSTANTS) -> float:
    """Returns how much of its budget a request's plan leaves to what is outside."""
    most = constants.most_outside * budget
    if outside > most:
        outside = most
    return outside if outside > 0.0 else 0.0  # NaN too
