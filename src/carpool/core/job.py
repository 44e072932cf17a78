"""One request as the scheduler sees it, and the words for how it can end."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.core.constants import CONSTANTS, Constants

if TYPE_CHECKING:
    from carpool.core.queue import Lane

INFINITY = float("inf")


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
NEW, OFFERED, READY, RUNNING, DONE, GONE = JobState


class Reason(enum.Enum):
    """Why a job was not run: stable words that reach the client."""

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


SOON = 0.001
"""Seconds: when to come back where nothing is ahead, and the next one has its whole time."""


class Refusal(NamedTuple):
    """A no at the gate: why, when the job would have finished, and when asking again makes sense.

    The rest is what it was weighed against: the images that wait, the most that may, and in images per
    second what is asked and what can be answered in time. Of the job's source, where its share decided.
    """

    reason: Reason
    predicted_finish: float = INFINITY
    retry_after: float = 0.0  # seconds; 0: asking again would not help
    waiting: int = 0
    most: int = 0
    asked: float = 0.0
    answerable: float = 0.0


class GivenUp(NamedTuple):
    """A job that was accepted and will not run."""

    job: Job
    reason: Reason


def planned(outside: float, budget: float, constants: Constants = CONSTANTS) -> float:
    """How much of its budget a request's plan leaves to what is outside."""
    most = constants.most_outside * budget
    if outside > most:
        outside = most
    return outside if outside > 0.0 else 0.0  # NaN too
