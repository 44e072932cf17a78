"""One instance in the runner of a model that writes: a thread reads what the engine says, others write."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from carpool.backends.stepper import TextInstance
from carpool.core.curve import BatchCurve
from carpool.core.text_scheduler import TextScheduler
from carpool.engine.generation.text_loading import promise_of
from carpool.engine.generation.text_loop import TextLoop
from carpool.engine.loading.loading import Ready
from carpool.errors import CarpoolError, ModelError
from carpool.link import records
from carpool.link.door import ModelEntry
from carpool.link.records import ProtocolError, RecordReader
from carpool.link.templates import ServedTemplate, read_template
from carpool.link.text_records import ASKED, LEAVE, WRITE, Event, Failed, write_events
from carpool.observe.logs import logger
from carpool.runner.runner_instance import EXIT_BROKEN, Arenas
from carpool.types import Array

_log = logger("runner")
_READ_BYTES = 1 << 18


class RunnerText:
    """Serves until the engine closes its end of the socket, or the device fails; then it closes ours.

    Several threads send: those that write, and the reader's for what it refuses. A lock keeps their records
    whole.
    """

    def __init__(
        self,
        instance: TextInstance,
        ready: Ready,
        entry: ModelEntry,
        arenas: Arenas,
        sock: socket.socket,
        ended: Callable[[], None],
    ) -> None:
        assert isinstance(ready.step, BatchCurve)
        self._instance = instance
        self._entry = entry
        self._arenas = arenas
        self._socket = sock
        self._sending = threading.Lock()
        self._gone = ended
        self._templates: dict[int, ServedTemplate] = {}
        scheduler = TextScheduler(ready.curve, ready.step, promise_of(ready.config, instance.slots))
        self._loop = TextLoop(entry.name, instance, scheduler, self._send, self._over)
        self._loop.start()
        threading.Thread(target=self._serve, name=f"{entry.name}-instance", daemon=True).start()

    def abort(self) -> None:
        """From another thread. Nothing is written to anybody's memory: there is nothing to wait for."""
        self._instance.abort()
        self._loop.close()

    def _send(self, events: Sequence[Event]) -> None:
        try:
            with self._sending:
                self._socket.sendall(write_events(events))
        except OSError:
            self._loop.close()  # the engine is gone

    def _over(self) -> None:
        """In a writer's thread, after its last word: the engine hears of the end by the socket."""
        if self._instance.broken:
            _log.error("device-broken", model=self._entry.name)
            os._exit(EXIT_BROKEN)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The engine was faster."""

    def _serve(self) -> None:
        reader = RecordReader(records.TO_RUNNER, records.MAX_TEMPLATE_BYTES)
        try:
            while data := self._socket.recv(_READ_BYTES):
                for (kind, _, number), payload in reader.feed(data):
                    self._obey(kind, number, payload)
        except OSError as error:
            _log.warning("instance-cut-off", model=self._entry.name, error=str(error))
        except Exception:
            _log.exception("instance-failed", model=self._entry.name)
        self._loop.close()
        with self._sending:
            self._socket.close()
        self._gone()

    def _obey(self, kind: int, number: int, payload: bytes) -> None:
        if kind == WRITE:
            self._write(number, payload)
        elif kind == LEAVE:
            self._loop.cancel(number)
        elif kind == records.TEMPLATE:
            self._templates[number] = read_template(payload, lambda _key: self._entry)
        elif kind == records.RESET:
            self._templates.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _write(self, number: int, payload: bytes) -> None:
        arena, template, offset, _, _ = records.RUN_PLACE.unpack_from(payload)
        arrived, deadline, limit = ASKED.unpack_from(payload, records.RUN_PLACE.size)
        error: CarpoolError | None
        try:
            known = self._templates[template]
            found = self._arenas.find(arena).find(template, known, offset, _as_it_is)
            picture = self._instance.read(found.inputs)
            error = self._loop.submit(number, picture, arrived, deadline, limit)
        except CarpoolError as refused:
            error = refused
        except ValueError as wrong:
            error = ModelError(f"{self._entry.name}: {wrong}")
        if error is not None:
            self._send([Failed(number, error)])


def _as_it_is(_inputs: Mapping[str, Array]) -> None:
    """Nothing to keep: a picture is copied once."""
