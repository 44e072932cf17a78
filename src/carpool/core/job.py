"""Defines a request as the scheduler sees it, the lane that it waits in, and how it can end."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.learning import Doubt, Lag, Rate

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


NO_SLACK: Final = "background"
"""The reason of background work that was skipped: no client ever reads it."""


class JobOrigin(NamedTuple):
    """Describes where a request comes from. Requests of one origin share it."""

    source: str = ""
    holder: str = ""  # of the key that came with it: its sources share the key's weight
    weight: float = 1.0
    payer: str = ""
    """Whose places it takes, and its source where it names none: that holder, or its client's address, which
    begins with `ADDRESS`; empty: not known."""


class JobOptions(NamedTuple):
    """Lists what a request asks for beyond its deadline. Most ask for nothing, and share `NO_OPTIONS`."""

    priority: int = 0
    timeout: float = 0.0
    latest: bool = False  # a newer frame of the source takes its place while it waits
    again: bool = False  # another server has rejected it before: it was counted as offered there


class Course:
    """Describes what is before and behind the batch of a request: an input still on its way, and later steps
    of a pipeline. Most requests have neither, and share `DIRECT`, which nothing changes."""

    __slots__ = ("entered", "foreseen", "later", "probe", "promise", "ready_at")

    def __init__(self) -> None:
        self.ready_at = -INFINITY  # when its input is expected, for one that is offered before it is there
        self.foreseen = INFINITY  # when its batch was to end, for one that was admitted before its input
        self.later = 0.0  # seconds that are left to the steps after this one, of a pipeline
        self.promise = 0.0  # seconds: the pipeline's SLO, which a step is held against; 0: the model's own
        self.probe = False  # part of a pipeline's probe: it runs whatever is believed of the time it takes
        self.entered = -INFINITY  # from when on it waits, if that is later than its arrival


ANYWHERE: Final = JobOrigin()
NO_OPTIONS: Final = JobOptions()
DIRECT: Final = Course()


class Job:
    """Describes a request to the scheduler. The caller may derive a class from it, or leave something in
    `payload`: core uses neither."""

    __slots__ = (
        *("arrived", "course", "deadline", "due", "images", "lane", "options", "origin", "outside"),
        *("payload", "rank", "shape", "state"),
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
        self.due = deadline  # when its batch must end, for the client to have the answer by its deadline
        self.images = images
        self.shape = shape
        self.origin = JobOrigin(source) if source else ANYWHERE
        self.options = NO_OPTIONS
        if priority or timeout or latest:
            self.options = JobOptions(priority, timeout, latest)
        self.course = DIRECT
        self.payload = payload
        self.state = NEW
        self.rank = 0.0  # its place in its queue: a deadline, or the order of arrival
        self.lane: Lane | None = None

    def own_course(self) -> Course:
        """Returns its course, which from here on is no other request's, so that it may be changed."""
        if self.course is DIRECT:
            self.course = Course()
        return self.course

    def __repr__(self) -> str:
        times = f"arrived={self.arrived:g}, deadline={self.deadline:g}"
        return f"Job({times}, images={self.images}, {self.state.name})"


_rank = attrgetter("rank")
_COMPACT_AT = 64
SHARED: Final = "*"
"""The source of the lane that sources without one of their own share."""
PROTECTED, ORDINARY, BACKGROUND = 0, 1, 2
"""The levels of lanes: a lower one goes first."""


def level_of(priority: int) -> int:
    """Triton's numbers: 1 is the most urgent, 0 means nothing was said."""
    if priority == 1:
        return PROTECTED
    return ORDINARY if priority in (0, 2) else BACKGROUND


