"""A door without an engine behind it: Python functions answer, and the test can see and hold everything."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np

from carpool.core.front_load import Outside
from carpool.errors import CarpoolError, NotFound
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.catalog import (
    Batching,
    Catalog,
    IndexEntry,
    ModelEntry,
    PublishedModel,
    Traits,
)
from carpool.link.engine_client import Ahead, Answer, Ask, Hears, nobody_ahead
from carpool.link.senders import NOBODY, Sender
from carpool.memory.arena import BodySlots, Slot
from carpool.memory.layout import bind_file
from carpool.observe import statistics
from carpool.observe.counters import Table, table_bytes
from carpool.types import Array, Datatype, Signature, Tensor, TensorSpec, Timing
from carpool.wire.v2 import RequestHead, bind

Function = Callable[[Mapping[str, Array]], Any]
TIMING = Timing(queue=0.002, input=0.0005, infer=0.004, output=0.0005, batch=17)


@dataclass
class FakeModel:
    """`function` takes the inputs by name and returns the outputs by name, or raises a `CarpoolError`."""

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    function: Function
    version: str = "1"
    max_batch: int = 8
    mode: str = "promise"
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    digest: str = ""
    hosted: bool = False
    decoupled: bool = False
    """`function` then returns all of the answers, one after the other; an error among them is the end."""
    writes: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def entry(self, key: int, row: tuple[int, int] = (0, 0)) -> ModelEntry:
        signature = Signature(self.name, tuple(self.inputs), tuple(self.outputs), self.max_batch)
        config = {
            "name": self.name,
            "platform": "",
            "backend": "fake",
            "max_batch_size": self.max_batch,
            "input": [_config_tensor(spec) for spec in self.inputs],
            "output": [_config_tensor(spec) for spec in self.outputs],
            "model_transaction_policy": {"decoupled": self.decoupled},
        }
        extra = {} if self.cache is None else {"cache": {"settings": self.cache, "digest": self.digest}}
        slo = 0.05 if self.mode == "promise" else None
        return ModelEntry(
            key,
            self.name,
            self.version,
            signature,
            Batching(self.mode, slo),
            Traits(hosted=self.hosted, decoupled=self.decoupled, writes=self.writes),
            PublishedModel("fake", config, self.labels),
            row,
            self.vision,
            {**extra, **self.extra},
        )


def _config_tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype.value}", "dims": list(spec.shape)}


def echo(name: str, datatype: Datatype, shape: tuple[int, ...] = (-1,), **settings: Any) -> FakeModel:
    """Gives its input `x` back as its output `y`."""
    given, wanted = TensorSpec("x", datatype, shape), TensorSpec("y", datatype, shape)
    return FakeModel(name, [given], [wanted], lambda inputs: {"y": inputs["x"]}, **settings)


@dataclass(eq=False)
class FakeBooking:
    """What was said of a way through a pipeline."""

    entry: ModelEntry
    begun: bool = False
    reached: list[tuple[int, int]] = field(default_factory=list)  # steps, and with how many images
    ended: list[bool] = field(default_factory=list)  # whether it was answered: at most one of these

    def reaches(self, step: int, images: int) -> None:
        if not self.ended:
            self.reached.append((step, images))

    def over(self, *, answered: bool) -> None:
        if not self.ended:
            self.ended.append(answered)


@dataclass(eq=False)
class FakeSlot:
    """Memory that is scribbled over on release, so that whoever still reads it notices."""

    view: memoryview
    door: FakeDoor
    holders: list[int] = field(default_factory=lambda: [1])  # how many, in common

    def share(self) -> FakeSlot:
        assert self in self.door.slots_in_use, "a slot was shared after its end"
        self.holders[0] += 1
        self.door.slots_in_use.append(other := FakeSlot(self.view, self.door, self.holders))
        return other

    def release(self) -> None:
        assert self in self.door.slots_in_use, "a slot was released twice"
        self.door.slots_in_use.remove(self)
        self.holders[0] -= 1
        if not self.holders[0]:
            self.view[:] = b"\xee" * len(self.view)


@dataclass(eq=False)
class FakeCall:
    """One inference, as the front end asked for it."""

    door: FakeDoor
    ask: Ask
    hears: Hears
    ready_in: float | None = None
    cancelled: bool = False
    released: bool = False
    answered: bool = False

    def __getattr__(self, name: str) -> Any:
        """What was asked."""
        return getattr(self.ask if hasattr(self.ask, name) else self.ask.handling, name)

    @property
    def source(self) -> str:
        return self.ask.sender.source

    def inputs(self) -> dict[str, Array]:
        if self.head.encoded:
            return self._decoded()
        return {tensor.name: tensor.data for tensor in bind(self.head.inputs, self.slot.view[self.tail :])}

    def _decoded(self) -> dict[str, Array]:
        """As a device would see the file."""
        model = PictureModel(self.entry)
        if self.door.device is not None:
            return {self.head.inputs[0].name: self.door.device(model, self.head, self.slot.view)}
        file = bind_file(self.slot.view, self.tail)
        into = np.empty((1, *model.transform.shape), np.uint8)
        model.prepare(file.data, memoryview(into).cast("B"))
        return {self.head.inputs[0].name: into}

    def finish(self, error: CarpoolError | None = None) -> None:
        """Answer now, in the loop's thread; without an error, with what the model's function says."""
        if self.cancelled or self.answered:
            return
        answer = Answer(error=error, timing=TIMING) if error else self._run()
        answer.sent, answer.outside = monotonic(), self.door.outside
        if self.cancelled:  # while its parts were written
            return
        self.answered = True
        self.hears.done(answer)

    def _run(self) -> Answer:
        model = self.door.models[self.entry.name, self.entry.version]
        try:
            outputs = model.function(self.inputs())
            if model.decoupled:
                for one in outputs:
                    if self.cancelled:
                        break
                    self.say(one)
                return Answer(timing=TIMING)
        except CarpoolError as error:
            return Answer(error=error, timing=TIMING)
        return Answer([_tensor(spec, outputs[spec.name]) for spec in model.outputs], timing=TIMING)

    def say(self, outputs: Mapping[str, Any], *, finish: str = "", last: bool = False) -> None:
        """One of several answers, now, in the loop's thread."""
        if self.cancelled:
            return
        assert not self.answered
        assert self.ask.handling.in_parts
        model = self.door.models[self.entry.name, self.entry.version]
        tensors = [_tensor(spec, outputs[spec.name]) for spec in model.outputs if spec.name in outputs]
        self.hears.part(Answer(tensors, sent=monotonic(), finish=finish, last=last))

    def finish_parts(self) -> None:
        """The end of what was said, in the loop's thread."""
        if not self.cancelled:
            self.answered = True
            self.hears.done(Answer(timing=TIMING, sent=monotonic()))

    @property
    def is_ready(self) -> bool:
        return self.ready_in is None

    def let_in(self) -> None:
        if not (self.cancelled or self.answered):
            self.hears.admitted()

    def ready(self, slot: Slot) -> None:
        assert self.ready_in is not None
        assert slot is self.slot
        self.ready_in = None
        if self.answered or self.cancelled:
            slot.release()
        elif not self.door.held:
            asyncio.get_running_loop().call_soon(self.finish)

    def cancel(self) -> None:
        assert not self.answered
        assert not self.cancelled
        self.cancelled = True
        if self.is_ready:
            self.slot.release()

    def release(self) -> None:
        assert self.answered
        assert not self.released
        self.released = True
        if self.is_ready:
            self.slot.release()


