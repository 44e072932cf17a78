"""Live sources: of each, at most one frame waits, and it is the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.core.job import Job

_REMEMBERED = 1024
"""Sources whose newest frame is known after it has left the queue; the longest silent are forgotten."""


class Frames:
    """Knows who waits for each source, and how new the newest frame was that was let in.

    Frames can overtake each other on their way here: pictures take longer to decode, front ends are several.
    So one that comes late is told from one that is new by when it arrived at the server.
    """

    __slots__ = ("_newest", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, Job] = {}
        self._newest: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, source: str) -> Job | None:
        return self._waiting.get(source)

    def overtaken(self, job: Job) -> bool:
        """A newer frame of its source came before it."""
        return job.arrived < self._newest.get(job.source, job.arrived)

    def entered(self, job: Job) -> None:
        self._waiting[job.source] = job
        newest = max(job.arrived, self._newest.pop(job.source, job.arrived))
        if len(self._newest) >= _REMEMBERED:
            del self._newest[next(iter(self._newest))]
        self._newest[job.source] = newest

    def left(self, job: Job) -> None:
        if self._waiting.get(job.source) is job:
            del self._waiting[job.source]
