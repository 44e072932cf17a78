"""A model in the runner, as the engine holds it: loaded there, and run there, one message for each batch."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.loading.loading import Ready, ReportStep
from carpool.engine.profile.model_profile import Profile
from carpool.engine.run.batch import BatchResult, Outcome, Work
from carpool.engine.run.driver import Driver
from carpool.errors import ModelError, Unsupported
from carpool.extensions.torch.runner_client import Compiler, Runner
from carpool.extensions.torch.runner_messages import CompiledInstances, LoadOrder, OpenedAs, Opening, Prepared
from carpool.link import records
from carpool.link.link_failures import read_failure
from carpool.link.records import ProtocolError, RecordReader, read_endings
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
        """Sends data, or drops it when the other side has ended: the caller learns of that by `gone`."""
        if not self._open:
            return
        if self._unsent:
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
            return len(data)  # the other side has ended, which reading reports too

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


_log = logger("runner")
_LISTS_BYTES = 64 << 20  # beside the outputs that do not fit their slots: failures, lists
_SPIN_S = 0.001
"""So long the loop does not sleep for a lone image on a device, which is done by then: waking up would take a
good part of the time that it took."""
_ABORT_S = 30.0
_pack_place = records.RUN_PLACE.pack


class HostedLoading:
    """Does the same as `Loading`, for one version in the runner. Its methods wait, and are not for the
    loop."""

    def __init__(self, runner: Runner, number: int, config: ModelConfig, version: ModelVersion) -> None:
        self._runner = runner
        self._number = number
        self._asked = LoadOrder(config, version)
        self._found: tuple[Ready, int | None] | None = None  # and the threads of an instance
        self.artifact_sizes: list[int] = []
        self.kept_as = ""

    def check(self) -> None:
        """Its file is read where it runs: the process for that takes seconds to start."""
        config = self._asked.config
        if missing := kind_of(config.backend).missing():
            raise Unsupported(f"{config.name}: {missing}")

    def prepare(self, tell: ReportStep) -> Ready:
        found = self._runner.wait_for("prepare", Prepared, self._asked, tell, loading=self._number)
        self._runner.stand_by_with(found.packages)
        self._found = found.ready, found.threads
        self.artifact_sizes, self.kept_as = found.artifact_sizes, found.profile_key
        return replace(found.ready, backends=[self._instance(which) for which in found.opened])

    def backend(self, index: int, count: int) -> HostedInstance:
        """A runner that was started anew learns first what the last one had found out."""
        number = self._number
        which = self._runner.wait_for(
            "open", OpenedAs, self.opening, loading=number, index=index, count=count
        )
        return self._instance(which)

    def abort(self) -> None:
        """The runner has other models too: no load ends it."""

    @property
    def opening(self) -> Opening:
        assert self._found is not None
        return Opening(self._asked, *self._found)

    def compile(self, size: int) -> CompiledInstances:
        """One batch size of the instances that serve; it lies in the compiler's cache, or takes long."""
        return self._runner.wait_for(
            "compile", CompiledInstances, self.opening, loading=self._number, size=size
        )

    def keep(self, profile: Profile) -> None:
        """Keeps a profile for the next start, and for instances that replace others."""
        assert self._found is not None
        ready, threads = self._found
        self._found = replace(ready, profile=profile), threads
        self._runner.wait_for("keep", type(None), self.opening, loading=self._number)

    def compiler(self) -> Compiler:
        return self._runner.compiler(self.opening)

    def _instance(self, which: OpenedAs) -> HostedInstance:
        return HostedInstance(self._runner, self._asked.config.name, which.number, which.device)


class InRunner:
    """An instance there, as far as its end goes. `stuck` is what the log calls one that does not end."""

    stuck = "batch-stuck"
    _loop: asyncio.AbstractEventLoop

    def __init__(self, runner: Runner, model: str, number: int, device: str) -> None:
        self.runner = runner
        self._model = model
        self.number = number
        self.device = device  # shared with other models; empty: none
        self.alive = True
        self._freed = threading.Event()

    @property
    def responsive(self) -> bool:
        return not self.runner.stalled

    def abort(self) -> None:
        self.alive = False
        self.runner.abort(self)
        self._loop.call_later(_ABORT_S, self._insist)

    def _insist(self) -> None:
        """What does not end even so holds its device: only the end of its process frees that."""
        if not self._freed.is_set():
            _log.error(self.stuck, model=self._model, after_s=_ABORT_S)
            self.runner.kill()

    def settled(self) -> None:
        """The runner writes nothing more for who rode in it."""

    def join(self, timeout: float) -> None:
        self._freed.wait(timeout)

    def _gone(self) -> None:
        """Notes that it was closed as it was asked to, or that its process died."""
        self.alive = False
        self._freed.set()
        self.runner.left(self)


