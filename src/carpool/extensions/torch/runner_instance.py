"""One instance in the runner: a thread that reads where requests lie, runs them, and writes their answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from carpool.backends.backend import (
    Backend,
    BreaksProcess,
    Cut,
    FileToKeep,
    Gathers,
    SharesDevice,
    aborted,
)
from carpool.engine.run.batch import NO_EXTRAS, BatchResult, BatchRun, Outcome
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.link import records
from carpool.link.catalog import ModelEntry
from carpool.link.link_failures import write_failure
from carpool.link.records import Ending, ProtocolError, RecordReader, write_endings
from carpool.link.request_place import COPIED_AT_ONCE, RequestPlace
from carpool.link.templates import ServedTemplate, read_template
from carpool.memory.layout import find_file
from carpool.memory.picture_leases import KEPT, NO_ROOM, LeaseSeen, read_cuts
from carpool.observe.logs import logger
from carpool.types import Array

View = Callable[[Mapping[str, Array]], Mapping[str, Any] | None]
"""What a backend makes of arrays, to be used for as long as their memory is there; None: it has to copy."""

_ARENA_S = 10.0  # it is on its way over another socket
_MOST_KEPT = 4096


class RequestInMemory:
    """Implements `InBatch`: a request where it lies."""

    __slots__ = ("form", "images", "inputs", "lease", "memory", "template")
    extras = NO_EXTRAS  # front ends have copied what is in clients' memory

    def __init__(self, template: ServedTemplate, inputs: Mapping[str, Any], memory: mmap) -> None:
        self.template = template
        self.inputs = inputs
        self.images = template.images
        self.form = template.form
        self.memory = memory
        self.lease: KeptLease | None = None


class KeptLease:
    """Represents a picture that a later step will want; `kept` when it is."""

    __slots__ = ("_arena", "_pictures", "kept", "lease")

    def __init__(self, pictures: PictureSlots, arena: int, lease: LeaseSeen) -> None:
        self._pictures = pictures
        self._arena = arena
        self.lease = lease
        self.kept = False

    def keep(self, pixels: Any) -> None:
        self.kept = self._pictures.keep(self._arena, self.lease, pixels)


class MappedArena:
    """Slots are used again and again, the last released first, and to make tensors of one takes longer than
    anything else that is done for a request. So what was found there is kept, for all instances."""

    def __init__(self, number: int, memory: mmap, pictures: PictureSlots) -> None:
        self.memory = memory
        self._number = number
        self._pictures = pictures
        self._bytes: Array = np.frombuffer(memory, np.uint8)
        self._kept: dict[tuple[int, int], RequestInMemory] = {}

    def find(self, number: int, template: ServedTemplate, offset: int, view: View) -> RequestInMemory:
        """Returns a request. `number` is unique to the template: entries of a forgotten one are never found.

        Raises `CarpoolError` for bytes that are no tensor of that type, ValueError for a file that cannot
        be as long as it says.
        """
        return self._kept.get((number, offset)) or self._look(number, template, offset, view)

    def _look(self, number: int, template: ServedTemplate, offset: int, view: View) -> RequestInMemory:
        if template.encoded:
            return self._look_at_picture(template, offset)
        inputs = template.bind(self.memory, offset)
        made = view(inputs) if template.plain else None  # what is checked has to be checked each time
        if made is None:
            return RequestInMemory(template, inputs, self.memory)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[number, offset] = found = RequestInMemory(template, made, self.memory)
        return found

    def _look_at_picture(self, template: ServedTemplate, offset: int) -> RequestInMemory:
        name = template.heads[0].name
        if template.cuts:
            return RequestInMemory(template, {name: self._cuts(template, offset)}, self.memory)
        start, end = find_file(self.memory, offset)
        file = self._bytes[start:end]
        if not template.keeps:
            return RequestInMemory(template, {name: file}, self.memory)
        lease = KeptLease(self._pictures, self._number, LeaseSeen(self.memory, end))
        found = RequestInMemory(template, {name: FileToKeep(file, lease.keep)}, self.memory)
        found.lease = lease
        return found

    def _cuts(self, template: ServedTemplate, offset: int) -> list[Cut]:
        token, boxes = read_cuts(self.memory, offset, template.images)
        pixels = self._pictures.find(self._number, token)
        if pixels is None:
            lost = "the image is not on the device any more, which was restarted; retry"
            raise Unavailable(lost, reason="restarting")
        _, rows, columns = pixels.shape
        if not all(x < right <= columns and y < bottom <= rows for x, y, right, bottom in boxes):
            raise ValueError("a part that lies beyond its image")
        return [Cut(pixels, x, y, right - x, bottom - y) for x, y, right, bottom in boxes]


class Arenas:
    """Holds arenas by the number that the engine gave them."""

    def __init__(self, pictures: PictureSlots) -> None:
        self._mapped: dict[int, MappedArena] = {}
        self._pictures = pictures
        self._changed = threading.Condition()

    def add(self, number: int, memory: mmap) -> None:
        self._pictures.open(number)
        with self._changed:
            self._mapped[number] = MappedArena(number, memory, self._pictures)
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """It stays mapped for as long as a batch has to do with it."""
        with self._changed:
            self._mapped.pop(number, None)
        self._pictures.forget(number)

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


@dataclass  # without slots: compiled code reads those of its base
class PlacedOutcome(Outcome):
    """Represents outputs that are on their way to the front end."""

    ending: Ending = records.AS_EXPECTED


_AS_EXPECTED = PlacedOutcome()  # shared: so end nearly all


class _Part(NamedTuple):
    """Describes one output of the whole batch, and what each request gets of it where. All in bytes."""

    data: memoryview
    row_bytes: int
    offset: int
    size: int


class Delivery:
    """Implements the `Answer` of one instance's batches. Runs in the model's thread.

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
        """Sets where the answers of the next batch go, in its order."""
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
            if rider.lease is not None:
                rider.lease.lease.say(KEPT if rider.lease.kept else NO_ROOM)
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
    """Returns what one request gets; all that there is without a number of its first row."""
    if first is None:
        return {name: outputs[name] for name in template.outputs}
    return {name: outputs[name][first : first + template.images] for name in template.outputs}


