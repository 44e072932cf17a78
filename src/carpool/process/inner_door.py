"""The engine's own way to models in the runner: for Python models that ask them, in place of a client.

They answer only what lies in memory that they map, as front ends have it. So the engine is a front end to
itself, with a link and an arena of its own, which are made when the first such call comes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from time import monotonic

import numpy as np

from carpool.engine.engine_link import EngineSide
from carpool.engine.fleet.model_calls import CallOfModel
from carpool.errors import InvalidInput, Unavailable
from carpool.frontend.remote_door import RemoteDoor
from carpool.link.door import Answer, Ask, Call, ModelEntry, OneAnswer
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.memory.layout import TensorPlace, end_of, line_up
from carpool.types import Array, Datatype, RequestedOutput, RequestOptions
from carpool.wire.v2 import RequestHead, TensorHead, check_head

_ARENA_BYTES = 256 << 20  # taken only as far as it is used
_NUMBER = -1  # no front end has it


class InnerDoor:
    """Everything is called on the engine's loop."""

    def __init__(self, side: Callable[[], EngineSide]) -> None:
        self._side = side  # known when the first call comes
        self._door: RemoteDoor | None = None
        self._opening = asyncio.Lock()

    async def ask(self, call: CallOfModel, until: float) -> Mapping[str, Array]:
        door = await self._opened()
        entry = _entry(door, call)
        head, places, single = _head(entry, call)
        slot = door.slot(max(1, head.tail_size))
        for place in places:
            array = call.inputs[place.name]
            np.ndarray(array.shape, array.dtype, slot.view, place.offset)[...] = array
        waiting = _Waiting()
        answered = waiting.answered
        running = waiting.call = door.infer(Ask(entry, head, slot, 0, monotonic(), until), waiting)
        try:
            answer = await answered
        except asyncio.CancelledError:
            running.cancel()
            raise
        try:
            if answer.error is not None:
                raise answer.error
            copies = {tensor.name: tensor.data.copy() for tensor in answer.outputs}
        finally:
            running.release()
        return {name: one[0] if single else one for name, one in copies.items()}

    async def _opened(self) -> RemoteDoor:
        async with self._opening:
            if self._door is None or not self._door.serving:
                arena = create_memory("carpool-calls", _ARENA_BYTES)
                side = self._side()
                door = RemoteDoor(Arena(map_memory(arena)), max_answer_bytes=side.max_answer_bytes)
                known = asyncio.Event()
                door.watch(lambda catalog: known.set() if catalog.number else None)
                ours, theirs = socket.socketpair()
                await door.attach(theirs)
                await side.attach(_NUMBER, ours, arena)
                await known.wait()
                self._door = door
            return self._door


class _Waiting(OneAnswer):
    """Hears of one call for a model that awaits its answer."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.call: Call | None = None

    def done(self, answer: Answer) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)
        elif self.call is not None:  # whoever asked has gone
            self.call.release()


def _entry(door: RemoteDoor, call: CallOfModel) -> ModelEntry:
    catalog = door.catalog
    found = (
        catalog.entries.get((call.model, call.version)) if call.version else catalog.newest.get(call.model)
    )
    if found is None:
        raise Unavailable(f"{call.model} is not served any more", reason="model-not-ready")
    return found


def _head(entry: ModelEntry, call: CallOfModel) -> tuple[RequestHead, list[TensorPlace], bool]:
    """Where the tensors will lie; and whether they come without the batch dimension."""
    signature = entry.signature
    alone: set[bool] = set()
    for name, array in call.inputs.items():
        spec = signature.input_named.get(name)
        if spec is None:
            raise InvalidInput(f"{entry.name} has no input {name!r}", field=name)
        if array.dtype != spec.datatype.dtype or spec.datatype is Datatype.BYTES:
            raise InvalidInput(f"input {name!r} must be {spec.datatype.value}, not {array.dtype}", field=name)
        alone.add(bool(signature.max_batch) and array.ndim == len(spec.shape))
    if len(alone) > 1:
        raise InvalidInput(f"the inputs of {entry.name} hold different numbers of images")
    single = alone == {True}
    places = line_up(
        (name, signature.input_named[name].datatype, (1,) * single + array.shape, array.nbytes)
        for name, array in call.inputs.items()
    )
    heads = [TensorHead(*place) for place in places]
    wanted = [RequestedOutput(name, binary=True) for name in call.wanted]
    head = RequestHead("", heads, wanted, RequestOptions(), True, end_of(places))
    return check_head(head, signature), places, single