class HostedInstance(InRunner):
    """Once it serves, it implements `Executes`."""

    def __init__(self, runner: Runner, model: str, number: int, device: str) -> None:
        super().__init__(runner, model, number, device)
        self._known: set[int] = set()
        self._works: Sequence[Work] | None = None
        self._unsettled: Sequence[Work] = ()
        self._reader = RecordReader(records.FROM_RUNNER, runner.max_answer_bytes + _LISTS_BYTES)
        self._wire: Wire | None = None
        self._spins_until = 0.0

    def serve(self, piece: int, driver: Driver) -> HostedInstance:
        """Serves from here on: it takes batches, and runs one that is larger than `piece` in pieces."""
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours, self._loop, self._heard, self._gone)
        with theirs:
            self.runner.serve(self, piece, theirs)
        return self

    # ---- batches ----------------------------------------------------------------------------------------

    def run(self, works: Sequence[Work]) -> None:
        assert self._wire is not None
        self._works = works
        said: list[bytes] = []
        places: list[bytes] = []
        if len(self._known) >= records.MAX_RUNNER_TEMPLATES:
            self._known.clear()
            said.append(records.TO_RUNNER.pack(records.RESET, 0, 0))
        known = self._known
        for work in works:
            place = _place(work)
            template = place.template
            identity = template.identity
            if identity not in known:
                known.add(identity)
                said += (
                    records.TO_RUNNER.pack(records.TEMPLATE, len(template.payload), identity),
                    template.payload,
                )
            place.held = True
            places.append(_pack_place(place.arena, identity, place.offset, place.output, place.capacity))
        said.append(records.TO_RUNNER.pack(records.RUN, len(places) * records.RUN_PLACE.size, 0))
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
            self.runner.kill()

    def _done(self, fields: tuple[float, ...], payload: bytes) -> None:
        _, _, images, short, flags, seconds, input_s, infer_s, output_s = fields
        works, self._works = self._works, None
        if works is None:
            return  # the batch was aborted, and its requests were answered
        self.alive = bool(int(flags) & records.ALIVE)
        outcomes: list[Outcome] = []
        for work, (status, form, said) in zip(works, read_endings(payload, len(works)), strict=True):
            place = _place(work)
            place.held = False
            if status == records.OK:
                place.form, place.payload = form, said
                outcomes.append(Outcome())
            else:
                outcomes.append(Outcome(error=read_failure(status, said)))
        timing = Timing(0.0, input_s, infer_s, output_s, int(images))
        clean = bool(int(flags) & records.CLEAN)
        self._driver.ended(self, BatchResult(outcomes, seconds, timing, clean, int(short)))

    # ---- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Aborts the batch. Its requests' memory is held until the runner reports that it writes no more."""
        self._unsettled, self._works = self._works or (), None
        super().abort()

    def settled(self) -> None:
        for work in self._unsettled:
            _place(work).held = False
        self._unsettled = ()

    def close(self) -> None:
        if self._wire is None:
            self.runner.drop(self)
        else:
            self._wire.finish()

    def _gone(self) -> None:
        super()._gone()
        self.settled()
        works, self._works = self._works, None
        if works is None:
            self._driver.lost(self)
            return
        for work in works:
            _place(work).held = False
        error = ModelError(f"{self._model}: the process that runs it died", reason="model-died")
        outcomes = [Outcome(error=error) for _ in works]
        timing = Timing(batch=sum(work.images for work in works))
        self._driver.ended(self, BatchResult(outcomes, 0.0, timing, clean=False))


def _place(work: Work) -> RequestPlace:
    assert work.place is not None  # the engine lets nothing else in
    return work.place