def _outcome(place: RequestPlace) -> Outcome:
    if place.form is None:
        return Outcome(error=place.error)
    return PlacedOutcome(ending=Ending(records.OK, place.form, bytes(place.payload)))


def _layout(template: ServedTemplate, outputs: Mapping[str, Array]) -> tuple[list[_Part], int]:
    """Returns what to copy for each request of a family, and where that ends; nothing where it is not so
    simple."""
    found: list[_Part] = []
    for name, _, _, offset, size in template.places or ():
        array = outputs[name]
        if not 0 < size <= COPIED_AT_ONCE or not array.flags.c_contiguous:
            return [], 0
        found.append(_Part(array.reshape(-1).view("u1").data, size // template.images, offset, size))
    return found, max((part.offset + part.size for part in found), default=0)


_log = logger("runner")
_READ_BYTES = 1 << 18
_WRITING_S = 0.001
_SPIN_S = 0.001
"""So long a thread looks for the next lone image on a device before it sleeps: waking up would take a good
part of the time that such an image takes."""
EXIT_BROKEN = 4
"""A device that this process cannot use any more: only a new one can."""


class EngineSocket:
    """The end of an instance's socket to the engine: what the engine says is read here, and obeyed."""

    def __init__(self, entry: ModelEntry, arenas: Arenas, sock: socket.socket) -> None:
        self._entry = entry
        self._arenas = arenas
        self._socket = sock
        self._templates: dict[int, ServedTemplate] = {}

    def _listen(self) -> None:
        """Until the engine closes its end, or nothing that it says can be understood any more."""
        reader = RecordReader(records.TO_RUNNER, records.MAX_TEMPLATE_BYTES)
        try:
            while data := self._next():
                for (kind, _, number), payload in reader.feed(data):
                    if kind == records.TEMPLATE:
                        self._templates[number] = read_template(payload, lambda _key: self._entry)
                    elif kind == records.RESET:
                        self._templates.clear()
                    elif not self._obeys(kind, number, payload):
                        raise ProtocolError(f"a record of kind {kind}")
        except OSError as error:
            _log.warning("instance-cut-off", model=self._entry.name, error=str(error))
        except Exception:
            _log.exception("instance-failed", model=self._entry.name)

    def _next(self) -> bytes:
        return self._socket.recv(_READ_BYTES)

    def _obeys(self, kind: int, number: int, payload: bytes) -> bool:
        """Returns False for a record that this instance does not know."""
        raise NotImplementedError

    def _die_if_broken(self, *, broken: bool) -> None:
        if broken:
            _log.error("device-broken", model=self._entry.name)
            os._exit(EXIT_BROKEN)


class RunnerInstance(EngineSocket):
    """Serves until the engine closes its end of the socket, then frees the model and closes ours."""

    def __init__(
        self,
        backend: Backend,
        entry: ModelEntry,
        arenas: Arenas,
        sock: socket.socket,
        piece: int,
        most: int,
        ended: Callable[[], None],
    ) -> None:
        """A batch runs in pieces of `piece` images; `most` are the bytes that an answer may take."""
        super().__init__(entry, arenas, sock)
        self._on_device = isinstance(backend, SharesDevice) and bool(backend.device)
        self._spins_until = 0.0
        self.ran = 0.0  # when its last batch came
        self._delivery = Delivery(entry.name, most)
        self._shape = (entry.signature, max(1, entry.signature.max_batch), piece)
        self._use(backend)
        self._next_backend: Backend | None = None
        self._swapping = threading.Lock()
        self._over = False
        self._ended = ended
        threading.Thread(target=self._serve, name=f"{entry.name}-instance", daemon=True).start()

    def swap(self, backend: Backend) -> None:
        """May be called from another thread: use this one, of the same model, from the next batch on; it is
        better than one that was given before and is not in use yet."""
        with self._swapping:
            if not self._over:
                self._next_backend, unused = backend, self._next_backend
            else:
                unused = backend
        if unused is not None:
            unused.close()

    @property
    def newest(self) -> Backend:
        """Returns what it runs its next batch with."""
        with self._swapping:
            return self._next_backend or self._backend

    def _take_next_backend(self) -> None:
        """In the instance's own thread, between two batches: nothing is in use."""
        with self._swapping:
            backend, self._next_backend = self._next_backend, None
        if backend is not None:
            old = self._backend
            self._use(backend)
            old.close()

    def _use(self, backend: Backend) -> None:
        self._backend = backend
        self._batches = BatchRun(backend, *self._shape, self._delivery)
        self._breaks = backend if isinstance(backend, BreaksProcess) else None
        self._view: View = backend.view if isinstance(backend, Gathers) else _as_they_are

    def abort(self) -> None:
        """May be called from another thread: returns when nothing will be written any more, however long the
        batch runs."""
        self._backend.abort()
        while not self._delivery.close():
            time.sleep(_WRITING_S)

    def _serve(self) -> None:
        self._listen()
        with self._swapping:
            self._over = True
        try:
            self._take_next_backend()
            self._backend.close()
        except Exception:
            _log.exception("close-failed", model=self._entry.name)
        self._socket.close()  # the engine waits for this, however the model ended
        self._ended()

    def _next(self) -> bytes:
        """Returns what the engine says next; soon, if it asked for a lone image: a client that waits asks
        again."""
        while time.monotonic() < self._spins_until:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                """Nothing has arrived yet. The call released the interpreter: other threads need not wait."""
        return super()._next()

    def _obeys(self, kind: int, _number: int, payload: bytes) -> bool:
        if kind != records.RUN:
            return False
        if self._next_backend is not None:
            self._take_next_backend()
        self.ran = time.monotonic()
        self._run(payload)
        return True

    def _run(self, payload: bytes) -> None:
        riders: list[RequestInMemory] = []
        slots: list[Slot] = []
        wrong: dict[int, CarpoolError] = {}
        find, templates, view = self._arenas.find, self._templates, self._view
        for index, (arena, number, offset, output, capacity) in enumerate(
            records.RUN_PLACE.iter_unpack(payload)
        ):
            try:
                riders.append(find(arena).find(number, templates[number], offset, view))
                slots.append((output, capacity))
            except CarpoolError as error:
                wrong[index] = error
            except ValueError as error:  # a front end that lies about a file's length or a part's place
                wrong[index] = ModelError(f"{self._entry.name}: {error}")
        self._delivery.begin(slots)
        result = self._batches.run(riders) if riders else BatchResult([], 0.0)
        endings = [
            outcome.ending
            if isinstance(outcome, PlacedOutcome)
            else _failed(cast(CarpoolError, outcome.error))
            for outcome in result.outcomes
        ]
        for index, mistake in wrong.items():
            endings.insert(index, _failed(mistake))
        self._answer(result, endings, clean=result.clean and not wrong)

    def _answer(self, result: BatchResult, endings: Sequence[Ending], *, clean: bool) -> None:
        timing = result.timing
        payload = write_endings(endings)
        alive = self._backend.alive
        record = records.FROM_RUNNER.pack(
            records.RAN,
            len(payload),
            timing.batch,
            result.out_of_memory,
            records.CLEAN * clean | records.ALIVE * alive,
            result.seconds,
            timing.input,
            timing.infer,
            timing.output,
        )
        self._socket.sendall(record + payload)
        if self._on_device and timing.batch == 1:
            self._spins_until = time.monotonic() + _SPIN_S
        self._die_if_broken(broken=self._breaks is not None and self._breaks.broken)


def _as_they_are(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return inputs


def _failed(error: CarpoolError) -> Ending:
    status, payload = write_failure(error)
    return Ending(status, 0, payload)
