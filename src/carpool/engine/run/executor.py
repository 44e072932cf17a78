"""Runs the batches of one instance: in a thread of its own, or the loop's, where that is over at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, thread_time
from typing import Final, Protocol

from carpool.backends.backend import Backend, RunsAnywhere
from carpool.engine.run.batch import BatchResult, BatchRun, Outcome, Work, answer_each
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError
from carpool.observe.logs import logger
from carpool.types import Datatype, Signature

_log = logger("engine")

BRIEF_S: Final = 0.0005
"""The loop runs what is expected to take no longer: passing it to another thread and back takes about half
of that, and a new request may well wait so long."""
_HELD_S: Final = 3 * BRIEF_S  # of computing: what takes longer was not what it was taken for
_FAR_TOO_LONG_S: Final = 0.03  # no collection of garbage takes so long
_FORGIVEN_AFTER: Final = 1000  # batches in time for one that was not
_CHANCES: Final = 3
_ONE_CAUSE_S: Final = 0.1  # of slow runs that are so close together
_REST_S: Final = 5.0  # the first time that they are used up; twice as long each time from then on
_LONGEST_REST_S: Final = 320.0
_LOOK_S = 0.25
STOPPED_S: Final = 2 * _LOOK_S
"""By then one that hangs is stopped, before the engine counts as standing still."""


class LoopTime:
    """Measures how much of its loop's time an engine spends on batches, of all its models: at most two
    thirds.

    A model sees only that none of its own requests waits; those of many other models may wait for the loop.
    """

    __slots__ = ("_from",)

    def __init__(self) -> None:
        self._from = 0.0

    def is_free(self, now: float) -> bool:
        return now >= self._from

    def spent(self, began: float, ended: float) -> None:
        self._from = ended + (ended - began) / 2


class Brief:
    """Decides, of one model version whose batches the loop may run, whether they are as short as they were
    measured.

    Only computing counts. A process that takes the processor away from the loop's thread takes it from the
    loop in any case, and then the way through another thread is longest. But a virtual machine that its host
    keeps from running counts that as computing, for milliseconds of each hundredth of a second, and a few of
    these would exclude a fast model for good: overruns that are close together count once, and the model may
    run in the loop again after a rest. One that stays slow gets another curve.
    """

    __slots__ = ("_counted", "_credit", "_from", "_rest", "loop_time")

    def __init__(self, loop_time: LoopTime) -> None:
        self.loop_time = loop_time
        self._credit = _CHANCES * _FORGIVEN_AFTER
        self._counted = -inf  # when a run was too slow, and cost a chance
        self._from = 0.0
        self._rest = _REST_S

    def may_run(self, now: float) -> bool:
        return now >= self._from and self.loop_time.is_free(now)

    def ran(self, computed: float, now: float) -> None:
        """Notes a run of so many seconds, which has ended now. After one that took far too long it never
        comes back; after a rest it has one chance, and earns the others."""
        if computed > _FAR_TOO_LONG_S:
            self._from = inf
        elif computed > _HELD_S:
            if now < self._counted + _ONE_CAUSE_S:
                return
            self._counted = now
            self._credit -= _FORGIVEN_AFTER
            if self._credit <= 0:
                self._from = now + self._rest
                self._rest = min(2 * self._rest, _LONGEST_REST_S)
                self._credit = _FORGIVEN_AFTER
        elif self._credit < _CHANCES * _FORGIVEN_AFTER:
            self._credit += 1
        else:
            self._rest = _REST_S


class Executes(Protocol):
    """Defines what runs the batches of one instance. Called on the loop's thread; how batches end is
    reported."""

    @property
    def alive(self) -> bool:
        """False once it can answer no more: replace it."""

    @property
    def responsive(self) -> bool:
        """Returns False while the process that runs it does not move."""

    def run(self, works: Sequence[Work]) -> None: ...

    def abort(self) -> None:
        """The batch that runs is of no use any more, and no other will start."""

    def close(self) -> None:
        """Finish what it was given, then free the model."""

    def join(self, timeout: float) -> None:
        """May be called from another thread: wait until the model is freed."""


Report = Callable[[Executes, BatchResult], None]

_WATCH: Sequence[Work] = ()  # no batch: look after those that the loop runs


class Executor:
    """Runs batches in its own thread and reports from there, or in the loop's while its own has nothing to
    do but to look after that.

    A batch that hangs there would hold up everything. Its own thread stops one that is still the same after
    `_LOOK_S`: `_runs` is odd while there is one. Waking that thread for each batch would cost what was to be
    saved, so it looks on its own for as long as there is something to see, and only then sleeps until it is
    woken. No lock is needed: the loop changes `_runs`, then reads `_watching`; the thread changes
    `_watching`, then reads `_runs`. Under the interpreter lock these four happen in one order, and in each at
    least one side sees the other: the loop that it is not watched, or the thread that it must go on.
    """

    def __init__(
        self,
        backend: Backend,
        signature: Signature,
        largest: int,
        chunk: int,
        report: Report,
        brief: Brief | None = None,
    ) -> None:
        self._backend = backend
        self._model = signature.model
        self._run = BatchRun(backend, signature, largest, chunk, answer_each).run
        self._report = report
        self.brief = brief if _is_alike(backend, signature) else None  # None: not for the loop
        self._runs = 0  # begun and ended here; written by the loop's thread only
        self._watching = False  # written by our thread only
        self._stopped = False
        self._queue: SimpleQueue[Sequence[Work] | None] = SimpleQueue()
        self._server = threading.Thread(target=self._serve, name=f"{signature.model}-instance", daemon=True)
        self._server.start()

    @property
    def alive(self) -> bool:
        return self._backend.alive

    @property
    def responsive(self) -> bool:
        return True  # it shares the engine's process, which others watch

    def run(self, works: Sequence[Work]) -> None:
        self._queue.put(works)

    def run_here(self, works: Sequence[Work]) -> BatchResult:
        """In the caller's thread, where `brief` says so; nothing is reported. Never raises."""
        brief = self.brief
        assert brief is not None  # else this is not called
        self._runs += 1
        if not self._watching:
            self._queue.put(_WATCH)
        began, computing = monotonic(), thread_time()
        result = self._result(works)
        computed = thread_time() - computing
        self._runs += 1
        ended = monotonic()
        brief.ran(computed if not self._stopped else inf, ended)
        brief.loop_time.spent(began, ended)
        if self._stopped:
            late = f"{self._model} did not finish a batch that should take {BRIEF_S * 1e3:g} ms at most"
            result = _failed(works, DeadlineExceeded(late, reason="execution-timeout"))
        return result

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        self._server.join(timeout)

    def _result(self, works: Sequence[Work]) -> BatchResult:
        try:
            return self._run(works)
        except Exception as error:  # a fault of ours must stop neither the thread nor its requests
            _log.exception("batch-failed", model=self._model)
            return _failed(works, ModelError(f"{self._model}: {type(error).__name__}: {error}"))

    def _serve(self) -> None:
        while True:
            before = self._runs
            try:
                works = self._queue.get(timeout=_LOOK_S if self._watching else None)
            except Empty:
                self._look(before)
                continue
            if works is None:
                break
            if works is _WATCH:
                self._watching = True
                continue
            result = self._result(works)
            with suppress(RuntimeError):  # one that was given up may end after the loop that it reports to
                self._report(self, result)
            del works, result  # while it waits for the next, the memory of a dead front end must go
        try:
            self._backend.close()
        except Exception:
            _log.exception("close-failed", model=self._model)

    def _look(self, before: int) -> None:
        """Looks `_LOOK_S` after `before` was read. A batch that is still the same is stopped; if there was
        none, watching ends."""
        if self._runs == before:
            if before % 2:
                _log.error("batch-stopped", model=self._model, after_s=_LOOK_S)
                self._stopped = True
                self._backend.abort()
            self._watching = False
            if self._runs != before:
                self._watching = True


def _is_alike(backend: Backend, signature: Signature) -> bool:
    """What it takes in one thread it takes in another, and for one request what it takes for another: what
    varies is not known before it runs."""
    return (
        isinstance(backend, RunsAnywhere)
        and backend.in_any_thread
        and all(spec.datatype is not Datatype.BYTES and -1 not in spec.shape for spec in signature.inputs)
    )


def _failed(works: Sequence[Work], error: CarpoolError) -> BatchResult:
    return BatchResult([Outcome(error=error) for _ in works], 0.0, clean=False)
