"""Runs threads for what would hold up the loop: decoding pictures, and making answers of outputs.

What finishes a picture goes before what begins one, so that answers leave as soon as they can. Of those that
begin, clients get equal parts of the time; among clients that are about even, and for each, the earliest
deadline goes first. Pictures that take long leave a thread to the others, and only so many pixels of them are
in memory at a time. How many may wait to begin is bounded, and a picture that would be late is refused at
once, before any work is done for it. Background work is done when nothing else is to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from time import monotonic, sleep
from typing import Any, TypeAlias

from carpool.compiling import mypyc_attr
from carpool.core.decode_forecast import DecodeForecast
from carpool.core.job import INFINITY, Reason, Refusal, Terms
from carpool.core.refusal_words import in_words
from carpool.core.shares import OF_THE_REST
from carpool.errors import Refused, without_stack
from carpool.frontend.clients.fair_queue import FairQueue
from carpool.memory.arena import Slot
from carpool.observe.logs import logger

_log = logger("pictures")

Then: TypeAlias = Callable[[Any, BaseException | None], None]
"""Gets what the work returned, or what it raised; in the loop's thread."""

_MOST_WAITING_EACH = 64
_NAME = "pictures"
_COMPACT_AT = 64
_LONG = 4e6  # of weight, which is about that of a pixel: it takes some hundredths of a second
_LONG_ALONE = 16e6  # it takes some tenths of a second, and so may another client's that comes meanwhile
_COMPANY_S = 2.0  # so long after another client's picture a client has company
_MOST_LONG = 64e6  # of them at a time, unless it is one alone: a pixel takes four bytes meanwhile
_PAUSE_S = 0.05  # before a thread that could not choose its work looks again
_MOST_IDLE = 4  # they hold pictures, and it is no harm to leave one out


class PictureJob:
    """Describes work for a thread. `weight`, of what begins a picture, is how much there is to decode for
    `client`."""

    __slots__ = ("begun", "client", "then", "weight", "work")

    def __init__(
        self, work: Callable[[], Any] | None, then: Then, weight: float = 0.0, client: str = ""
    ) -> None:
        self.work = work  # None: it is not wanted any more
        self.then = then
        self.weight = weight
        self.client = client
        self.begun = False


class PictureDecoding(PictureJob):
    """Decodes the pictures of one request into its slot, once the engine has let the request in. Gives back
    the slot of work that is dropped before a thread begins it."""

    __slots__ = ("_slot", "_until", "_workers", "offered_at", "ready_in")

    def __init__(self, workers: Workers, weight: float, until: float, now: float, client: str) -> None:
        """The answer has to be there `until` then. The request is offered now."""
        self._workers = workers
        self.work = None
        self.then = _nobody
        self.weight = weight
        self.client = client
        self.begun = False
        self._until = until
        self.offered_at = now
        self.ready_in = workers.foresee(weight, now, client)  # seconds, as far as is known now
        self._slot: Slot | None = None  # while a thread has it, or will

    def begin(self, slot: Slot, decode: Callable[[memoryview], float], then: Then) -> None:
        """The slot is the thread's from here on, and the caller's again in `then`."""
        self.work, self.then = partial(decode, slot.view), then
        self._workers.begin(self, self._until)
        self._slot = slot

    def drop(self) -> None:
        """Drops it, unless a thread has begun: then that gives back the slot in the end."""
        slot, self._slot = self._slot, None
        if slot is not None and self._workers.drop(self):
            slot.release()


