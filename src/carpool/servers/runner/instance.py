"""One instance in the runner: a thread that reads where requests lie, runs them, and writes their answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from mmap import mmap

from carpool.backends.backend import Backend, BreaksProcess
from carpool.engine.batch_run import BatchResult, BatchRun
from carpool.engine.work import Outcome, Work
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.observe.logs import logger
from carpool.servers.door import ModelEntry
from carpool.servers.link.failures import write_failure
from carpool.servers.link.placement import Placement
from carpool.servers.link.records import MAX_TEMPLATE_BYTES, OK, ProtocolError, RecordReader
from carpool.servers.link.served import ServedTemplate, read_template
from carpool.servers.runner.messages import (
    ALIVE,
    CLEAN,
    DONE,
    FAMILY,
    FORGET,
    FROM_RUNNER,
    IDENTITY,
    RUN,
    SEAT,
    TO_RUNNER,
    Ending,
    write_endings,
)

_log = logger("runner")
_READ_BYTES = 1 << 18
_ARENA_S = 10.0  # it is on its way over another socket
_WRITING_S = 0.001
EXIT_BROKEN = 4
"""A device that this process cannot use any more: only a new one can."""


class Arenas:
    """The front ends' memory, by the number that the engine gave it."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap] = {}
        self._changed = threading.Condition()

    def add(self, number: int, memory: mmap) -> None:
        with self._changed:
            self._mapped[number] = memory
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """It stays mapped for as long as a batch has to do with it."""
        with self._changed:
            self._mapped.pop(number, None)

    def find(self, number: int) -> mmap:
        memory = self._mapped.get(number)
        if memory is not None:
            return memory
        with self._changed:
            self._changed.wait_for(lambda: number in self._mapped, _ARENA_S)
            memory = self._mapped.get(number)
        if memory is None:
            raise Unavailable("the front end is gone", reason="frontend-gone")
        return memory


class RunnerInstance:
    """Serves until the engine closes its end of the socket, then frees the model and closes ours."""

    def __init__(
        self,
        backend: Backend,
        batches: BatchRun,
        entry: ModelEntry,
        arenas: Arenas,
        sock: socket.socket,
        most: int,
        ended: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._batches = batches
        self._entry = entry
        self._arenas = arenas
        self._socket = sock
        self._most = most
        self._ended = ended
        self._families: dict[int, ServedTemplate] = {}
        self._placements: list[Placement] = []
        self._aborted = False
        threading.Thread(target=self._serve, name=f"{entry.name}-instance", daemon=True).start()

    def abort(self) -> None:
        """From another thread: returns when nothing will be written any more, however long the batch runs."""
        self._aborted = True
        self._backend.abort()
        for placement in list(self._placements):
            while not placement.close():
                time.sleep(_WRITING_S)

    def _serve(self) -> None:
        reader = RecordReader(TO_RUNNER, MAX_TEMPLATE_BYTES + IDENTITY.size)
        try:
            while data := self._socket.recv(_READ_BYTES):
                for (kind, _), payload in reader.feed(data):
                    self._obey(kind, payload)
        except OSError as error:
            _log.warning("instance-cut-off", model=self._entry.name, error=str(error))
        except Exception:
            _log.exception("instance-failed", model=self._entry.name)
        self._backend.close()
        self._socket.close()
        self._ended()

    def _obey(self, kind: int, payload: bytes) -> None:
        if kind == RUN:
            self._run(payload)
        elif kind == FAMILY:
            (identity,) = IDENTITY.unpack_from(payload)
            template = read_template(payload[IDENTITY.size :], lambda _key: self._entry)
            self._families[identity] = template
        elif kind == FORGET:
            self._families.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _run(self, payload: bytes) -> None:
        works: list[Work] = []
        placements: list[Placement] = []
        wrong: dict[int, CarpoolError] = {}
        for index, seat in enumerate(SEAT.iter_unpack(payload)):
            try:
                work, placement = self._take(*seat)
            except CarpoolError as error:
                wrong[index] = error
            else:
                works.append(work)
                placements.append(placement)
        self._placements = placements
        if self._aborted:  # it may have looked before they were there
            for placement in placements:
                placement.close()
        result = self._batches.run(works) if works else BatchResult([], 0.0)
        endings = [_ending(*pair) for pair in zip(result.outcomes, placements, strict=True)]
        self._placements = []
        for index, mistake in wrong.items():
            endings.insert(index, _failed(mistake))
        self._answer(result, endings, clean=result.clean and not wrong)

    def _take(
        self, arena: int, family: int, offset: int, output: int, capacity: int
    ) -> tuple[Work, Placement]:
        template = self._families[family]
        memory = self._arenas.find(arena)
        try:
            inputs = template.bind(memory, offset)
        except ProtocolError as error:  # a front end that lies about the length of a file
            raise ModelError(f"{self._entry.name}: {error}") from None
        placement = Placement(0, template, memory, output, capacity, self._most)
        work = Work(
            inputs,
            _nobody_waits,
            images=template.images,
            wanted=template.wanted,
            place=placement,
            encoded=template.encoded,
        )
        return work, placement

    def _answer(self, result: BatchResult, endings: Sequence[Ending], *, clean: bool) -> None:
        timing = result.timing
        payload = write_endings(endings)
        alive = self._backend.alive
        record = FROM_RUNNER.pack(
            DONE,
            len(payload),
            timing.batch,
            result.out_of_memory,
            CLEAN * clean | ALIVE * alive,
            result.seconds,
            timing.input,
            timing.infer,
            timing.output,
        )
        self._socket.sendall(record + payload)
        if isinstance(self._backend, BreaksProcess) and self._backend.broken:
            _log.error("device-broken", model=self._entry.name)
            os._exit(EXIT_BROKEN)


def _nobody_waits(_work: Work, _outcome: Outcome) -> None:
    """The engine is told of the whole batch."""


def _ending(outcome: Outcome, placement: Placement) -> Ending:
    error = outcome.error or placement.error
    if error is not None:
        return _failed(error)
    if placement.form is None:
        return _failed(ModelError("the batch was stopped before it ended", reason="aborted"))
    return Ending(OK, placement.form, placement.payload)


def _failed(error: CarpoolError) -> Ending:
    status, payload = write_failure(error)
    return Ending(status, 0, payload)
