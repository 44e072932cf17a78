"""One instance in the runner of a model that writes: a thread reads what the engine says, others write."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from carpool.core.curve import BatchCurve
from carpool.engine.loading.loading import Ready
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.text.stepper import TextInstance
from carpool.extensions.text.text_loading import TextLoading, promise_of
from carpool.extensions.text.text_loop import TextLoop
from carpool.extensions.text.text_records import ASKED, LEAVE, WRITE, Event, Failed, write_events
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.extensions.torch.hosted_part import HostedPart
from carpool.extensions.torch.runner_instance import Arenas, EngineSocket
from carpool.link import records
from carpool.link.catalog import ModelEntry
from carpool.types import Array


class RunnerText(EngineSocket):
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
        super().__init__(entry, arenas, sock)
        self._instance = instance
        self._sending = threading.Lock()
        self._gone = ended
        scheduler = TextScheduler(ready.curve, ready.step, promise_of(ready.config, instance.slots))
        self._loop = TextLoop(entry.name, instance, scheduler, self._send, self._over)
        self._loop.start()
        threading.Thread(target=self._serve, name=f"{entry.name}-instance", daemon=True).start()

    def abort(self) -> None:
        """Aborts from another thread. Nothing writes to requests' memory: there is nothing to wait for."""
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
        self._die_if_broken(broken=self._instance.broken)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The engine was faster."""

    def _serve(self) -> None:
        self._listen()
        self._loop.close()
        with self._sending:
            self._socket.close()
        self._gone()

    def _obeys(self, kind: int, number: int, payload: bytes) -> bool:
        if kind == WRITE:
            self._write(number, payload)
        elif kind == LEAVE:
            self._loop.cancel(number)
        return kind in (WRITE, LEAVE)

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


HOSTED = HostedPart(TextLoading, RunnerText)
