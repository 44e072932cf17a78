"""Lends memory of the engine's own to requests that it makes itself of models in the runner: steps of
ensembles, and calls that Python models make of others.

The inputs are copied there, and the outputs from there: the other process maps nothing else of the engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import orjson

from carpool.engine.run.batch import NO_INPUTS, Outcome, Work
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.link.catalog import ModelEntry
from carpool.link.records import AS_DECLARED, INLINE
from carpool.link.request_place import RequestPlace
from carpool.link.templates import ServedTemplate
from carpool.memory.arena import Arena, ArenaSlot, create_memory, map_memory
from carpool.memory.layout import TensorPlace, aligned, end_of, line_up, read_places
from carpool.types import Array, Tensor
from carpool.wire.codec import to_binary
from carpool.wire.v2 import TensorHead, bind

ARENA = 0
"""Its number; those of front ends begin at 1."""
_BYTES = 512 << 20
_UNKNOWN_OUTPUT_BYTES = 64 << 10  # for outputs of unknown size: what does not fit comes inline
_MOST_TEMPLATES = 1024
_WRITING_S = 0.001


class StepMemory:
    """Belongs to the loop's thread. `share` gives the file to the runner, `entry_of` knows what front ends
    know."""

    def __init__(
        self,
        share: Callable[[int, int], None],
        entry_of: Callable[[int], ModelEntry | None],
        max_answer_bytes: int,
    ) -> None:
        self._share = share
        self._entry_of = entry_of
        self._most = max_answer_bytes
        self._arena: Arena | None = None
        self._templates: dict[object, ServedTemplate] = {}

    @property
    def slots_used(self) -> int:
        return 0 if self._arena is None else self._arena.slots_used

    def place(self, key: int, work: Work) -> None:
        """Puts the inputs of a request for the model of this key there. Its outputs are its own again when it
        is done. Raises where there is no room."""
        lent = self.lend(key, work.inputs, work.form.wanted)
        work.inputs, work.place = NO_INPUTS, lent.place
        work.done = partial(lent.ended, work.done)

    def lend(self, key: int, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Lent:
        """Returns a place with these inputs in it, for the model of this key. Raises where there is no
        room."""
        entry = self._entry_of(key)
        if entry is None:
            raise Unavailable("the model was unloaded meanwhile", reason="unloading")
        named = entry.signature.input_named
        tensors = [Tensor(name, named[name].datatype, array.shape, array) for name, array in inputs.items()]
        buffers = [to_binary(tensor) for tensor in tensors]
        places = line_up((t.name, t.datatype, t.shape, len(b)) for t, b in zip(tensors, buffers, strict=True))
        template = self._template(entry, key, places, tuple(wanted))
        capacity = _UNKNOWN_OUTPUT_BYTES if template.places is None else end_of(template.places)
        output = aligned(end_of(places))
        arena = self._opened()
        slot = arena.allocate(output + capacity)
        if slot is None:
            raise Unavailable("there is no memory left for calls between models", reason="overload")
        for place, buffer in zip(places, buffers, strict=True):
            slot.view[place.offset : place.offset + place.size] = buffer
        where = RequestPlace(
            template, arena.memory, slot.offset, slot.offset + output, capacity, self._most, arena=ARENA
        )
        return Lent(where, slot)

    def _opened(self) -> Arena:
        if self._arena is None:
            file = create_memory("carpool-steps", _BYTES)
            try:
                self._arena = Arena(map_memory(file))
                self._share(ARENA, file)
            finally:
                os.close(file)
        return self._arena

    def _template(
        self, entry: ModelEntry, key: int, places: Sequence[TensorPlace], wanted: tuple[str, ...]
    ) -> ServedTemplate:
        known = (key, tuple(places), wanted)
        template = self._templates.get(known)
        if template is None or template.entry is not entry:
            document = {
                "key": key,
                "inputs": [(p.name, p.datatype.value, p.shape, p.offset, p.size, True) for p in places],
                "wanted": wanted,
                "encoded": False,
            }
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            payload = orjson.dumps(document)
            template = ServedTemplate(orjson.loads(payload), entry, payload)
            self._templates[known] = template
        return template


class Lent:
    """Represents a piece of it, until it is given back, once."""

    def __init__(self, place: RequestPlace, slot: ArenaSlot) -> None:
        self.place = place
        self._slot = slot

    def ended(self, done: Callable[[Work, Outcome], None], work: Work, outcome: Outcome) -> None:
        try:
            if outcome.error is None:
                outcome = Outcome(self.outputs(), timing=outcome.timing)
        except CarpoolError as error:
            outcome = Outcome(error=error, timing=outcome.timing)
        self.give_back()
        done(work, outcome)

    def outputs(self) -> dict[str, Array]:
        """Returns what the model wrote, which is the caller's own from here on. Raises what is wrong with
        it."""
        place = self.place
        if place.error is not None:
            raise place.error
        if place.form is None:
            raise ModelError("the model answered without outputs")
        try:
            if place.form == AS_DECLARED:
                return self._declared()
            return self._listed()
        except CarpoolError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"the model's outputs cannot be read: {error}") from None

    def _declared(self) -> dict[str, Array]:
        place = self.place
        return {
            name: np.ndarray(shape, datatype.dtype, place.memory, place.output + offset).copy()
            for name, datatype, shape, offset, _ in place.template.places or ()
        }

    def _listed(self) -> dict[str, Array]:
        place, payload = self.place, self.place.payload
        if place.form == INLINE:
            length = 4 + int.from_bytes(payload[:4], "little")
            places, memory = read_places(payload[4:length]), memoryview(payload)[length:]
        else:
            places = read_places(payload)
            memory = memoryview(place.memory)[place.output : place.output + place.capacity]
        if end_of(places) > len(memory):
            raise ModelError("the model's outputs reach beyond their memory")
        heads = [TensorHead(p.name, p.datatype, p.shape, p.offset, p.size) for p in places]
        return {tensor.name: tensor.data.copy() for tensor in bind(heads, memory, "output")}

    def give_back(self) -> None:
        """Gives it back when nothing is written there any more, which may be a little later."""
        if self.place.close():
            self._slot.release()
            self.place.forget()
        else:
            asyncio.get_running_loop().call_later(_WRITING_S, self.give_back)
