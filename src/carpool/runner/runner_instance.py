"""One instance in the runner: a thread that reads where requests lie, runs them, and writes their answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from carpool.backends.backend import Backend, BreaksProcess, Gathers, SharesDevice
from carpool.engine.batch import BatchResult, BatchRun
from carpool.errors import CarpoolError, ModelError
from carpool.link.door import ModelEntry
from carpool.link.link_failures import write_failure
from carpool.link.records import (
    ALIVE,
    CLEAN,
    FROM_RUNNER,
    MAX_TEMPLATE_BYTES,
    RAN,
    RESET,
    RUN,
    RUN_PLACE,
    TEMPLATE,
    TO_RUNNER,
    Ending,
    ProtocolError,
    RecordReader,
    write_endings,
)
from carpool.link.templates import ServedTemplate, read_template
from carpool.observe.logs import logger
from carpool.runner.runner_memory import Arenas, Delivery, Placed, RequestInMemory, Slot, View
from carpool.types import Array

_log = logger("runner")
_READ_BYTES = 1 << 18
_WRITING_S = 0.001
_SPIN_S = 0.001
"""So long a thread looks for the next lone image on a device before it sleeps: waking up would take a good
part of the time that such an image takes."""
EXIT_BROKEN = 4
"""A device that this process cannot use any more: only a new one can."""


class RunnerInstance:
    """Serves until the engine closes its end of the socket, then frees the model and closes ours."""

    def __init__(
        self,
        backend: Backend,
        entry: ModelEntry,
        arenas: Arenas,
        sock: socket.socket,
        piece: int,
        most: int,
        ended: Callable[[], None],
    ) -> None:
        """A batch runs in pieces of `piece` images; `most` are the bytes that an answer may take."""
        self._backend = backend
        self._on_device = isinstance(backend, SharesDevice) and bool(backend.device)
        self._spins_until = 0.0
        self._breaks = backend if isinstance(backend, BreaksProcess) else None
        self._view: View = backend.view if isinstance(backend, Gathers) else _as_they_are
        self._delivery = Delivery(entry.name, most)
        largest = max(1, entry.signature.max_batch)
        self._shape = (entry.signature, largest, piece)
        self._batches = BatchRun(backend, *self._shape, self._delivery)
        self._next_backend: Backend | None = None
        self._swapping = threading.Lock()
        self._over = False
        self._entry = entry
        self._arenas = arenas
        self._socket = sock
        self._ended = ended
        self._templates: dict[int, ServedTemplate] = {}
        threading.Thread(target=self._serve, name=f"{entry.name}-instance", daemon=True).start()

    def swap(self, backend: Backend) -> None:
        """From another thread: use this one, of the same model, from the next batch on; it is better than one
        that was given before and is not in use yet."""
        with self._swapping:
            if not self._over:
                self._next_backend, unused = backend, self._next_backend
            else:
                unused = backend
        if unused is not None:
            unused.close()

    def _take_next_backend(self) -> None:
        """In the instance's own thread, between two batches: nothing is in use."""
        with self._swapping:
            backend, self._next_backend = self._next_backend, None
        if backend is not None:
            old, self._backend = self._backend, backend
            self._batches = BatchRun(backend, *self._shape, self._delivery)
            self._breaks = backend if isinstance(backend, BreaksProcess) else None
            self._view = backend.view if isinstance(backend, Gathers) else _as_they_are
            old.close()

    def abort(self) -> None:
        """From another thread: returns when nothing will be written any more, however long the batch runs."""
        self._backend.abort()
        while not self._delivery.close():
            time.sleep(_WRITING_S)

    def _serve(self) -> None:
        reader = RecordReader(TO_RUNNER, MAX_TEMPLATE_BYTES)
        try:
            while data := self._next():
                for (kind, _, number), payload in reader.feed(data):
                    self._obey(kind, number, payload)
        except OSError as error:
            _log.warning("instance-cut-off", model=self._entry.name, error=str(error))
        except Exception:
            _log.exception("instance-failed", model=self._entry.name)
        with self._swapping:
            self._over = True
        self._take_next_backend()
        self._backend.close()
        self._socket.close()
        self._ended()

    def _next(self) -> bytes:
        """What the engine says next; soon, if it asked for a lone image: a client that waits asks again."""
        while time.monotonic() < self._spins_until:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                """Not yet. The call gave up the interpreter, so that nobody waits for who spins."""
        return self._socket.recv(_READ_BYTES)

    def _obey(self, kind: int, number: int, payload: bytes) -> None:
        if kind == RUN:
            if self._next_backend is not None:
                self._take_next_backend()
            self._run(payload)
        elif kind == TEMPLATE:
            self._templates[number] = read_template(payload, lambda _key: self._entry)
        elif kind == RESET:
            self._templates.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _run(self, payload: bytes) -> None:
        riders: list[RequestInMemory] = []
        slots: list[Slot] = []
        wrong: dict[int, CarpoolError] = {}
        find, templates, view = self._arenas.find, self._templates, self._view
        for index, (arena, number, offset, output, capacity) in enumerate(RUN_PLACE.iter_unpack(payload)):
            try:
                riders.append(find(arena).find(number, templates[number], offset, view))
                slots.append((output, capacity))
            except CarpoolError as error:
                wrong[index] = error
            except ValueError as error:  # a front end that lies about the length of a file
                wrong[index] = ModelError(f"{self._entry.name}: {error}")
        self._delivery.begin(slots)
        result = self._batches.run(riders) if riders else BatchResult([], 0.0)
        endings = [
            outcome.ending if isinstance(outcome, Placed) else _failed(cast(CarpoolError, outcome.error))
            for outcome in result.outcomes
        ]
        for index, mistake in wrong.items():
            endings.insert(index, _failed(mistake))
        self._answer(result, endings, clean=result.clean and not wrong)

    def _answer(self, result: BatchResult, endings: Sequence[Ending], *, clean: bool) -> None:
        timing = result.timing
        payload = write_endings(endings)
        alive = self._backend.alive
        record = FROM_RUNNER.pack(
            RAN,
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
        if self._on_device and timing.batch == 1:
            self._spins_until = time.monotonic() + _SPIN_S
        if self._breaks is not None and self._breaks.broken:
            _log.error("device-broken", model=self._entry.name)
            os._exit(EXIT_BROKEN)


def _as_they_are(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return inputs


def _failed(error: CarpoolError) -> Ending:
    status, payload = write_failure(error)
    return Ending(status, 0, payload)
