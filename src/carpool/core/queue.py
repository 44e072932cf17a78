"""Holds who is waiting: lanes by (level, source), each with its jobs in order.

A job that is taken, given up or cancelled leaves every count at once; its place in a list is skipped later.
"""

from __future__ import annotations

from collections.abc import Iterator

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.job import ADDRESS, OFFERED, READY, RUNNING, SHARED, Job, JobState, Lane, Line

_DROP_S = 0.1
_MOST_SHARING = 4096  # addresses that are counted


def _shared_by(source: str) -> str:
    """Returns the lane of a source that has none of its own."""
    return ADDRESS + SHARED if source.startswith(ADDRESS) else SHARED


class Sharing:
    """Counts who was here lately, in so many seconds or up to twice as long, and no more than a bounded
    number."""

    __slots__ = ("_before", "_lately_s", "_now", "_since")

    def __init__(self, lately_s: float) -> None:
        self._lately_s = lately_s
        self._since = float("-inf")
        self._before: set[str] = set()
        self._now: set[str] = set()

    def count(self, source: str, now: float) -> float:
        """Returns how many there are, this one among them."""
        if now - self._since > self._lately_s:
            self._before = self._now if now - self._since <= 2 * self._lately_s else set()
            self._now, self._since = set(), now
        if len(self._now) < _MOST_SHARING:
            self._now.add(source)
        return float(max(len(self._now), len(self._before)))


class Lanes:
    """Holds all lanes of one model and their totals. The number of sources with a lane of their own is
    bounded."""

    __slots__ = (
        *(
            "_constants",
            "_drop_at",
            "_served",
            "_sharing",
            "by_key",
            "by_shape",
            "coming",
            "credit",
            "frames",
            "ready",
        ),
        *("requests", "waiting"),
    )

    pinned = False  # what is seen of it may run on any instance

    def __init__(self, *, by_shape: bool, constants: Constants = CONSTANTS) -> None:
        self.by_shape = by_shape  # False keeps one line per lane, so that the order of arrival is kept
        self._constants = constants
        self.by_key: dict[tuple[int, str], Lane] = {}  # by level and source
        self._served: dict[int, float] = {}
        self._sharing = Sharing(constants.lately_s)
        self._drop_at = float("-inf")
        self.frames = Frames()
        self.coming: dict[Job, None] = {}  # offered, and their inputs are not there yet
        self.credit = 0  # images
        self.waiting = 0
        self.ready = 0
        self.requests = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def everybody(self) -> list[Job]:
        """Returns all who wait, with their inputs or for them."""
        lines = (line for lane in self for line in lane.lines.values())
        return [*(job for line in lines for job in line), *self.coming]

    def instance_of(self, _job: Job) -> int | None:
        """The only one that may run it; None: any may."""
        return None

    def lane(self, level: int, source: str, now: float) -> Lane:
        """Returns the lane of this source; a shared one when every own lane is in use. Addresses have one of
        theirs, which weighs as much as there are: they cannot be made up as names can."""
        lane = self.by_key.get((level, source))
        if lane is None:
            if len(self.by_key) >= self._constants.max_lanes and now >= self._drop_at:
                self._drop_unused(now)
            weight = 1.0
            if len(self.by_key) >= self._constants.max_lanes:
                if source.startswith(ADDRESS):
                    weight = self._sharing.count(source, now)
                source = _shared_by(source)
                lane = self.by_key.get((level, source))
            if lane is None:
                lane = self.by_key[level, source] = Lane(level, source, self._constants.lane_memory_s)
            if lane.shared:
                lane.weight = weight
        lane.seen = now
        return lane

    def peek(self, level: int, source: str) -> Lane:
        """The lane this source would have, without giving it one or noting that it was seen."""
        found = self.by_key.get((level, source))
        if found is None and len(self.by_key) >= self._constants.max_lanes:
            found = self.by_key.get((level, _shared_by(source)))
        return found or Lane(level, source, self._constants.lane_memory_s)

    def only_ready(self) -> Lane | None:
        """Returns the lane of all who may run; None where they are in several, or there are none."""
        found: Lane | None = None
        for lane in self.by_key.values():
            if lane.ready:
                if found is not None:
                    return None
                found = lane
        return found

    def _drop_unused(self, now: float) -> None:
        """Forgets lanes that were not used lately: with many sources, most have no lane of their own."""
        self._drop_at = now + _DROP_S
        since = now - self._constants.lately_s
        for key, lane in list(self.by_key.items()):
            if lane.requests == 0 and lane.seen < since:
                del self.by_key[key]

    def offer(self, job: Job, lane: Lane) -> None:
        job.lane = lane
        job.state = OFFERED
        lane.waiting += job.images
        lane.requests += 1
        self.waiting += job.images
        self.requests += 1
        if job.options.latest:
            self.frames.entered(job)

    def ready_now(self, job: Job, *, in_place: bool = False) -> None:
        """It may run. With `in_place` it has the position of one that waited, and its lane was never away."""
        lane, images = job.lane, job.images
        assert lane is not None
        if lane.ready == 0 and not in_place:
            # A lane that was away may be a batch ahead of the others, for a burst, but hoards no more credit.
            lane.served = max(lane.served, self._served.get(lane.level, 0.0) - self.credit / lane.part)
        job.state = READY
        if job.options.latest:
            self.frames.became_ready(job)
        self.coming.pop(job, None)
        lane.ready += images
        self.ready += images
        shape = job.shape if self.by_shape else None
        line = lane.lines.get(shape)
        if line is None:
            line = lane.lines[shape] = Line()
        line.add(job)

    def remove(self, job: Job, state: JobState) -> None:
        """Take a waiting job out of every count."""
        lane, images = job.lane, job.images
        assert lane is not None
        if job.state is READY:
            lane.ready -= images
            self.ready -= images
            lane.lines[job.shape if self.by_shape else None].left(job)
        else:
            self.coming.pop(job, None)
        lane.waiting -= images
        self.waiting -= images
        lane.requests -= 1
        self.requests -= 1
        job.state = state
        if job.options.latest:
            self.frames.left(job)

    def put_back(self, job: Job, state: JobState) -> None:
        """Undo a removal, before anything else happened."""
        lane = job.lane
        assert lane is not None
        job.state = state
        if state is READY:
            lane.ready += job.images
            self.ready += job.images
            lane.lines[job.shape if self.by_shape else None].returned(job)
        else:
            self.coming[job] = None
        lane.waiting += job.images
        self.waiting += job.images
        lane.requests += 1
        self.requests += 1
        if job.options.latest:
            self.frames.entered(job)

    def serve(self, job: Job) -> None:
        """Take a ready job for a batch, on its source's account."""
        lane = job.lane
        assert lane is not None
        if lane.served > self._served.get(lane.level, 0.0):
            self._served[lane.level] = lane.served
        lane.served += job.images / lane.part
        self.remove(job, RUNNING)

    def serve_all(self, jobs: list[Job]) -> None:
        """Does the same as `serve` for each of these, which are ready, without a call for each."""
        total, served = 0, self._served
        for job in jobs:
            lane, images = job.lane, job.images
            assert lane is not None
            if lane.served > served.get(lane.level, 0.0):
                served[lane.level] = lane.served
            lane.served += images / lane.part
            lane.ready -= images
            lane.waiting -= images
            lane.requests -= 1
            line = lane.lines[job.shape if self.by_shape else None]
            line.requests -= 1
            line.images -= images
            total += images
            job.state = RUNNING
            if job.options.latest:
                self.frames.left(job)
        self.ready -= total
        self.waiting -= total
        self.requests -= len(jobs)

    def serve_first(self, lane: Lane, line: Line, room: int) -> list[Job]:
        """Does the same as `serve` for the first of a line that fit into so many images, with one look at the
        counts."""
        images = line.images
        jobs = line.take(room)
        if jobs:
            images -= line.images
            before_last = lane.served + (images - jobs[-1].images) / lane.part
            self._served[lane.level] = max(self._served.get(lane.level, 0.0), before_last)
            lane.served += images / lane.part
            for counts in (lane, self):
                counts.ready -= images
                counts.waiting -= images
                counts.requests -= len(jobs)
            for job in jobs:
                if job.options.latest:
                    self.frames.left(job)
        return jobs


