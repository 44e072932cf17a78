"""The door into an engine in the same process: for `--frontends 0`, tests and notebooks."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from carpool.core.front_load import Outside
from carpool.core.job import INFINITY, OFFERED
from carpool.engine.engine_host import EngineHost
from carpool.engine.inputs import shape_key
from carpool.engine.work import Outcome, Work
from carpool.errors import CarpoolError
from carpool.link.advice import Gate, open_gate
from carpool.link.asked_fields import NOBODY, Sender
from carpool.link.door import Ahead, Answer, Catalog, ModelEntry, Slot, nobody_ahead
from carpool.memory.arena import Arena, check_fits
from carpool.memory.slot_files import ENCODED, bind_file
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
        self.advice: Gate = open_gate
        self.outside: dict[int, Outside] = {}  # by the model's key: what its clients wait beside the engine
        host.listen(self._forget)

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
        check_fits(self.arena, size)
        return self.arena.allocate(size)

    def memory_left(self, size: int) -> float:
        return self.arena.left_with(size)

    def refuses(
        self,
        entry: ModelEntry,
        deadline: float,
        now: float,
        sender: Sender = NOBODY,
        *,
        certain: bool = True,
        ahead: Ahead = nobody_ahead,
    ) -> CarpoolError | None:
        return self.advice(entry, deadline, now, sender, certain, ahead)

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
            images=head.batch if entry.signature.max_batch else 1,
            wanted=[output.name for output in head.outputs],
            arrived=arrived,
            outside=call.outside.seconds,
            deadline=deadline,
            timeout=options.timeout or 0.0,
            priority=sender.bounded(options.priority),
            source=sender.source,
            latest=sender.latest,
            shape=ENCODED if head.encoded else shape_key(entry.signature, inputs),
            encoded=head.encoded,
        )
        if ready_in is not None:
            work.ready_at = monotonic() + ready_in
        self.host.submit(entry.key, [work])
        call.work = work
        if work.state is OFFERED and admitted is not None:
            self.loop.call_soon(call.let_in, admitted)
        return call

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        return await self.host.ask(what, arguments)
