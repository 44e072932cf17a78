"""Threads for what clients make us decode and look through, shared fairly among them: see `FairQueue`. A
client that has had its part of the time rests while there are others, and what it has left behind stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from traceback import clear_frames
from typing import Any, Generic, TypeAlias, TypeVar

from carpool.core.job import INFINITY
from carpool.errors import Cancelled
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.clients.fair_queue import FairQueue

T = TypeVar("T")
Between: TypeAlias = Callable[[], None]
"""Is called between the steps of work, in its thread; raises `Cancelled` if it is not needed any more."""

_LONGEST_REST_S = 1.0


class ThreadWork(Generic[T]):
    """Represents work for one client. `done` is done when no thread has it any more."""

    __slots__ = ("_clock", "_run", "_wanted", "begun", "client", "done", "seconds")

    def __init__(self, client: str, run: Callable[[Between], T], clock: Callable[[], float]) -> None:
        self.client = client
        self._clock = clock
        self._run: Callable[[Between], T] = run
        self._wanted = True
        self.begun = False
        self.seconds = 0.0
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(self._forget)

    def stop(self) -> None:
        """Cancels work that is not needed any more. If it runs already, it ends between two of its steps."""
        self._wanted = False
        if not self.begun:
            self.done.cancel()

    @property
    def failed(self) -> bool:
        """It is done, and has no result."""
        return self.done.cancelled() or self.done.exception() is not None

    def _forget(self, _done: asyncio.Future[T]) -> None:
        """It may still stand in the queue, and is not to keep what it would have worked on."""
        self._wanted = False
        self._run = _nothing

    # ── in a thread ──

    def run(self) -> T:
        began = self._clock()
        try:
            return self._run(self._between)
        finally:
            self.seconds = self._clock() - began

    def _between(self) -> None:
        if not self._wanted:
            raise Cancelled("the client left")


class FairThreads:
    """Runs work in threads, and is to be used in the loop's thread."""

    def __init__(
        self,
        accounts: Accounts,
        pool: Executor,
        most: int,
        each: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Makes a queue that runs `most` at a time, and of one client's work `each`. What work costs is read
        from the `clock`, in its thread."""
        self._accounts = accounts
        self._pool = pool
        self._free = most
        self._each = each
        self._clock = clock
        self._queue: FairQueue[ThreadWork[Any]] = FairQueue(
            lambda work: not work.done.done(), accounts.rest_s
        )
        self._next: asyncio.Handle | None = None  # look for what may begin: one, however much waits

    def submit(self, client: str, run: Callable[[], None], since: float = 0.0) -> asyncio.Future[None]:
        """Returns a future that is done when the work was run. What is cancelled before is not run, and
        forgotten. Of one client's, what was begun first goes first: if the rest is submitted as soon as this
        is done, one is half done at a time, and in memory."""
        return self.begin(client, lambda _: run(), since).done

    def begin(self, client: str, run: Callable[[Between], T], since: float = 0.0) -> ThreadWork[T]:
        """Does the same for work that has a result, and that calls what it is given between its steps."""
        work = ThreadWork(client, run, self._clock)
        self._queue.push(client, since, work)
        self._go_on()
        return work

    def _go_on(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        loop, now, queue = asyncio.get_running_loop(), monotonic(), self._queue

        def may(work: ThreadWork[Any]) -> bool:
            return queue.running(work.client) < self._each

        while self._free and (found := queue.pop(may, now)) is not None:
            client, work = found
            try:
                running = loop.run_in_executor(self._pool, work.run)
            except RuntimeError:  # the threads have ended
                queue.ended(client, 0.0)
                work.done.cancel()
                continue
            self._free -= 1
            work.begun = True
            running.add_done_callback(partial(self._ended, work))
        if self._free and queue.rests_s < INFINITY:
            self._next = loop.call_later(min(queue.rests_s, _LONGEST_REST_S), self._go_on)

    def _ended(self, work: ThreadWork[Any], running: asyncio.Future[Any]) -> None:
        self._free += 1
        error = asyncio.CancelledError() if running.cancelled() else running.exception()
        self._queue.ended(work.client, work.seconds)
        now = monotonic()
        self._accounts.spend(self._accounts.account(work.client, now), work.seconds, now)
        if not work.done.done():
            if isinstance(error, asyncio.CancelledError):
                work.done.cancel()
            elif error is not None:
                clear_frames(error.__traceback__)  # they hold the work, and that its future with this stack
                work.done.set_exception(error)
            else:
                work.done.set_result(running.result())
        if self._next is not None:
            self._next.cancel()
        # Not yet: first the rest of this may be submitted.
        self._next = asyncio.get_running_loop().call_soon(self._go_on)


def _nothing(_between: Between) -> Any:
    """Is left to be done."""