def _tensor(spec: TensorSpec, values: Any) -> Tensor:
    data = np.asarray(values, spec.datatype.dtype)
    return Tensor(spec.name, spec.datatype, data.shape, data)


class FakeDoor:
    """Answers each call in the loop's next turn, or when the test says so if `held`."""

    def __init__(self, *models: FakeModel, slots: int = 64, table: Table | None = None) -> None:
        self._allocate: Callable[[int], FakeSlot | None] = self._allocated  # tests may replace it
        memory = BodySlots(lambda size: self._allocate(size), lambda _size: self.left)  # may be compiled
        self.check_fits, self.slot = memory.check_fits, memory.slot
        self.first_slot, self.larger_slot = memory.first_slot, memory.larger_slot
        self.reserved: list[tuple[int, str]] = []  # for answers, and for whom
        self.rejection: CarpoolError | None = None  # of long bodies
        self._large = memory.slot
        self.models = {(model.name, model.version): model for model in models}
        self.serving = True
        self.held = False
        self.admits = True  # what is offered before its tensors
        self.refusal: CarpoolError | None = None
        self.slots = slots
        self.left = 1.0  # of all memory
        self.slots_in_use: list[FakeSlot] = []
        self.calls: list[FakeCall] = []
        self.trips: list[FakeBooking] = []
        self.gate_deadlines: list[float] = []
        self.late_refusal: CarpoolError | None = None  # of who has sent everything
        self.device: Callable[[PictureModel, RequestHead, memoryview], Array] | None = None  # keeps pictures
        self.outside = Outside()
        self.turned: list[tuple[str, str, int, str]] = []
        self.from_cache: list[tuple[str, int, str]] = []
        self.answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {"statistics": self._statistics}
        self.table = Table(bytearray(table_bytes(1))) if table is None else table
        self.listeners: list[Callable[[Catalog], None]] = []
        self.catalog = self._catalog()

    def large_slot(self, size: int, answer: int, client: str, make_room: Callable[[], bool]) -> Slot:
        if self.rejection is not None:
            raise self.rejection
        self.reserved.append((answer, client))
        return self._large(size, make_room)

    def _catalog(self) -> Catalog:
        entries: dict[tuple[str, str], ModelEntry] = {}
        newest: dict[str, ModelEntry] = {}
        for key, (name, model) in enumerate(sorted(self.models.items())):
            entry = model.entry(key, self.table.directory.assign(*name))
            entries[name] = newest[model.name] = entry
        index = [IndexEntry(name, version, "READY") for name, version in entries]
        return Catalog(1, True, entries, newest, index)

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        self.listeners.append(listener)
        listener(self.catalog)

    def renew(self, **fields: Any) -> None:
        """The next catalogue, with these fields changed; in the loop's thread."""
        self.catalog = replace(self.catalog, number=self.catalog.number + 1, **fields)
        for listener in self.listeners:
            listener(self.catalog)

    def _allocated(self, size: int) -> FakeSlot | None:
        if len(self.slots_in_use) == self.slots:
            return None
        slot = FakeSlot(memoryview(bytearray(size + 7)), self)  # slots may be longer than asked for
        self.slots_in_use.append(slot)
        return slot

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
        self.gate_deadlines.append(deadline - now)
        return self.refusal or (self.late_refusal if certain else None)

    def rejected_here(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        self.turned.append((entry.name, error.reason, images, source))

    def answered_here(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        self.from_cache.append((entry.name, images, source))

    def infer(self, ask: Ask, hears: Hears) -> FakeCall:
        if ask.handling.booking is not None:
            ask.handling.booking.begun = True
        call = FakeCall(self, ask, hears, ask.handling.ready_in)
        self.calls.append(call)
        if ask.handling.ready_in is not None and not self.admits:
            pass  # the test decides
        elif ask.handling.ready_in is not None:
            asyncio.get_running_loop().call_soon(call.let_in)
        elif not self.held:
            asyncio.get_running_loop().call_soon(call.finish)
        return call

    def begin_booking(self, entry: ModelEntry) -> FakeBooking:
        self.trips.append(trip := FakeBooking(entry))
        return trip

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        answer = self.answers[what](arguments)
        return await answer if inspect.isawaitable(answer) else answer

    def _statistics(self, arguments: Mapping[str, Any]) -> Any:
        wanted = (arguments["name"], arguments["version"])
        found = [
            statistics.model_statistics(row, statistics.BatchStatistics())
            for row in self.table.models()
            if wanted[0] in ("", row.model) and wanted[1] in ("", row.version)
        ]
        if not found:
            raise NotFound(f"no statistics for {wanted}")
        return statistics.statistics(found)
