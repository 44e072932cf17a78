"""Many answers to one request: their way from a model's thread to the front end that waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Protocol, cast

from carpool.backends.backend import AnswersMany, Backend
from carpool.core.job import RUNNING
from carpool.engine.batch import BatchResult, Outcome, Work
from carpool.engine.collator import Collator, inputs_of
from carpool.engine.executor import Executor, Report
from carpool.errors import CarpoolError, without_stack
from carpool.link.records import FINISHES, LAST, PART, TO_FRONTEND, Outbox
from carpool.types import Array, Signature, Timing

_AHEAD = 8  # answers of one instance that its model may be ahead of the loop
_MOST_UNSENT = 1 << 20  # bytes that a front end has not taken, above which its models wait
_LOOK_S = 0.002  # between two looks at a front end that takes nothing
_LOOK_AT_RIDER_S = 0.1
_ANY = -1  # images: an answer has as many rows as it has


class PartSink(Protocol):
    """Where the answers of one request go, until it is `done`. Of the loop's thread."""

    @property
    def full(self) -> bool:
        """Whoever can wait should, before the next."""

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        """What `RequestPlace.part` made of the outputs; `finish` is one of `FINISHES`. With `last` no other
        follows, although the end of the request does."""


class LinkParts:
    """Implements `PartSink`: into the records of one call."""

    __slots__ = ("_call", "_outbox")

    def __init__(self, outbox: Outbox, call: int) -> None:
        self._outbox = outbox
        self._call = call

    @property
    def full(self) -> bool:
        return self._outbox.unsent > _MOST_UNSENT

    def send(self, payload: bytes, finish: str = "", *, last: bool = False) -> None:
        outbox = self._outbox
        if outbox.full:
            outbox.failed("it does not take its answers")
            return
        ends = FINISHES.index(finish)
        times = 0.0, 0.0, 0.0, 0.0, monotonic(), 0
        outbox.put(TO_FRONTEND.pack(PART, len(payload), self._call, 0, ends, LAST * last, *times) + payload)


class PartWay:
    """From the thread of one instance to the loop. The thread waits when it is too far ahead, so that a model
    which answers without end fills no memory.

    Answers keep their order, and the end comes after them: all of it goes through the loop's one queue.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = threading.Semaphore(_AHEAD)  # taken in the thread, given back in the loop

    def send(self, work: Work, outputs: Mapping[str, Array], finish: str = "", *, last: bool = False) -> bool:
        """In the model's thread. False: nobody wants more of it. ModelError for what cannot be sent."""
        # Only the loop's thread changes the state, and only away from RUNNING: to read it late costs one
        # answer, which `_deliver` drops.
        if work.state is not RUNNING or work.place is None:
            return False
        payload = work.place.part(outputs)
        while not self._room.acquire(timeout=_LOOK_AT_RIDER_S):
            if work.state is not RUNNING:
                return False
        self._loop.call_soon_threadsafe(self._deliver, work, payload, finish, last)
        return True

    def _deliver(self, work: Work, payload: bytes, finish: str, last: bool) -> None:
        parts = work.parts
        if parts is not None and work.state is RUNNING:  # else it was answered, or its client has gone
            parts.send(payload, finish, last=last)
        self._make_room(parts)

    def _make_room(self, parts: PartSink | None) -> None:
        if parts is not None and parts.full:
            self._loop.call_later(_LOOK_S, self._make_room, parts)
        else:
            self._room.release()


class _Rider:
    """Implements `Listener` for one request of a batch."""

    __slots__ = ("_collator", "_way", "_work")

    def __init__(self, work: Work, way: PartWay, collator: Collator) -> None:
        self._work = work
        self._way = way
        self._collator = collator

    @property
    def wanted(self) -> bool:
        return self._work.state is RUNNING

    def send(self, outputs: Mapping[str, Array], *, last: bool = False) -> None:
        self._collator.check(outputs, tuple(outputs), _ANY)
        self._way.send(self._work, outputs, last=last)


class DecoupledExecutor(Executor):
    """Each request of a batch has its own answers, and nothing is split."""

    def __init__(
        self, backend: Backend, signature: Signature, report: Report, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(backend, signature, 1, 1, report)
        self._many = cast(AnswersMany, backend)
        self._way = PartWay(loop)
        self._collator = Collator(signature, 1)
        self._every_output = tuple(signature.output_named)
        self._run = self._run_many  # nobody has given its thread anything yet

    def _run_many(self, works: Sequence[Work]) -> BatchResult:
        began = monotonic()
        errors: dict[int, CarpoolError] = {}
        inputs = inputs_of(works, errors)
        able = [index for index in range(len(works)) if index not in errors]
        try:
            ended = self._many.run_many(
                [(inputs[index], works[index].wanted or self._every_output) for index in able],
                [works[index].details for index in able],
                [_Rider(works[index], self._way, self._collator) for index in able],
            )
        except CarpoolError as error:
            ended = [error] * len(able)
        for index, wrong in zip(able, ended, strict=True):
            if wrong is not None:
                errors[index] = without_stack(wrong)
        outcomes = [Outcome(error=errors.get(index)) for index in range(len(works))]
        seconds = monotonic() - began
        timing = Timing(infer=seconds, batch=sum(work.images for work in works))
        return BatchResult(outcomes, seconds, timing, clean=False)  # it took what its answers took
