"""Everything in one process (`--frontends 0`): the same app and the same engine, without a link between."""

from __future__ import annotations

import asyncio
import mmap
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from carpool.config.server import ServerSettings
from carpool.core.job import INFINITY, OFFERED
from carpool.core.outside import Outside
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_questions import ControlDesk
from carpool.engine.models.control import Progress
from carpool.engine.work import Outcome, Work, shape_key
from carpool.errors import CarpoolError
from carpool.frontend.http.http_server import check_free, listen
from carpool.link.advice import Gate, open_gate
from carpool.link.asked_fields import NOBODY, Sender
from carpool.link.door import Answer, Catalog, ModelEntry, Slot
from carpool.memory.arena import Arena, check_fits
from carpool.memory.gates import GATE_BYTES, GateTable
from carpool.memory.layout import ENCODED, bind_file
from carpool.observe.columns import UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.logs import logger
from carpool.process import front_ends
from carpool.process.children import FrontendParts
from carpool.process.start import add_questions, engine_for
from carpool.types import Tensor
from carpool.wire.v2 import RequestHead, bind


class LocalCall:
    """One inference under way, its slot with it."""

    __slots__ = ("_cancelled", "_done", "_door", "_entry", "_over", "_slot", "outside", "work")

    def __init__(
        self, door: LocalDoor, entry: ModelEntry, slot: Slot | None, done: Callable[[Answer], None]
    ) -> None:
        self._door = door
        self._entry = entry
        self._slot = slot
        self._done = done
        self._cancelled = False
        self._over = False
        self.outside = door.outside_of(entry)
        self.work: Work | None = None

    def ended(self, work: Work, outcome: Outcome) -> None:
        if self._cancelled:
            self._over = True
            self.release()
        elif self.work is None:  # within infer: the caller has not got its call yet
            self._door.loop.call_soon(self.ended, work, outcome)
        else:
            self._over = True
            self._done(self._answer(outcome))

    def _answer(self, outcome: Outcome) -> Answer:
        if outcome.outputs is None:
            return Answer(error=outcome.error, timing=outcome.timing, sent=monotonic(), outside=self.outside)
        specs = self._entry.signature.output_named
        tensors = [
            Tensor(name, specs[name].datatype, array.shape, array) for name, array in outcome.outputs.items()
        ]
        return Answer(tensors, timing=outcome.timing, sent=monotonic(), outside=self.outside)

    def ready(self, slot: Slot) -> None:
        self._slot = slot
        if self._over:  # it was answered while its tensors were on their way
            slot.release()
        elif self.work is not None:
            self._door.host.ready(self.work)

    def let_in(self, admitted: Callable[[], None]) -> None:
        if not (self._cancelled or self._over):
            admitted()

    def cancel(self) -> None:
        self._cancelled = True
        if self.work is not None:
            self._door.host.cancel(self.work)

    def release(self) -> None:
        if self._slot is not None:
            self._slot.release()


