"""Threads for what clients make us decode, shared fairly among them: see `FairQueue`. A client that has had
its part of the time rests while there are others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic

from carpool.frontend.clients.accounts import Accounts, FairQueue

_LONGEST_REST_S = 1.0


class _Work:
    __slots__ = ("client", "done", "run")

    def __init__(self, client: str, run: Callable[[], None], done: asyncio.Future[None]) -> None:
        self.client = client
        self.run = run
        self.done = done

    def forget(self, _done: asyncio.Future[None]) -> None:
        """It may still stand in the queue, and is not to keep what it would have worked on."""
        self.run = _nothing


class FairThreads:
    """Runs work in threads, and is to be used in the loop's thread. Of one client's work, one piece runs at a
    time."""

    def __init__(self, accounts: Accounts, pool: Executor, most: int) -> None:
        """Makes a queue that runs `most` at a time."""
        self._accounts = accounts
        self._pool = pool
        self._free = most
        self._queue: FairQueue[_Work] = FairQueue(lambda work: not work.done.done())
        self._next: asyncio.Handle | None = None  # look for what may begin: one, however much waits

    def submit(self, client: str, run: Callable[[], None], since: float = 0.0) -> asyncio.Future[None]:
        """Returns a future that is done when the work was run. What is cancelled before is not run, and
        forgotten. Of one client's, what was begun first goes first: if the rest is submitted as soon as this
        is done, one is half done at a time, and in memory."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = _Work(client, run, done)
        done.add_done_callback(work.forget)
        self._queue.push(client, since, work)
        self._go_on()
        return done

    def _go_on(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        loop, now, resting = asyncio.get_running_loop(), monotonic(), [_LONGEST_REST_S]

        def may(work: _Work) -> bool:
            if self._queue.running(work.client):
                return False
            rest_s = self._accounts.rest_s(work.client, now)
            if rest_s > 0.0:
                resting.append(rest_s)
            return rest_s <= 0.0

        while self._free and (found := self._queue.pop(may)) is not None:
            self._free -= 1
            running = loop.run_in_executor(self._pool, _timed, found[1].run)
            running.add_done_callback(partial(self._ended, found[1]))
        if self._free and len(resting) > 1:
            self._next = loop.call_later(min(resting), self._go_on)

    def _ended(self, work: _Work, running: asyncio.Future[float]) -> None:
        self._free += 1
        error = asyncio.CancelledError() if running.cancelled() else running.exception()
        seconds = running.result() if error is None else 0.0
        self._queue.ended(work.client, seconds)
        now = monotonic()
        self._accounts.spend(self._accounts.account(work.client, now), seconds, now)
        if not work.done.done():
            if isinstance(error, asyncio.CancelledError):
                work.done.cancel()
            elif error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(None)
        if self._next is not None:
            self._next.cancel()
        # Not yet: first the rest of this may be submitted.
        self._next = asyncio.get_running_loop().call_soon(self._go_on)


def _nothing() -> None:
    """Is left to be done."""


def _timed(run: Callable[[], None]) -> float:
    began = monotonic()
    run()
    return monotonic() - began
