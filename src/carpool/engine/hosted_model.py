"""A model in the runner, as the engine holds it: loaded there, and run there, one message for each batch."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from time import monotonic
from typing import Protocol, TypeVar

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.batch import BatchResult
from carpool.engine.models.loading import InstanceEvents, Ready, ReportStep
from carpool.engine.runner_documents import LoadOrder, OpenedAs, Opening, Prepared
from carpool.engine.work import Outcome, Work
from carpool.errors import ModelError, Unsupported
from carpool.link.link_failures import read_failure
from carpool.link.records import (
    ALIVE,
    CLEAN,
    FROM_RUNNER,
    MAX_RUNNER_TEMPLATES,
    OK,
    RESET,
    RUN,
    RUN_PLACE,
    TEMPLATE,
    TO_RUNNER,
    ProtocolError,
    RecordReader,
    read_endings,
)
from carpool.link.request_place import RequestPlace
from carpool.observe.logs import logger
from carpool.types import Timing

_READ_BYTES = 1 << 18


class Wire:
    """`heard` gets what arrives; `gone` is called once, when the other side has closed or died."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[bytes], None],
        gone: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._heard = heard
        self._gone = gone
        self._unsent = bytearray()
        self._open = True
        loop.add_reader(sock.fileno(), self._read)

    def send(self, data: bytes) -> None:
        """Nothing after it is gone: whoever sends is told of that by `gone`."""
        if not self._open or self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def finish(self) -> None:
        """Say that nothing more will come; what was sent is still answered."""
        if self._open and not self._unsent:
            with suppress(OSError):  # it was faster
                self._socket.shutdown(socket.SHUT_WR)
        elif self._open:
            self._end()  # it does not listen

    def _flush(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and self._open:
            self._loop.remove_writer(self._socket.fileno())

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is gone, which reading tells too

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._heard(data)
        else:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._gone()


T = TypeVar("T")
_log = logger("runner")
_LISTS_BYTES = 64 << 20  # beside the outputs that do not fit their slots: failures, lists
_SPIN_S = 0.001
"""So long the loop does not sleep for a lone image on a device, which is done by then: waking up would take a
good part of the time that it took."""
_ABORT_S = 30.0
_pack_place = RUN_PLACE.pack


class RunnerProcessLike(Protocol):
    """The process that models run in, as `Runner` keeps it."""

    max_answer_bytes: int
    stalled: bool

    def wait_for(
        self, word: str, kind: type[T], document: object, tell: ReportStep = ..., **fields: int
    ) -> T: ...

    def stand_by_with(self, packages: object) -> None: ...

    def serve(self, instance: HostedInstance, piece: int, sock: socket.socket) -> None: ...

    def abort(self, instance: HostedInstance) -> None: ...

    def drop(self, instance: HostedInstance) -> None: ...

    def left(self, instance: HostedInstance) -> None: ...

    def kill(self) -> None: ...


class HostedLoading:
    """Implements `Loads`: one version, loaded in the runner. Its methods wait, and are not for the loop."""

    def __init__(
        self, runner: RunnerProcessLike, number: int, config: ModelConfig, version: ModelVersion
    ) -> None:
        self._runner = runner
        self._number = number
        self._asked = LoadOrder(config, version)
        self._found: tuple[Ready, int | None] | None = None  # and the threads of an instance

    def check(self) -> None:
        """Its file is read where it runs: the process for that takes seconds to start."""
        config, package = self._asked.config, kind_of(self._asked.config.backend).package
        if package and find_spec(package) is None:
            raise Unsupported(f"{config.name}: needs {package} (pip install {package})")

    def prepare(self, tell: ReportStep) -> Ready:
        found = self._runner.wait_for("prepare", Prepared, self._asked, tell, loading=self._number)
        self._runner.stand_by_with(found.packages)
        self._found = found.ready, found.threads
        return replace(found.ready, backends=[self._instance(which) for which in found.opened])

    def backend(self, config: ModelConfig, index: int, count: int) -> HostedInstance:
        """A runner that was started anew learns first what the last one had found out."""
        del config  # what was found goes along
        assert self._found is not None
        document = Opening(self._asked, *self._found)
        number = self._number
        which = self._runner.wait_for("open", OpenedAs, document, loading=number, index=index, count=count)
        return self._instance(which)

    def _instance(self, which: OpenedAs) -> HostedInstance:
        return HostedInstance(self._runner, self._asked.config.name, which.number, which.device)


class HostedInstance:
    """Implements `HostedBackend` and, once it serves, `Executes`."""

    def __init__(self, runner: RunnerProcessLike, model: str, number: int, device: str) -> None:
        self._runner = runner
        self._model = model
        self.number = number
        self.device = device  # shared with other models; empty: none
        self.alive = True
        self._known: set[int] = set()
        self._works: Sequence[Work] | None = None
        self._unsettled: Sequence[Work] = ()
        self._freed = threading.Event()
        self._reader = RecordReader(FROM_RUNNER, runner.max_answer_bytes + _LISTS_BYTES)
        self._wire: Wire | None = None
        self._spins_until = 0.0

    @property
    def responsive(self) -> bool:
        return not self._runner.stalled

    def serve(self, piece: int, hearer: InstanceEvents) -> HostedInstance:
        self._hearer = hearer
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours, self._loop, self._heard, self._gone)
        with theirs:
            self._runner.serve(self, piece, theirs)
        return self

    # ---- batches ----------------------------------------------------------------------------------------

    def run(self, works: Sequence[Work]) -> None:
        assert self._wire is not None
        self._works = works
        said: list[bytes] = []
        places: list[bytes] = []
        if len(self._known) >= MAX_RUNNER_TEMPLATES:
            self._known.clear()
            said.append(TO_RUNNER.pack(RESET, 0, 0))
        known = self._known
        for work in works:
            place = _place(work)
            template = place.template
            identity = template.identity
            if identity not in known:
                known.add(identity)
                said += (TO_RUNNER.pack(TEMPLATE, len(template.payload), identity), template.payload)
            place.held = True
            places.append(_pack_place(place.arena, identity, place.offset, place.output, place.capacity))
        said.append(TO_RUNNER.pack(RUN, len(places) * RUN_PLACE.size, 0))
        self._wire.send(b"".join(said + places))
        if self.device and len(works) == 1:
            self._spins_until = monotonic() + _SPIN_S
            self._spin()

    def _spin(self) -> None:
        """A loop with something to call looks at its sockets without sleeping."""
        if self._works is not None and monotonic() < self._spins_until:
            self._loop.call_soon(self._spin)

    def _heard(self, data: bytes) -> None:
        try:
            for fields, payload in self._reader.feed(data):
                self._done(fields, payload)
        except (ProtocolError, ValueError) as error:
            _log.error("runner-not-understood", model=self._model, error=str(error))
            self._runner.kill()

    def _done(self, fields: tuple[float, ...], payload: bytes) -> None:
        _, _, images, short, flags, seconds, input_s, infer_s, output_s = fields
        works, self._works = self._works, None
        if works is None:
            return  # it was aborted, and its riders were told
        self.alive = bool(int(flags) & ALIVE)
        outcomes: list[Outcome] = []
        for work, (status, form, said) in zip(works, read_endings(payload, len(works)), strict=True):
            place = _place(work)
            place.held = False
            if status == OK:
                place.form, place.payload = form, said
                outcomes.append(Outcome())
            else:
                outcomes.append(Outcome(error=read_failure(status, said)))
        timing = Timing(0.0, input_s, infer_s, output_s, int(images))
        clean = bool(int(flags) & CLEAN)
        self._hearer.ended(self, BatchResult(outcomes, seconds, timing, clean, int(short)))

    # ---- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Its riders' memory is held until the runner says that nothing more is written there."""
        self.alive = False
        self._unsettled, self._works = self._works or (), None
        self._runner.abort(self)
        self._loop.call_later(_ABORT_S, self._insist)

    def _insist(self) -> None:
        """A batch that does not end even so holds its device: only the end of its process frees that."""
        if not self._freed.is_set():
            _log.error("batch-stuck", model=self._model, after_s=_ABORT_S)
            self._runner.kill()

    def settled(self) -> None:
        for work in self._unsettled:
            _place(work).held = False
        self._unsettled = ()

    def close(self) -> None:
        if self._wire is None:
            self._runner.drop(self)
        else:
            self._wire.finish()

    def join(self, timeout: float) -> None:
        self._freed.wait(timeout)

    def _gone(self) -> None:
        """Closed as it was asked to, or its process died."""
        self.alive = False
        self._freed.set()
        self._runner.left(self)
        self.settled()
        works, self._works = self._works, None
        if works is None:
            self._hearer.lost(self)
            return
        for work in works:
            _place(work).held = False
        error = ModelError(f"{self._model}: the process that runs it died", reason="model-died")
        outcomes = [Outcome(error=error) for _ in works]
        timing = Timing(batch=sum(work.images for work in works))
        self._hearer.ended(self, BatchResult(outcomes, 0.0, timing, clean=False))


def _place(work: Work) -> RequestPlace:
    assert work.place is not None  # the engine lets nothing else in
    return work.place
