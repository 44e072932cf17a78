"""One instance at work: a thread that runs its batches one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from carpool.backends.backend import Backend
from carpool.engine.batch_run import BatchResult, BatchRun
from carpool.engine.collate import answer_each
from carpool.engine.work import Work
from carpool.types import Signature

Report = Callable[["Executes", BatchResult], None]


class Executes(Protocol):
    """What runs the batches of one instance. Called on the loop's thread; how batches end is reported."""

    @property
    def alive(self) -> bool:
        """False once it can answer no more: replace it."""

    @property
    def responsive(self) -> bool:
        """False while the process that runs it does not move."""

    def run(self, works: Sequence[Work]) -> None: ...

    def abort(self) -> None:
        """The batch that runs is of no use any more, and no other will start."""

    def close(self) -> None:
        """Finish what it was given, then free the model."""

    def join(self, timeout: float) -> None:
        """From another thread: wait until the model is freed."""


class Executor:
    """Runs batches in its own thread and reports from there."""

    def __init__(
        self, backend: Backend, signature: Signature, largest: int, chunk: int, report: Report
    ) -> None:
        self._backend = backend
        self._batches = BatchRun(backend, signature, largest, chunk, answer_each)
        self._report = report
        self._queue: SimpleQueue[Sequence[Work] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"{signature.model}-instance", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._backend.alive

    @property
    def responsive(self) -> bool:
        return True  # it shares the engine's process, which others watch

    def run(self, works: Sequence[Work]) -> None:
        self._queue.put(works)

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _serve(self) -> None:
        while (works := self._queue.get()) is not None:
            self._report(self, self._batches.run(works))
        self._backend.close()
