"""The front ends' memory in the runner: how requests are found in it, and how answers get there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from carpool.backends.backend import aborted
from carpool.engine.work import Outcome
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.link.records import AS_EXPECTED, OK, Ending
from carpool.link.request_place import COPIED_AT_ONCE, RequestPlace
from carpool.link.templates import ServedTemplate
from carpool.memory.layout import find_file
from carpool.types import Array

View = Callable[[Mapping[str, Array]], Mapping[str, Any] | None]
"""What a backend makes of arrays, to be used for as long as their memory is there; None: it has to copy."""

_ARENA_S = 10.0  # it is on its way over another socket
_MOST_KEPT = 4096


class RequestInMemory:
    """Implements `InBatch`: a request where it lies."""

    __slots__ = ("encoded", "images", "inputs", "memory", "template", "wanted")

    def __init__(self, template: ServedTemplate, inputs: Mapping[str, Any], memory: mmap) -> None:
        self.template = template
        self.inputs = inputs
        self.images = template.images
        self.wanted = template.wanted
        self.encoded = template.encoded
        self.memory = memory


class MappedArena:
    """Slots are used again and again, the last released first, and to make tensors of one takes longer than
    anything else that is done for a request. So what was found there is kept, for all instances."""

    def __init__(self, memory: mmap) -> None:
        self.memory = memory
        self._bytes: Array = np.frombuffer(memory, np.uint8)
        self._kept: dict[tuple[int, int], RequestInMemory] = {}

    def find(self, number: int, template: ServedTemplate, offset: int, view: View) -> RequestInMemory:
        """`number` is the template's, never another's: nobody finds what a forgotten one has left.

        Raises `CarpoolError` for bytes that are no tensor of that type, ValueError for a file that cannot
        be as long as it says.
        """
        return self._kept.get((number, offset)) or self._look(number, template, offset, view)

    def _look(self, number: int, template: ServedTemplate, offset: int, view: View) -> RequestInMemory:
        if template.encoded:
            start, end = find_file(self.memory, offset)
            return RequestInMemory(template, {template.heads[0].name: self._bytes[start:end]}, self.memory)
        inputs = template.bind(self.memory, offset)
        made = view(inputs) if template.plain else None  # what is checked has to be checked each time
        if made is None:
            return RequestInMemory(template, inputs, self.memory)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[number, offset] = found = RequestInMemory(template, made, self.memory)
        return found


class Arenas:
    """By the number that the engine gave them."""

    def __init__(self) -> None:
        self._mapped: dict[int, MappedArena] = {}
        self._changed = threading.Condition()

    def add(self, number: int, memory: mmap) -> None:
        with self._changed:
            self._mapped[number] = MappedArena(memory)
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """It stays mapped for as long as a batch has to do with it."""
        with self._changed:
            self._mapped.pop(number, None)

    def find(self, number: int) -> MappedArena:
        arena = self._mapped.get(number)
        if arena is not None:
            return arena
        with self._changed:
            self._changed.wait_for(lambda: number in self._mapped, _ARENA_S)
            arena = self._mapped.get(number)
        if arena is None:
            raise Unavailable("the front end is gone", reason="frontend-gone")
        return arena


Slot: TypeAlias = tuple[int, int]
"""Offset and capacity of the memory for one request's outputs."""


@dataclass(slots=True)
class Placed(Outcome):
    """Outputs that are on their way to the front end."""

    ending: Ending = AS_EXPECTED


_AS_EXPECTED = Placed()  # shared: so end nearly all


class _Part(NamedTuple):
    """One output of the whole batch, and what each request gets of it where. All in bytes."""

    data: memoryview
    row_bytes: int
    offset: int
    size: int


class Delivery:
    """The `Answer` of one instance's batches. Runs in the model's thread.

    Nothing that is wrong with one request's outputs leaves it as an exception: the others have no part in it.
    """

    def __init__(self, model: str, most: int) -> None:
        self._model = model
        self._most = most
        self._slots: Sequence[Slot] = ()
        self._busy = False
        self._closed = False

    def close(self) -> bool:
        """Nothing may be written from here on; False while the model's thread still does.

        Safe without a lock, and why, as in `RequestPlace.close`."""
        self._closed = True
        return not self._busy

    def begin(self, slots: Sequence[Slot]) -> None:
        """Where the answers of the next batch go, in its order."""
        self._slots = slots

    def __call__(
        self,
        first: int,
        riders: Sequence[RequestInMemory],
        outputs: Mapping[str, Array],
        errors: Mapping[int, CarpoolError],
    ) -> list[Outcome]:
        self._busy = True
        try:
            if self._closed:
                return [Outcome(error=aborted(self._model)) for _ in riders]
            return self._write(riders, self._slots[first : first + len(riders)], outputs, errors)
        finally:
            self._busy = False

    def _write(
        self,
        riders: Sequence[RequestInMemory],
        slots: Sequence[Slot],
        outputs: Mapping[str, Array],
        errors: Mapping[int, CarpoolError],
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [_AS_EXPECTED] * len(riders)
        layouts: dict[ServedTemplate, tuple[list[_Part], int]] = {}
        row = 0
        for number, (rider, (start, capacity)) in enumerate(zip(riders, slots, strict=True)):
            template = rider.template
            if template not in layouts:
                layouts[template] = _layout(template, outputs)
            parts, end = layouts[template]
            if number in errors:
                outcomes[number] = Outcome(error=errors[number])
            elif parts and end <= capacity:
                try:
                    memory = rider.memory
                    for data, row_bytes, offset, size in parts:
                        at, to = row * row_bytes, start + offset
                        memory[to : to + size] = data[at : at + size]
                except Exception as error:
                    outcomes[number] = Outcome(error=ModelError(f"the outputs cannot be sent: {error}"))
            else:
                place = RequestPlace(template, rider.memory, 0, start, capacity, self._most)
                place(_rows_of(template, outputs, None if len(riders) == 1 else row))
                outcomes[number] = _outcome(place)
            row += rider.images
        return outcomes


def _rows_of(template: ServedTemplate, outputs: Mapping[str, Array], first: int | None) -> dict[str, Array]:
    """What one request gets; all that there is without a number of its first row."""
    if first is None:
        return {name: outputs[name] for name in template.outputs}
    return {name: outputs[name][first : first + template.images] for name in template.outputs}


def _outcome(place: RequestPlace) -> Outcome:
    if place.form is None:
        return Outcome(error=place.error)
    return Placed(ending=Ending(OK, place.form, place.payload))


def _layout(template: ServedTemplate, outputs: Mapping[str, Array]) -> tuple[list[_Part], int]:
    """What to copy for each request of a family, and where that ends; nothing where it is not so simple."""
    found: list[_Part] = []
    for name, _, _, offset, size in template.places or ():
        array = outputs[name]
        if not 0 < size <= COPIED_AT_ONCE or not array.flags.c_contiguous:
            return [], 0
        found.append(_Part(array.reshape(-1).view("u1").data, size // template.images, offset, size))
    return found, max((part.offset + part.size for part in found), default=0)
