"""Threads for what would hold up the loop: decoding pictures, and making answers of outputs.

What finishes a picture goes before what begins one, so that answers leave as soon as they can. How many may
wait to begin is bounded: whoever would be late is told so at once, before any work is done for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from carpool.engine.numerals import numeral
from carpool.errors import Refused

Then: TypeAlias = Callable[[Any, BaseException | None], None]
"""Gets what the work returned, or what it raised; in the loop's thread."""

_MOST_WAITING_EACH = 64
_LEARNING = 0.1  # how much the newest duration counts in the mean
_NAME = "pictures"


def threads_for(frontends: int) -> int:
    """An equal share of the cores for each of so many front ends."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, frontends))


class _Job(NamedTuple):
    work: Callable[[], Any]
    then: Then


class Workers:
    """To be used in the loop's thread. The threads are started by the first work they get."""

    def __init__(self, threads: int, most_waiting: int | None = None) -> None:
        self.threads = threads
        self.most_waiting = most_waiting or threads * _MOST_WAITING_EACH
        self._beginning: deque[_Job] = deque()
        self._finishing: deque[_Job] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one for each job, or to end a thread
        self._over: deque[tuple[Then, Any, BaseException | None]] = deque()
        self._told = False  # the loop will look at what is over
        self._mean = 0.0  # seconds to begin one
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def waiting(self) -> int:
        """How many wait to begin."""
        return len(self._beginning)

    def refuses(self, who: str, deadline: float, now: float) -> Refused | None:
        """Whether there is no sense in beginning one more now."""
        waiting = len(self._beginning)
        wait = waiting * self._mean / self.threads
        if waiting >= self.most_waiting:
            why = f"{waiting} pictures wait to be decoded already"
            return Refused(f"{who}: {why}", reason="queue-full", retry_after_s=wait)
        if waiting and now + wait > deadline:
            predicted = wait * 1e3
            why = f"its turn to be decoded would come in {numeral(predicted)} ms, after its deadline"
            return Refused(
                f"{who}: {why}", reason="cannot-finish", predicted_ms=predicted, retry_after_s=wait
            )
        return None

    def begin(self, work: Callable[[], Any], then: Then) -> None:
        """Do the first part of a picture's work in a thread, after those that came before it."""
        self._put(self._beginning, _Job(work, then))

    def finish(self, work: Callable[[], Any], then: Then) -> None:
        """Do the last part, before anything else begins."""
        self._put(self._finishing, _Job(work, then))

    def close(self) -> None:
        """End the threads after what they are at; the rest is over too, as if it had been cancelled."""
        jobs = [*self._finishing, *self._beginning]
        self._finishing.clear()
        self._beginning.clear()
        for job in jobs:
            job.then(None, asyncio.CancelledError())
        for _ in range(self.threads):
            self._tokens.put(None)

    def _put(self, jobs: deque[_Job], job: _Job) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for number in range(self.threads):
                threading.Thread(target=self._live, name=f"{_NAME}-{number}", daemon=True).start()
        jobs.append(job)
        self._tokens.put(None)

    # ── in the threads ──

    def _live(self) -> None:
        while True:
            self._tokens.get()
            job, begins = self._next()
            if job is None:
                return
            result, error = None, None
            started = monotonic()
            try:
                result = job.work()
            except BaseException as raised:
                error = raised
            if begins:
                taken = monotonic() - started
                self._mean += (taken - self._mean) * (_LEARNING if self._mean else 1.0)
            self._over.append((job.then, result, error))
            del job, result, error  # they hold pictures, and the next job may be long in coming
            if not self._tell():
                return

    def _next(self) -> tuple[_Job | None, bool]:
        for jobs in (self._finishing, self._beginning):
            try:
                return jobs.popleft(), jobs is self._beginning
            except IndexError:
                continue
        return None, False

    def _tell(self) -> bool:
        """Have the loop look, unless it is about to; False when there is no loop any more."""
        if self._told:
            return True
        self._told = True
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        return True

    # ── in the loop ──

    def _deliver(self) -> None:
        self._told = False
        over = self._over
        while over:
            then, result, error = over.popleft()
            then(result, error)
