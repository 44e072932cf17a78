"""One instance at work: a thread that runs its batches one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from carpool.backends.backend import Backend
from carpool.engine.batch_run import BatchResult, BatchRun
from carpool.engine.collate import answer_each
from carpool.engine.work import Outcome, Work
from carpool.errors import ModelError
from carpool.observe.logs import logger
from carpool.types import Signature

_log = logger("engine")
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
        self._model = signature.model
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
            try:
                result = self._batches.run(works)
            except Exception as error:  # a fault of ours must take neither the thread nor its riders down
                _log.exception("batch-failed", model=self._model)
                failure = ModelError(f"{self._model}: {type(error).__name__}: {error}")
                result = BatchResult([Outcome(error=failure) for _ in works], 0.0, clean=False)
            self._report(self, result)
            del works, result  # while it waits for the next, the memory of a dead front end must go
        try:
            self._backend.close()
        except Exception:
            _log.exception("close-failed", model=self._model)
