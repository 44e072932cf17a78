"""The way of a batch's answers into their slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from carpool.backends.backend import aborted
from carpool.engine.hosted.runner_messages import AS_EXPECTED, Ending
from carpool.engine.work import Outcome
from carpool.errors import CarpoolError, ModelError
from carpool.link.request_place import COPIED_AT_ONCE, RequestPlace
from carpool.link.records import OK
from carpool.link.served_template import ServedTemplate
from carpool.runner.runner_arenas import Found
from carpool.types import Array

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
        """Nothing may be written from here on; False while the model's thread still does. As `RequestPlace`."""
        self._closed = True
        return not self._busy

    def begin(self, slots: Sequence[Slot]) -> None:
        """Where the answers of the next batch go, in its order."""
        self._slots = slots

    def __call__(
        self,
        first: int,
        riders: Sequence[Found],
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
        riders: Sequence[Found],
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
