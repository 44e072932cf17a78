"""What one front end asks of the engine, from its records to its answers: inferences and questions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from mmap import mmap
from time import monotonic
from typing import Any, Protocol

import orjson

from carpool.core.job import NEW, OFFERED
from carpool.engine.work import NO_INPUTS, Outcome, Work
from carpool.errors import CarpoolError, ModelError, NotFound, Unavailable
from carpool.link.door import Catalog
from carpool.link.link_failures import write_failure
from carpool.link.records import (
    ADMITTED,
    ANSWER,
    COMING,
    DONE,
    GONE,
    LATEST,
    MAX_ASKS,
    OK,
    TO_FRONTEND,
    Fields,
    HeardSources,
    Outbox,
    ProtocolError,
    to_frontend,
)
from carpool.link.request_place import RequestPlace
from carpool.link.templates import ServedTemplate
from carpool.observe.logs import logger
from carpool.types import Timing

_log = logger("link")


class EngineLike(Protocol):
    """What an engine must do to be reached over links. Everything is called on its loop's thread."""

    def submit(self, key: int, works: Sequence[Work]) -> None:
        """Run what came at once, or call each `work.done` with the reason why not: also for a key that is not
        served any more."""

    def ready(self, work: Work) -> None:
        """The inputs of one that was submitted before them are there. Nothing, if it has ended meanwhile."""

    def cancel(self, work: Work) -> None:
        """Nobody waits for it. `work.done` is still called once, when its memory is touched no more."""

    def share(self, arena: int, file: int) -> None:
        """A front end's memory, for models in another process: the number is new, the file stays ours."""

    def unshare(self, arena: int) -> None:
        """Nobody reads answers there any more."""

    @property
    def catalog(self) -> Catalog: ...

    async def open(self) -> None:
        """Load what is to be there from the start: each model serves as soon as it can. Raises where there
        will be nothing to serve."""

    def set_ready(self, ready: bool) -> None:
        """Say so in the catalogue."""

    def listen(
        self, listener: Callable[[Catalog], None], seen: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        """Call it with every new catalogue, whose number is higher than the last one's.

        `seen` waits until every front end has the catalogue of this number: only then is it certain that no
        request for something that it does not offer is still on its way.
        """

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Any question that is not an inference; errors are `CarpoolError`s."""

    async def drain(self, timeout: float) -> None:
        """Finish what was accepted, take nothing new, close the models."""


class Questions:
    """Those of one front end that are open. They are answered in whatever order they end."""

    def __init__(
        self,
        frontend: int,
        answer: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._frontend = frontend
        self._answer = answer
        self._outbox = outbox
        self._loop = loop
        self._open: set[asyncio.Task[None]] = set()

    def ask(self, number: int, payload: bytes) -> None:
        if len(self._open) >= MAX_ASKS:
            raise ProtocolError(f"more than {MAX_ASKS} open questions")
        task = self._loop.create_task(self._settle(number, payload))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _settle(self, number: int, payload: bytes) -> None:
        try:
            what, arguments = orjson.loads(payload)
            answer = orjson.dumps(await self._answer(what, arguments))
            status = OK
        except CarpoolError as error:
            status, answer = write_failure(error)
        except Exception as error:
            _log.exception("ask-failed", frontend=self._frontend)
            status, answer = write_failure(CarpoolError(f"the engine failed: {error}"))
        self._outbox.put(to_frontend(ANSWER, number, status, answer))


_SMALLEST_SLOT = 4096
_MOST_OUTSIDE_S = 10.0  # whatever a front end says
_WRITING_S = 0.001  # until the next look at an answer that is still being written
_pack_answer = TO_FRONTEND.pack


class Calls:
    """Makes work of records, owns it until it is done, and answers."""

    def __init__(
        self,
        engine: EngineLike,
        frontend: int,
        memory: mmap,
        arena: int,
        most: int,
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._memory = memory
        self._arena = arena
        self._most_bytes = most  # of an answer that does not fit its slot
        self._size = len(memory)
        self._most = self._size // _SMALLEST_SLOT
        self._outbox = outbox
        self._loop = loop
        self.sources = HeardSources()
        self._works: dict[int, Work] = {}
        self._cancelled: set[int] = set()
        self._taken: list[Work] = []  # not submitted yet, all for one model:
        self._key = 0

    def __len__(self) -> int:
        return len(self._works)

    def take(self, fields: Fields, template: ServedTemplate | None, now: float) -> None:
        """A request: it is submitted with those that came at once with it."""
        _, _, call, number, offset, output, capacity, arrived, deadline, sent, outside = fields[:11]
        timeout, coming, priority, source, flags = fields[11:]
        if template is None or call in self._works or len(self._works) > self._most:
            raise ProtocolError(f"call {call} with template {number}, one of {len(self._works)}")
        if offset + template.extent > self._size or output + capacity > self._size:
            raise ProtocolError(f"call {call} reaches beyond the arena")
        _check_options(call, template, deadline, timeout, flags, coming)
        if not arrived <= now:  # NaN too
            arrived = now
        entry = template.entry
        if entry is None:
            self._refuse(call, NotFound("the model is not loaded any more"))
            return
        try:
            inputs = NO_INPUTS if entry.hosted else template.bind(self._memory, offset)
        except CarpoolError as error:
            self._refuse(call, error)
            return
        images, shape = template.images, template.shape
        work = Work(inputs, self._done, arrived, deadline, images, shape, template.wanted, template.encoded)
        work.place = RequestPlace(
            template, self._memory, offset, output, capacity, self._most_bytes, call, self._arena
        )
        work.sent = sent if 0.0 < sent <= now else now
        work.outside = min(outside, _MOST_OUTSIDE_S) if outside > 0.0 else 0.0  # NaN too
        work.timeout = timeout
        work.priority = priority
        if source:
            work.source = self.sources.name(source)
        if flags & LATEST:
            work.latest = True
        if flags & COMING:
            work.ready_at = now + coming
        self._works[call] = work
        if self._taken and template.key != self._key:
            self.submit()
        self._key = template.key
        self._taken.append(work)

    def submit(self) -> None:
        """What was taken, which is all for one model."""
        works = self._taken
        if not works:
            return
        self._taken = []
        try:
            self._engine.submit(self._key, works)
        except Exception as error:
            _log.exception("submit-failed", key=self._key)
            for work in works:
                if work.state is NEW and work in self._works.values():  # else the engine has it
                    self._done(work, Outcome(error=ModelError(f"the engine failed: {error}")))
        for work in works:
            if work.state is OFFERED and work.place is not None:
                self._outbox.put(to_frontend(ADMITTED, work.place.call, OK))

    def ready(self, call: int) -> None:
        """Too late for one that was given up while the word was on its way."""
        work = self._works.get(call)
        if work is not None and call not in self._cancelled:
            self._engine.ready(work)

    def cancel(self, call: int) -> None:
        """Too late for one that was answered while the word was on its way."""
        work = self._works.get(call)
        if work is not None and call not in self._cancelled:
            self._cancelled.add(call)
            self._engine.cancel(work)

    def end(self) -> None:
        """Nothing more will come. Those that are left have the memory for as long as they need it."""
        del self._memory
        for call in list(self._works):
            self.cancel(call)

    def _done(self, work: Work, outcome: Outcome) -> None:
        """The engine's `done`: once per work, and the last that is known of it here.

        An answer that cannot be given ends the link, since its front end would wait for it; what ends with a
        link is answered by each side alone.
        """
        place = work.place
        assert place is not None  # `take` gave it one
        call = place.call
        if call not in self._works:
            _log.error("answered-twice", frontend=self._frontend, call=call)
            return
        try:
            error = outcome.error
            if error is None and (place.form is None or place.payload):
                error = self._trouble(place, outcome)
            if not place.close():
                self._loop.call_later(_WRITING_S, self._done, work, outcome)
                return
            del self._works[call]
            if call in self._cancelled:
                self._cancelled.discard(call)
                self._outbox.put(to_frontend(DONE, call, GONE))
            else:
                self._outbox.put(_answer(place, outcome.timing, error))
        except Exception as error:
            _log.exception("answer-failed", frontend=self._frontend)
            self._works.pop(call, None)
            self._outbox.failed(f"an answer cannot be given: {error}")
        # A queue may remember a work that was answered: that must not keep the memory of a front end that is
        # gone.
        work.inputs = NO_INPUTS
        place.forget()

    def _trouble(self, place: RequestPlace, outcome: Outcome) -> CarpoolError | None:
        """Why outputs that the model gave cannot be sent, if they cannot."""
        if place.form is None and place.error is None and outcome.outputs is not None:
            place(outcome.outputs)  # an engine that does not place is served all the same
        if place.error is not None:
            return place.error
        if place.form is None:
            return ModelError("the engine answered without outputs")
        if place.payload and self._outbox.full:
            return Unavailable("the front end does not take its answers", reason="overload")
        return None

    def _refuse(self, call: int, error: CarpoolError) -> None:
        status, payload = write_failure(error)
        self._outbox.put(to_frontend(DONE, call, status, payload))


def _answer(place: RequestPlace, timing: Timing, error: CarpoolError | None) -> bytes:
    status, payload = (OK, place.payload) if error is None else write_failure(error)
    record = _pack_answer(
        DONE,
        len(payload),
        place.call,
        status,
        place.form or 0,
        timing.batch,
        timing.queue,
        timing.input,
        timing.infer,
        timing.output,
        monotonic(),
    )
    return record + payload if payload else record


def _check_options(
    call: int, template: ServedTemplate, deadline: float, timeout: float, flags: int, coming: float
) -> None:
    if not (deadline >= 0.0 and 0.0 <= timeout < inf):
        raise ProtocolError(f"call {call} has no deadline or timeout that is a number")
    # Of inputs that are to come nothing may be looked at before they are there.
    if flags & COMING and not (template.plain and not template.encoded and 0.0 <= coming < inf):
        raise ProtocolError(f"call {call} cannot be offered before its inputs")
