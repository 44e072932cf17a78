"""Computes an answer that was sent once more, and compares it: for the audits of caches and cascades, and for
rollouts, where another version computes it.

No client waits for that. Pictures are prepared in threads that have nothing else to do, the model runs them
as background work, and the two answers are compared off the loop. Under load nothing is computed again, so
nothing is proven either: what is skipped is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

from carpool.errors import CarpoolError, without_stack
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.workers import Then
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import BACKGROUND, Answer, Ask, Call, OneAnswer
from carpool.memory.arena import Slot
from carpool.wire.v2 import RequestHead

T = TypeVar("T")

Aside: TypeAlias = Callable[[Callable[[], Any], Then], bool]
"""Does work in a thread; False where it cannot."""


def in_threads(threads: Executor) -> Aside:
    """Behind whatever else these threads have to do. A `then` that raises is a bug: it is called once more,
    so that it gives back what it holds."""

    def aside(work: Callable[[], T], then: Then) -> bool:
        def came_back(done: asyncio.Future[T]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            try:
                then(done.result() if error is None else None, error and without_stack(error))
            except Exception as bug:
                then(None, without_stack(bug))

        try:
            future = asyncio.get_running_loop().run_in_executor(threads, work)
        except RuntimeError:  # there are no threads any more
            return False
        future.add_done_callback(came_back)
        return True

    return aside


class Recomputation(OneAnswer, Generic[T]):
    """Represents one answer. It ends with `_compared` or with `_skipped`. Used in the loop's thread, but for
    `_compare`, whose result `_compared` gets."""

    def __init__(self, service: PictureService, entry: ModelEntry, aside: Aside) -> None:
        """`entry` is the version that computes it, `aside` does the comparing."""
        self._service = service
        self._entry = entry
        self._aside = aside
        self._call: Call | None = None

    def _compare(self, answer: Answer) -> T:
        raise NotImplementedError

    def _compared(self, found: T) -> None:
        raise NotImplementedError

    def _skipped(self, why: str) -> None:
        """`why` is one of the words that a rollout counts as skipped."""
        raise NotImplementedError

    def _failed(self, error: CarpoolError) -> None:
        """The model has not answered it."""
        self._skipped("busy")

    def _not_compared(self, error: BaseException) -> None:
        self._skipped("failed")

    # ── its way ──

    def prepare(self, head: RequestHead, size: int, write: Callable[[memoryview], object]) -> None:
        """Have a thread that is idle write its inputs into a slot, and go on with that."""
        try:
            slot = self._service.engine.slot(size)
        except CarpoolError:  # no memory now
            self._skipped("slots")
            return
        if not self._service.workers.idle(partial(write, slot.view), partial(self._prepared, head, slot)):
            slot.release()
            self._skipped("busy")

    def _prepared(self, head: RequestHead, slot: Slot, _made: object, error: BaseException | None) -> None:
        if error is None:
            self.run(head, slot)
        else:
            slot.release()
            self._skipped("failed")

    def run(self, head: RequestHead, slot: Slot, tail: int = 0) -> None:
        """Takes the slot, in which its inputs lie."""
        try:
            ask = Ask(self._entry, head, slot, tail, monotonic(), handling=BACKGROUND)
            self._call = self._service.engine.infer(ask, self)
        except CarpoolError:
            slot.release()
            self._skipped("slots")

    def done(self, answer: Answer) -> None:
        if answer.error is not None:
            self._release()
            self._failed(answer.error)
        elif not self._aside(partial(self._compare, answer), self._came_back):
            self._release()
            self._skipped("busy")

    def _came_back(self, found: T | None, error: BaseException | None) -> None:
        self._release()
        if error is not None:
            self._not_compared(error)
        elif found is not None:
            self._compared(found)

    def _release(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.release()