def _nobody(*_: object) -> None:
    """Gets the result of a job that was dropped."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Workers:
    """Runs work in threads, and is to be used in the loop's thread. The threads are started by the first work
    they get.

    The queues and the forecast are shared with the threads, and touched only with the lock: a job is begun by
    one thread or dropped by the loop, never both.
    """

    def __init__(self, threads: int, most_waiting: int | None = None) -> None:
        self.threads = threads
        self.most_waiting = most_waiting or threads * _MOST_WAITING_EACH
        self._lock = threading.Lock()
        self._forecast = DecodeForecast(threads, _LONG)
        self._most_threads = max(2, threads)  # a second one runs only beside a picture that takes long
        self._beginning: FairQueue[PictureJob] = FairQueue(attrgetter("work"))  # by deadline
        self._dropped = 0  # of them
        self._short = 0  # jobs under way
        self._long = 0  # those beside them that take long
        self._long_weight = 0.0
        self._client = ""  # of the last picture
        self._company_at = -INFINITY  # when that was another's than the one before
        self._finishing: deque[PictureJob] = deque()
        self._idle: deque[PictureJob] = deque()  # for threads that have nothing else to do
        # What each thread without work waits at. One is opened for each job: a queue that all wait at would
        # wake all of them, one after the other, and each would want the interpreter.
        self._resting: deque[threading.Lock] = deque()
        self._over: deque[tuple[Then, Any, BaseException | None]] = deque()
        self._delivers = False  # the loop will look at what is over
        self.waiting = 0  # to begin
        self._closed = False
        self._started = 0  # threads
        self._loop: asyncio.AbstractEventLoop | None = None

    def foresee(self, weight: float, now: float, client: str = "") -> float:
        """Returns seconds until one that comes now would be decoded."""
        with self._lock:
            if client != self._client:
                self._client, self._company_at = client, now
            # Its own place in the fair order counts: what comes behind it is no reason to wait.
            ahead = self._beginning.ahead(client, weight) if self.waiting else 0.0
            return self._forecast.seconds(weight, ahead, now)

    def refuses(
        self,
        who: str,
        deadline: float,
        now: float,
        weight: float = 1.0,
        then_s: float = 0.0,
        client: str = "",
    ) -> Refused | None:
        """Returns whether there is no sense in beginning one more now, which takes `then_s` after it is
        decoded."""
        waiting = self.waiting
        if not waiting:
            return None
        wait = self.foresee(weight, now, client)
        free = self.most_waiting - waiting
        if free <= 0 or (free < waiting and self._waiting_of(client) >= OF_THE_REST * free):
            why = f"{waiting} images are queued for decoding, and at most {self.most_waiting} may be"
            why += ", of which this client has its share" if free > 0 else ""
            return Refused(f"{who} rejected the request: {why}.", reason="queue-full", retry_after_s=wait)
        terms = Terms(deadline - now, input=wait, later=then_s)
        if terms.late:
            return in_words(who, Refusal(Reason.CANNOT_FINISH, wait, waiting, terms=terms))
        return None

    def _waiting_of(self, client: str) -> int:
        with self._lock:
            return self._beginning.waiting(client)

    def begin(self, job: PictureJob, deadline: float = INFINITY) -> None:
        """Do the first part of a picture's work in a thread, after those whose turn is earlier."""
        if self._started < self._most_threads:
            self._start()
        with self._lock:
            self.waiting += 1
            self._beginning.push(job.client, deadline, job, job.weight)
            if self._resting and (
                self._short < self.threads or job.weight > _LONG
            ):  # `_wake`, without a call
                self._resting.popleft().release()

    def drop(self, job: PictureJob) -> bool:
        """Drops work that is not needed any more; False if a thread has begun it, which calls `then`."""
        with self._lock:
            if job.begun or job.work is None:
                return False
            # It refers to a picture and its caller. Its place in the heap is skipped.
            job.work, job.then = None, _nobody
            self.waiting -= 1
            self._beginning.left(job.client, job.weight)
            self._dropped += 1
            if self._dropped > _COMPACT_AT + self.waiting:
                self._dropped = 0
                self._beginning.compact()
        return True

    def finish(self, work: Callable[[], Any], then: Then) -> None:
        """Do the last part, before anything else begins."""
        self._start()
        with self._lock:
            self._finishing.append(PictureJob(work, then))
            self._wake()

    @property
    def takes_idle(self) -> bool:
        return len(self._idle) < _MOST_IDLE

    def idle(self, work: Callable[[], Any], then: Then) -> bool:
        """Does background work when nothing else is to do; False if too much of it waits already."""
        self._start()
        with self._lock:
            if self._closed or not self.takes_idle:
                return False
            self._idle.append(PictureJob(work, then))
            self._wake()
        return True

    def close(self) -> None:
        """End the threads after what they are at; the rest is over too, as if it had been cancelled."""
        with self._lock:
            self._closed = True
            jobs = [*self._finishing, *self._beginning, *self._idle]
            self._finishing.clear()
            self._idle.clear()
            self._beginning.clear()
            self.waiting = 0
            while self._resting:
                self._wake()
        for job in jobs:
            if job.work is not None:
                job.begun = True
                try:
                    job.then(None, asyncio.CancelledError())
                except Exception as bug:
                    _failed(job.then, bug)

    def _wake(self) -> None:
        """Opens for one thread, with the lock held: for that which has rested longest, and gets a core first.
        A thread that works looks for more before it rests."""
        if self._resting:
            self._resting.popleft().release()

    def _start(self) -> None:
        """Raises where not one thread can be started: then nothing was begun. A few are better than none."""
        while self._started < self._most_threads:
            self._loop = asyncio.get_running_loop()
            try:
                name = f"{_NAME}-{self._started}"
                threading.Thread(target=self._live, name=name, daemon=True).start()
            except (RuntimeError, MemoryError):
                if self._started:
                    return
                raise
            self._started += 1

    # ── in the threads ──

    def _live(self) -> None:
        rest = threading.Lock()
        rest.acquire()
        while True:
            with self._lock:  # most often nothing is left, and `_next` need not look
                rests = not (self.waiting or self._finishing or self._idle or self._closed)
                self._resting.extend([rest] * rests)
            rest.acquire(blocking=rests)
            try:
                job, work = self._next(rest)
            except Exception as bug:  # the others must not be left without threads
                _log.exception("result-lost")
                without_stack(bug)
                sleep(_PAUSE_S)
                continue
            if work is None or job is None:
                if self._closed:
                    return
                rest.acquire()
                continue
            result, error = None, None
            started = monotonic()
            try:
                result = work()
            except BaseException as raised:
                error = raised
            if job.weight:
                now = monotonic()
                with self._lock:
                    self._forecast.ended(job.weight, now - started)
                    self._beginning.ended(job.client, now - started)
                    if job.weight > _LONG:
                        self._long -= 1
                        self._long_weight -= job.weight
                        self._wake()  # another may have been passed over for it
                    else:
                        self._short -= 1
            else:
                with self._lock:
                    self._short -= 1
            self._over.append((job.then, result, error))
            del job, work, result, error  # they hold pictures, and the next job may be long in coming
            if self._delivers:
                continue
            self._delivers = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # there is no loop any more

    def _next(self, rest: threading.Lock) -> tuple[PictureJob | None, Callable[[], Any] | None]:
        """Returns what to do; with nothing to do, `rest` will be opened for the next job."""
        with self._lock:
            free = self._short < self.threads
            if self._finishing and free:
                self._short += 1
                job = self._finishing.popleft()
                work, job.work = job.work, None
                return job, work
            looks = self._long or not free
            found = self._beginning.pop(self._may_begin if looks else None) if self.waiting else None
            if found is not None:
                job = found[1]
                job.begun = True
                self.waiting -= 1
                self._forecast.began(job.weight)
                if job.weight > _LONG:
                    self._long += 1
                    self._long_weight += job.weight
                else:
                    self._short += 1
                work, job.work = job.work, None
                return job, work
            if self._idle and free:
                self._short += 1
                job = self._idle.popleft()
                work, job.work = job.work, None
                return job, work
            if not self._closed:
                self._resting.append(rest)
        return None, None

    def _may_begin(self, job: PictureJob) -> bool:
        """Returns whether a job may begin, while all threads for short ones are taken, or one takes long:
        others that do leave a thread to the rest, and wait for memory."""
        if job.weight <= _LONG:
            return self._short < self.threads
        if not self._long:
            return True
        if job.weight <= _LONG_ALONE and monotonic() - self._company_at > _COMPANY_S:
            return self._short + self._long < self.threads
        return self._long < self._most_threads - 1 and self._long_weight + job.weight <= _MOST_LONG

    # ── in the loop ──

    def came_true(self, job: PictureDecoding) -> float:
        """Learns how long it took until the tensors are there and the loop knows. Returns the time."""
        now = monotonic()
        with self._lock:
            self._forecast.came_true(job.weight, job.ready_in, now - job.offered_at, now)
        return now

    def _deliver(self) -> None:
        self._delivers = False
        over = self._over
        while over:
            then, result, error = over.popleft()
            try:
                then(result, error)
            except Exception as bug:
                _failed(then, bug)


def _failed(then: Then, bug: Exception) -> None:
    """Logs that a callback raised, so that the others still get their results. The callback is called again,
    with the bug, to release what it holds and to answer its request."""
    _log.exception("result-lost")
    with contextlib.suppress(Exception):
        then(None, without_stack(bug))