class LocalDoor:
    """Front end and engine share a loop; bodies lie in memory of our own."""

    def __init__(self, host: EngineHost, *, max_bytes: int) -> None:
        self.host = host
        self.loop = asyncio.get_running_loop()
        self.arena = Arena(mmap.mmap(-1, max_bytes))
        self._gate: Gate = open_gate
        self.outside: dict[int, Outside] = {}  # by the model's key: what its clients wait beside the engine
        host.listen(self._forget)

    def advise(self, gate: Gate) -> None:
        self._gate = gate

    def outside_of(self, entry: ModelEntry) -> Outside:
        found = self.outside.get(entry.key)
        if found is None:
            found = self.outside[entry.key] = Outside()
        return found

    def _forget(self, catalog: Catalog) -> None:
        """Keep what was learned of models that are still there."""
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        known = {entry.key for entry in entries}
        self.outside = {key: learned for key, learned in self.outside.items() if key in known}

    @property
    def catalog(self) -> Catalog:
        return self.host.catalog

    @property
    def serving(self) -> bool:
        return self.host.catalog.ready

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        self.host.listen(listener)
        listener(self.host.catalog)

    def slot(self, size: int) -> Slot | None:
        slot = self.arena.allocate(size)
        if slot is None:
            check_fits(self.arena, size)
        return slot

    def memory_left(self, size: int) -> float:
        return self.arena.left_with(size)

    def refuses(
        self, entry: ModelEntry, deadline: float, now: float, sender: Sender = NOBODY, *, certain: bool = True
    ) -> CarpoolError | None:
        return self._gate(entry, deadline, now, sender, certain)

    def turned_away(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """Nobody asks for them here: `RecordingDoor` does."""

    def infer(
        self,
        entry: ModelEntry,
        head: RequestHead,
        slot: Slot,
        tail: int,
        done: Callable[[Answer], None],
        *,
        arrived: float,
        deadline: float = INFINITY,
        sender: Sender = NOBODY,
        ready_in: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> LocalCall:
        call = LocalCall(self, entry, slot if ready_in is None else None, done)
        if head.encoded:
            inputs = {head.inputs[0].name: bind_file(slot.view, tail)}
        else:
            inputs = {tensor.name: tensor.data for tensor in bind(head.inputs, slot.view[tail:])}
        options = head.options
        work = Work(
            inputs,
            call.ended,
            arrived,
            deadline,
            images=head.batch if entry.signature.max_batch else 1,
            shape=ENCODED if head.encoded else shape_key(entry.signature, inputs),
            wanted=[output.name for output in head.outputs],
            encoded=head.encoded,
        )
        work.outside = call.outside.seconds
        work.timeout = options.timeout or 0.0
        work.priority = sender.bounded(options.priority)
        work.source, work.latest = sender.source, sender.latest
        if ready_in is not None:
            work.ready_at = monotonic() + ready_in
        self.host.submit(entry.key, [work])
        call.work = work
        if work.state is OFFERED and admitted is not None:
            self.loop.call_soon(call.let_in, admitted)
        return call

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        return await self.host.ask(what, arguments)


log = logger("server")

_LAST_MOMENT_S = 0.25  # the engine answers for those who are cut off, and that must not look like an answer


async def serve(
    paths: Sequence[Path],
    settings: ServerSettings,
    stop: asyncio.Event,
    *,
    progress: Progress = lambda _model, _step: None,
    ready: Callable[[Catalog, Mapping[str, int]], None] = lambda _catalog, _ports: None,
) -> int:
    """Serve until `stop` is set, then finish what was accepted. `ready` gets the ports in use.

    Returns how many connections the time to drain was too short for.
    """
    table = Table(bytearray(table_bytes(1)))
    engine = engine_for(paths, settings, table)
    gates = GateTable(bytearray(GATE_BYTES))
    host = EngineHost(engine, gates.write)
    add_questions(host, settings)
    desk = ControlDesk(host, settings)
    sockets = _sockets(settings)
    door = LocalDoor(host, max_bytes=settings.slots * settings.slot_bytes)
    parts = FrontendParts(door, gates, settings, sockets, table, 0, time.monotonic(), apart=False)
    frontends = [await front_ends.http(parts)]
    if "grpc" in sockets:
        frontends.append(await front_ends.grpc(parts))
    ports = {name: int(bound[0].getsockname()[1]) for name, bound in sockets.items()}
    try:
        await desk.open(progress)
        table.block(0).server.set(UP, 1.0)
        host.set_ready(True)
        ready(host.catalog, ports)
        await stop.wait()
        log.info("draining", seconds=settings.drain_s)
    finally:
        host.set_ready(False)
        within = settings.drain_s
        stopping = asyncio.gather(*(frontend.stop(within) for frontend in frontends))
        cut_off, _ = await asyncio.gather(stopping, host.drain(within + _LAST_MOMENT_S))
    return sum(cut_off)


def _sockets(settings: ServerSettings) -> dict[str, list[socket.socket]]:
    """Bound, by the name of their port. Those of gRPC only hold theirs."""
    wanted = {"http": settings.http_port, "metrics": settings.metrics_port}
    if settings.grpc_frontends:
        wanted["grpc"] = settings.grpc_port
    for port in filter(None, wanted.values()):
        check_free(settings.host, port)
    return {name: listen(settings.host, port, accepting=name != "grpc") for name, port in wanted.items()}
