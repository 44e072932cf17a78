"""One front end as the engine sees it. Nothing it says is believed: a lie costs it the link, and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain, islice
from mmap import mmap
from typing import TYPE_CHECKING, cast

from carpool.core.job import NEW
from carpool.engine.work import NOWHERE, Outcome, Seat, Work
from carpool.errors import CarpoolError, ModelError, NotFound, Unavailable
from carpool.observe.logs import logger
from carpool.servers.link.failures import write_failure
from carpool.servers.link.placement import Placement
from carpool.servers.link.questions import Questions
from carpool.servers.link.records import (
    ASK,
    CANCEL,
    CATALOG,
    DONE,
    GONE,
    MAX_ASK_BYTES,
    MAX_TEMPLATES,
    OK,
    RESET,
    SEEN,
    SUBMIT,
    TEMPLATE,
    TO_ENGINE,
    TO_FRONTEND,
    Fields,
    Outbox,
    ProtocolError,
    RecordReader,
    to_frontend,
)
from carpool.servers.link.served import ServedTemplate, read_template

if TYPE_CHECKING:
    from carpool.servers.link.engine_side import EngineSide

_log = logger("link")
_SMALLEST_SLOT = 4096
_HIGH_WATER = 1 << 20  # unsent bytes above which nothing more is read from that front end
_MAX_UNSENT = 256 << 20
_AT_ONCE = 32  # records of one front end in one turn of the loop
_MOST_OUTSIDE_S = 10.0  # whatever a front end says
_WRITING_S = 0.001  # until the next look at an answer that is still being written


class EngineLink(asyncio.Protocol):
    """Reads submissions, owns the work until it is done, and answers."""

    def __init__(
        self, side: EngineSide, frontend: int, memory: mmap, arena: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._side = side
        self._frontend = frontend
        self._memory = memory
        self.arena = arena  # its number among all that this engine ever mapped
        self._size = len(memory)
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = RecordReader(TO_ENGINE, MAX_ASK_BYTES)
        self._outbox = Outbox(loop)
        self._questions = Questions(frontend, side.answer, self._outbox, loop)
        self._templates: dict[int, ServedTemplate] = {}
        self._works: dict[int, Work] = {}
        self._cancelled: set[int] = set()
        self._taken: list[Work] = []  # not submitted yet, all for one model:
        self._key = 0
        self._unheard: Iterator[tuple[Fields, bytes]] | None = None  # what it said, for the next turn
        self._deaf = False  # it does not take its answers
        self.seen = 0

    @property
    def calls(self) -> int:
        return len(self._works)

    def close(self) -> None:
        self._outbox.close()
        if self._transport is not None:
            self._transport.abort()

    def publish(self, number: int, catalog: bytes) -> None:
        if self._outbox.unsent > _MAX_UNSENT:
            self._drop("it does not listen")
        self._outbox.put(to_frontend(CATALOG, number, OK, catalog))

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._outbox.open(self._transport)
        self._side.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The front end is gone: what waits is cancelled, what runs finishes into memory nobody reads."""
        self._transport = None
        self._outbox.close()
        self._side.closed(self)
        self._templates.clear()
        works = list(self._works.items())
        for call, work in works:
            self._cancel(call, work)
        _log.info("link-closed", frontend=self._frontend, calls=len(works))

    def eof_received(self) -> None:
        self.close()  # nobody is left to read what is unsent

    def pause_writing(self) -> None:
        self._deaf = True
        self._listen()

    def resume_writing(self) -> None:
        self._deaf = False
        self._listen()

    def _listen(self) -> None:
        """Unless it does not take its answers, or has said more than was heard yet."""
        if self._transport is None:
            return
        if self._deaf or self._unheard is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._hear(self._reader.feed(data))

    def _go_on(self) -> None:
        records, self._unheard = self._unheard, None
        if records is not None and self._transport is not None:
            self._hear(records)
            self._listen()

    def _hear(self, records: Iterator[tuple[Fields, bytes]]) -> None:
        """So many in one turn: batches that end, and other front ends, are not to wait for all of a flood."""
        now = time.monotonic()
        try:
            for fields, payload in islice(records, _AT_ONCE):
                if fields[0] == SUBMIT:
                    self._take(fields, now)
                else:
                    self._submit()
                    self._obey(fields, payload)
            first = next(records, None)
            if first is not None:
                self._unheard = chain((first,), records)
                self._listen()
                self._loop.call_soon(self._go_on)
        except ProtocolError as error:
            self._drop(str(error))
        except Exception:
            _log.exception("link-failed", frontend=self._frontend)
            self._drop("it could not be read")
        finally:
            self._submit()

    def _drop(self, why: str) -> None:
        _log.error("link-dropped", frontend=self._frontend, error=why)
        self.close()
        self._side.dropped(self._frontend)

    # What it asks for.

    def _take(self, fields: Fields, now: float) -> None:
        """A request: it is submitted with those that came with it."""
        _, _, call, number, offset, output, capacity, arrived, deadline, sent, outside = fields
        template = self._templates.get(number)
        if template is None or call in self._works:
            raise ProtocolError(f"call {call} with template {number}")
        self._check_room(call, offset + template.extent, output + capacity)
        if not deadline >= 0.0:
            raise ProtocolError(f"call {call} has no deadline that is a number")
        if not arrived <= now:  # NaN too
            arrived = now
        entry = template.entry
        if entry is None:
            self._refuse(call, NotFound("the model is not loaded any more"))
            return
        inputs, place, seat = NOWHERE, None, None
        try:
            if entry.elsewhere:
                seat = Seat(call, template, self.arena, offset, output, capacity)
            else:
                inputs = template.bind(self._memory, offset)
                place = Placement(call, template, self._memory, output, capacity, self._side.max_answer_bytes)
        except CarpoolError as error:
            self._refuse(call, error)
            return
        work = Work(  # by position: with the names of so many, this would take half as long again
            inputs,
            self._finished,
            arrived,
            deadline,
            template.images,
            template.shape,
            template.priority,
            template.source,
            template.latest,
            template.timeout,
            min(outside, _MOST_OUTSIDE_S) if outside > 0.0 else 0.0,  # NaN too
            template.wanted,
            sent if 0.0 < sent <= now else now,
            place,
            seat,
            template.encoded,
        )
        self._works[call] = work
        if self._taken and template.key != self._key:
            self._submit()
        self._key = template.key
        self._taken.append(work)

    def _submit(self) -> None:
        """What was taken, which is all for one model."""
        works = self._taken
        if not works:
            return
        self._taken = []
        try:
            self._side.engine.submit(self._key, works)
        except Exception as error:
            _log.exception("submit-failed", key=self._key)
            for work in works:
                if work.state is NEW and _place(work).call in self._works:  # else the engine has it
                    self._finished(work, Outcome(error=ModelError(f"the engine failed: {error}")))

    def _check_room(self, call: int, inputs_end: int, outputs_end: int) -> None:
        if inputs_end > self._size or outputs_end > self._size:
            raise ProtocolError(f"call {call} reaches beyond the arena")
        if len(self._works) * _SMALLEST_SLOT > self._size:
            raise ProtocolError("more calls than the arena has slots")

    def _obey(self, fields: Fields, payload: bytes) -> None:
        kind, number = fields[0], fields[2]
        if kind == TEMPLATE:
            if len(self._templates) >= MAX_TEMPLATES or number in self._templates:
                raise ProtocolError(f"template {number} cannot be new")
            self._templates[number] = read_template(payload, self._side.entries.get)
        elif kind == CANCEL:
            work = self._works.get(number)
            if work is not None:  # else it was answered while the word was on its way
                self._cancel(number, work)
        elif kind == SEEN:
            self.seen = max(self.seen, number)
            self._side.acknowledged()
        elif kind == ASK:
            self._questions.ask(number, payload)
        elif kind == RESET:
            self._templates.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _cancel(self, call: int, work: Work) -> None:
        if call not in self._cancelled:
            self._cancelled.add(call)
            self._side.engine.cancel(work)

    # What it is told.

    def _finished(self, work: Work, outcome: Outcome) -> None:
        """The engine's `done`: once per work, and the last that is known of it here."""
        place = _place(work)
        call = place.call
        if call not in self._works:
            _log.error("answered-twice", frontend=self._frontend, call=call)
            return
        trouble = None if outcome.error is not None else self._trouble(place, outcome)
        if not place.close():
            self._loop.call_later(_WRITING_S, self._finished, work, outcome)
            return
        del self._works[call]
        if call in self._cancelled:
            self._cancelled.discard(call)
            self._outbox.put(to_frontend(DONE, call, GONE))
            return
        error = outcome.error or trouble
        status, payload = (OK, place.payload) if error is None else write_failure(error)
        timing = outcome.timing
        record = TO_FRONTEND.pack(
            DONE,
            len(payload),
            call,
            status,
            place.form or 0,
            timing.batch,
            timing.queue,
            timing.input,
            timing.infer,
            timing.output,
            time.monotonic(),
        )
        self._outbox.put(record + payload if payload else record)

    def _trouble(self, place: Placement | Seat, outcome: Outcome) -> CarpoolError | None:
        """Why outputs that the model gave cannot be sent, if they cannot."""
        if isinstance(place, Placement):
            if place.form is None and place.error is None and outcome.outputs is not None:
                place(outcome.outputs)  # an engine that does not place is served all the same
            if place.error is not None:
                return place.error
        if place.form is None:
            return ModelError("the engine answered without outputs")
        if place.payload and self._outbox.unsent > _MAX_UNSENT:
            return Unavailable("the front end does not take its answers", reason="overload")
        return None

    def _refuse(self, call: int, error: CarpoolError) -> None:
        status, payload = write_failure(error)
        self._outbox.put(to_frontend(DONE, call, status, payload))


def _place(work: Work) -> Placement | Seat:
    return work.seat or cast(Placement, work.place)
