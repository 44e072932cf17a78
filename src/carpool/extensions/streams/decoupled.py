"""Runs instances that give many answers to a request, and brings these from a model's thread to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import cast

from carpool.backends.backend import AnswersMany, Backend
from carpool.core.job import RUNNING
from carpool.engine.run.batch import BatchResult, Outcome, Work
from carpool.engine.run.collator import Collator, inputs_of
from carpool.engine.run.executor import Report
from carpool.engine.run.parts import PartSink
from carpool.errors import CarpoolError, ModelError, without_stack
from carpool.observe.logs import logger
from carpool.types import Array, Signature, Timing

_log = logger("engine")

_AHEAD = 8  # answers of one instance that its model may be ahead of the loop
_LOOK_S = 0.002  # between two looks at a front end that takes nothing
_LOOK_AT_RIDER_S = 0.1
_ANY = -1  # images: an answer has as many rows as it has


class PartWay:
    """Brings answers from the thread of one instance to the loop. The thread waits when it is too far ahead,
    so that a model which answers without end fills no memory.

    Answers keep their order, and the end comes after them: all of it goes through the loop's one queue.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = threading.Semaphore(_AHEAD)  # taken in the thread, given back in the loop

    def send(self, work: Work, outputs: Mapping[str, Array], finish: str = "", *, last: bool = False) -> bool:
        """Sends a part, in the model's thread. False: the request needs no more parts. Raises ModelError for
        what cannot be sent."""
        # Only the loop's thread changes the state, and only away from RUNNING: to read it late costs one
        # answer, which `_deliver` drops.
        if work.state is not RUNNING or work.place is None or work.extras.gives_way:
            return False
        payload = work.place.part(outputs)
        while not self._room.acquire(timeout=_LOOK_AT_RIDER_S):
            if work.state is not RUNNING or work.extras.gives_way:
                return False
        self._loop.call_soon_threadsafe(self._deliver, work, payload, finish, last)
        return True

    def _deliver(self, work: Work, payload: bytes, finish: str, last: bool) -> None:
        parts = work.extras.parts
        if parts is not None and work.state is RUNNING:  # else it was answered, or its client has gone
            parts.send(payload, finish, last=last)
        self._make_room(parts)

    def _make_room(self, parts: PartSink | None) -> None:
        if parts is not None and parts.full:
            self._loop.call_later(_LOOK_S, self._make_room, parts)
        else:
            self._room.release()


class _Rider:
    """Represents one request, as the backend's `run_many` gets it."""

    __slots__ = ("_index", "_instance", "_place", "_work", "details", "inputs", "outputs")

    def __init__(self, place: DecoupledPlace, index: int, work: Work, inputs: Mapping[str, Array]) -> None:
        self._instance = place.instance
        self._place = place
        self._index = index
        self._work = work
        self.inputs = inputs
        self.outputs = work.form.wanted or place.instance.every_output
        self.details = work.extras.details

    @property
    def wanted(self) -> bool:
        # All are changed by the loop only, and never back: to see it late costs one answer.
        work = self._work
        return work.state is RUNNING and work.extras.parts is not None and not work.extras.gives_way

    def send(self, outputs: Mapping[str, Array], *, last: bool = False) -> None:
        self._instance.collator.check(outputs, tuple(outputs), _ANY, apart=True)
        self._instance.way.send(self._work, outputs, last=last)

    def end(self, error: CarpoolError | None) -> None:
        self._place.ended(self._index, error)