_REMEMBERED = 1024
"""Sources whose newest frame is known after it has left the queue; the longest silent are forgotten."""


class Frames:
    """Live sources: of each, at most one frame waits with its input, the newest that has one. Knows which,
    and when the newest arrived.

    Beside it, the inputs of two may be on their way. The first of them stays: of a source that sends faster
    than its pictures can be decoded, none would ever be complete otherwise. The second is always the newest.

    Frames can overtake each other on their way here: pictures take longer to decode, front ends are several.
    So a late frame is distinguished from a new one by when it arrived at the server.
    """

    __slots__ = ("_coming", "_newest", "_ready")

    def __init__(self) -> None:
        self._ready: dict[str, Job] = {}
        self._coming: dict[str, list[Job]] = {}
        self._newest: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._coming.values()))

    def replaced_by(self, job: Job, *, ready: bool) -> Job | None:
        """Returns the job whose place a newcomer takes, with its input or before it."""
        if ready:
            return self._ready.get(job.origin.source)
        coming = self._coming.get(job.origin.source, ())
        return coming[1] if len(coming) > 1 else None

    def overtaken(self, job: Job) -> bool:
        """A newer frame of its source came before it."""
        return job.arrived < self._newest.get(job.origin.source, job.arrived)

    def entered(self, job: Job) -> None:
        if job.state is READY:
            self._ready[job.origin.source] = job
        else:
            self._coming.setdefault(job.origin.source, []).append(job)
        newest = max(job.arrived, self._newest.pop(job.origin.source, job.arrived))
        if len(self._newest) >= _REMEMBERED:
            del self._newest[next(iter(self._newest))]
        self._newest[job.origin.source] = newest

    def became_ready(self, job: Job) -> None:
        self._no_longer_coming(job)
        self._ready[job.origin.source] = job

    def left(self, job: Job) -> None:
        if self._ready.get(job.origin.source) is job:
            del self._ready[job.origin.source]
        else:
            self._no_longer_coming(job)

    def _no_longer_coming(self, job: Job) -> None:
        coming = self._coming.get(job.origin.source, [])
        if job in coming:
            coming.remove(job)
            if not coming:
                del self._coming[job.origin.source]