class Line:
    """Holds ready jobs in order of rank."""

    __slots__ = ("_jobs", "_start", "images", "requests")

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._start = 0
        self.requests = 0
        self.images = 0

    def add(self, job: Job) -> None:
        jobs = self._jobs
        if len(jobs) > _COMPACT_AT + 2 * self.requests:
            jobs[:] = list(self)
            self._start = 0
        if jobs and jobs[-1].rank > job.rank:
            insort(jobs, job, lo=self._start, key=_rank)
        else:
            jobs.append(job)
        self.requests += 1
        self.images += job.images

    def left(self, job: Job) -> None:
        """A job of this line is no longer ready; its place is skipped from now on."""
        self.requests -= 1
        self.images -= job.images

    def returned(self, job: Job) -> None:
        """It is ready after all, in its old place."""
        self.requests += 1
        self.images += job.images

    def head(self) -> Job | None:
        jobs = self._jobs
        for at in range(self._start, len(jobs)):
            if jobs[at].state is READY:
                self._start = at
                return jobs[at]
        jobs.clear()
        self._start = 0
        return None

    def take(self, room: int) -> list[Job]:
        """Takes the first jobs that fit into so many images, passing over none: they run from now on."""
        taken: list[Job] = []
        left, jobs = room, self._jobs
        for at in range(self._start, len(jobs)):
            job = jobs[at]
            if job.state is not READY:
                continue
            if job.images > left:
                self._start = at
                break
            left -= job.images
            taken.append(job)
            job.state = RUNNING
        else:  # every job was taken or had left: later calls need not pass over these
            jobs.clear()
            self._start = 0
        self.requests -= len(taken)
        self.images -= room - left
        return taken

    def ranked_from(self, rank: float) -> list[Job]:
        """The jobs ranked at or after this: those a slow instance can carry when the head is too urgent."""
        at = bisect_left(self._jobs, rank, lo=self._start, key=_rank)
        return [job for job in self._jobs[at:] if job.state is READY]

    def move_to_back(self, job: Job, rank: float) -> None:
        others = [other for other in self if other is not job]
        job.rank = rank
        self._jobs[:] = [*others, job]
        self._start = 0

    def __iter__(self) -> Iterator[Job]:
        self.head()  # jobs that have left from the front are passed over for good
        jobs = self._jobs
        return (jobs[at] for at in range(self._start, len(jobs)) if jobs[at].state is READY)


class Lane:
    """The jobs of one (level, source): lower levels go first, then the source that was served least. The
    source is the one that requests name, or else their client's address."""

    __slots__ = (
        *(
            "coming",
            "doubt",
            "holder",
            "level",
            "lines",
            "part",
            "rate",
            "ready",
            "refused",
            "requests",
            "seen",
            "served",
        ),
        *("source", "waiting", "weight"),
    )

    def __init__(self, level: int, source: str, memory: float) -> None:
        self.level = level
        self.source = source
        self.lines: dict[Hashable, Line] = {}
        self.waiting = 0  # images in the queue, decoded or not
        self.ready = 0  # those that may run now
        self.requests = 0  # jobs, of either kind
        self.served = 0.0  # images for a weight of 1, on the level's common scale (see Lanes.ready_now)
        self.holder = ""  # of the key that its source came with
        self.weight = 1.0  # of that key
        self.part = 1.0  # of that weight: all lanes of one holder share it
        self.seen = float("-inf")
        self.refused = float("-inf")  # when the gate last said no to it
        self.rate = Rate(memory)
        self.coming: Lag | None = None  # from their offer until their inputs are there, for those that wait
        self.doubt: Doubt | None = None  # how much later than foreseen those end

    @property
    def shared(self) -> bool:
        """Returns whether it has all sources for which there was no lane of their own."""
        return self.source in (SHARED, ADDRESS + SHARED)

    @property
    def named(self) -> bool:
        """Returns whether its requests name a source."""
        return bool(self.source) and not self.source.startswith(ADDRESS)

    def belongs_to(self, job: Job) -> None:
        """Updates the holder and weight, which may change with the keys. A lane that many share has none."""
        origin = job.origin
        if (origin.source or origin.payer) == self.source:
            self.holder, self.weight = origin.holder, origin.weight
            self.part = origin.weight  # until all lanes are looked at

    def earliest(self) -> tuple[Job, Line]:
        """Returns the most urgent ready job, and the line of its shape. The lane must have one."""
        first: tuple[Job, Line] | None = None
        for shape in list(self.lines):
            line = self.lines[shape]
            head = line.head()
            if head is None:
                del self.lines[shape]  # shapes come from clients: keep none that is not in use
            elif first is None or head.rank < first[0].rank:
                first = head, line
        assert first is not None
        return first


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
