"""The front ends' memory in the runner, and how requests are found in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any

import numpy as np

from carpool.errors import Unavailable
from carpool.link.served_template import ServedTemplate
from carpool.memory.slot_files import find_file
from carpool.types import Array

View = Callable[[Mapping[str, Array]], Mapping[str, Any] | None]
"""What a backend makes of arrays, to be used for as long as their memory is there; None: it has to copy."""

_ARENA_S = 10.0  # it is on its way over another socket
_MOST_KEPT = 4096


class Found:
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
        self._kept: dict[tuple[int, int], Found] = {}

    def find(self, family: int, template: ServedTemplate, offset: int, view: View) -> Found:
        """`family` is the template's number, never another's: nobody finds what a forgotten one has left.

        Raises `CarpoolError` for bytes that are no tensor of that type, ValueError for a file that cannot
        be as long as it says.
        """
        return self._kept.get((family, offset)) or self._look(family, template, offset, view)

    def _look(self, family: int, template: ServedTemplate, offset: int, view: View) -> Found:
        if template.encoded:
            start, end = find_file(self.memory, offset)
            return Found(template, {template.heads[0].name: self._bytes[start:end]}, self.memory)
        inputs = template.bind(self.memory, offset)
        made = view(inputs) if template.plain else None  # what is checked has to be checked each time
        if made is None:
            return Found(template, inputs, self.memory)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[family, offset] = found = Found(template, made, self.memory)
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