class DecoupledPlace:
    """Implements `Executes`: one of the places in an instance, taken and left apart from the others. The loop
    gives it a batch, and has nothing more to do with it until that is reported; meanwhile it is the
    instance's thread's."""

    def __init__(self, instance: DecoupledInstance) -> None:
        self.instance = instance
        self._works: Sequence[Work] = ()
        self._outcomes: dict[int, Outcome] = {}  # by their index; of the instance's thread
        self._began = 0.0

    @property
    def alive(self) -> bool:
        return self.instance.backend.alive

    @property
    def responsive(self) -> bool:
        return True

    def run(self, works: Sequence[Work]) -> None:
        self._works, self._outcomes, self._began = works, {}, monotonic()
        self.instance.queue.put((self, works))

    def abort(self) -> None:
        self.instance.backend.abort()

    def close(self) -> None:
        self.instance.leave()

    def join(self, timeout: float) -> None:
        self.instance.join(timeout)

    def ended(self, index: int, error: CarpoolError | None) -> None:
        """Notes the end, in the instance's thread, once for each of the works."""
        self.instance.riding.pop((self, index), None)
        self._outcomes[index] = Outcome(error=None if error is None else without_stack(error))
        works = self._works
        if len(self._outcomes) < len(works):
            return
        self._works = ()  # the memory of a front end that has died must go
        outcomes = [self._outcomes[number] for number in range(len(works))]
        seconds = monotonic() - self._began
        timing = Timing(infer=seconds, batch=sum(work.images for work in works))
        self.instance.report(self, BatchResult(outcomes, seconds, timing, clean=False))  # as its answers took


class DecoupledInstance:
    """Represents one instance of a decoupled model, whose places share its thread and its process. A request
    that takes one while others are under way joins them."""

    def __init__(
        self, backend: Backend, signature: Signature, report: Report, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.backend = backend
        self._many = cast(AnswersMany, backend)
        self._model = signature.model
        self._most = max(1, signature.max_batch)  # requests that the model gets at once
        self._report = report
        self.way = PartWay(loop)
        self.collator = Collator(signature, 1)
        self.every_output = tuple(signature.output_named)
        self.queue: SimpleQueue[tuple[DecoupledPlace, Sequence[Work]] | None] = SimpleQueue()
        self.places = [DecoupledPlace(self) for _ in range(places_of(backend))]
        self._taken = len(self.places)  # of the loop's thread
        self.riding: dict[tuple[DecoupledPlace, int], _Rider] = {}  # from here on, of our thread
        self._closing = False
        self._server = threading.Thread(target=self._serve, name=f"{signature.model}-instance", daemon=True)
        self._server.start()

    def leave(self) -> None:
        """One of the places is given up; after the last the model is freed, when no request is under way."""
        self._taken -= 1
        if not self._taken:
            self.queue.put(None)

    def join(self, timeout: float) -> None:
        self._server.join(timeout)

    def report(self, place: DecoupledPlace, result: BatchResult) -> None:
        with suppress(RuntimeError):  # one that was given up may end after the loop that it reports to
            self._report(place, result)

    def _serve(self) -> None:
        while not self._closing:
            riders = self._board(wait=True)
            if riders:
                self._ride(riders)
            del riders
        try:
            self.backend.close()
        except Exception:
            _log.exception("close-failed", model=self._model)

    def _ride(self, riders: Sequence[_Rider]) -> None:
        error: CarpoolError
        try:
            self._many.run_many(riders, self._board)
            error = ModelError(f"{self._model}: its process lost a request")
        except CarpoolError as ended:
            error = ended
        except Exception as fault:  # an internal error: it must end neither the thread nor its requests
            _log.exception("batch-failed", model=self._model)
            error = ModelError(f"{self._model}: {type(fault).__name__}: {fault}")
        for rider in list(self.riding.values()):
            rider.end(error)

    def _board(self, *, wait: bool = False) -> list[_Rider]:
        """Returns the requests that took a place since, at most as many as the model gets at once."""
        boarded: list[_Rider] = []
        while len(boarded) < self._most and not self._closing:
            try:
                seated = self.queue.get(block=wait and not boarded)
            except Empty:
                break
            if seated is None:
                self._closing = True
            else:
                boarded += self._riders(*seated)
        return boarded

    def _riders(self, place: DecoupledPlace, works: Sequence[Work]) -> Iterator[_Rider]:
        errors: dict[int, CarpoolError] = {}
        inputs = inputs_of(works, errors)
        for index, work in enumerate(works):
            if index in errors:
                place.ended(index, errors[index])
                continue
            rider = _Rider(place, index, work, inputs[index])
            self.riding[place, index] = rider
            yield rider


def places_of(backend: object) -> int:
    return cast(AnswersMany, backend).most_open
