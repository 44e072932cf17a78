"""Implements the engine's end of its links. It believes nothing: a lie costs a front end its link, and no
more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from mmap import mmap
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from carpool.core.job import NEW, NO_OPTIONS, OFFERED, Course, JobOptions
from carpool.engine.routes.direct_route import NO_ROUTE
from carpool.engine.run.batch import NO_EXTRAS, NO_INPUTS, Extras, Outcome, Work
from carpool.engine.run.parts import MOST_UNSENT, LinkParts, OutgoingParts
from carpool.errors import CarpoolError, ModelError, NotFound, Unavailable
from carpool.link import records
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.catalog_changes import CatalogWriter
from carpool.link.link_failures import write_failure
from carpool.link.records import Fields, HeardSources, Outbox, ProtocolError, RecordReader, to_frontend
from carpool.link.request_place import RequestPlace, inline_size, put_inline
from carpool.link.step_times import write_steps
from carpool.link.templates import ServedTemplate, read_template
from carpool.memory.arena import LARGE, MOST_OF_ARENA, map_memory
from carpool.observe.logs import logger
from carpool.types import StepTiming, Timing

if TYPE_CHECKING:
    from carpool.engine.engine_host import EngineHost
    from carpool.engine.models.served import Group, OpensGroups

_log = logger("link")
_SMALLEST_SLOT: Final = 4096
_OPTIONS = records.LATEST | records.AGAIN
_MOST_OUTSIDE_S: Final = 10.0  # whatever a front end says
_WRITING_S: Final = 0.001  # until the next look at an answer that is still being written
_pack_answer = records.TO_FRONTEND.pack


class Calls:
    """Makes work of records, owns it until it is done, and answers."""

    __deletable__ = ("_memory",)  # of the compiled form

    def __init__(
        self,
        engine: EngineHost,
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
        self.outgoing = OutgoingParts(outbox, loop)
        self._loop = loop
        self.sources = HeardSources()
        self.groups = LinkGroups(engine.groups.get, self._most)
        self._works: dict[int, Work] = {}
        self._cancelled: set[int] = set()
        self._roomless: dict[int, tuple[Work, Outcome]] = {}
        """Those with outputs that did not fit, until it is known where there is room, and they are there."""
        self.taken: list[Work] = []  # not submitted yet, all for one model:
        self._key = 0

    def __len__(self) -> int:
        return len(self._works)

    def take(self, fields: Fields, template: ServedTemplate | None, now: float, payload: bytes) -> None:
        """A request: it is submitted with those that came at once with it."""
        _, _, call, number, offset, output, capacity, arrived, deadline, sent, outside = fields[:11]
        timeout, coming, priority, source, flags = fields[11:]
        if template is None or call in self._works or len(self._works) > self._most:
            raise ProtocolError(f"call {call} with template {number}, one of {len(self._works)}")
        if offset + template.extent > self._size or output + capacity > self._size:
            raise ProtocolError(f"call {call} reaches beyond the arena")
        _check_options(call, template, deadline, timeout, flags, coming)
        arrived = arrived if arrived <= now else now  # NaN too
        entry = template.entry
        if entry is None:
            self._refuse(call, NotFound("the model is not loaded any more"))
            return
        try:
            inputs = NO_INPUTS if entry.traits.hosted else template.bind(self._memory, offset)
        except CarpoolError as error:
            self._refuse(call, error)
            return
        images, shape = template.images, template.shape
        work = Work(inputs, self._done, arrived, deadline, images, shape, template.form)
        work.place = RequestPlace(
            template, self._memory, offset, output, capacity, self._most_bytes, call, self._arena
        )
        work.sent = sent if 0.0 < sent <= now else now
        work.outside = min(outside, _MOST_OUTSIDE_S) if outside > 0.0 else 0.0  # NaN too
        if source:
            work.origin = self.sources.known.get(source) or self.sources.source(source)  # which raises
        asks = priority or timeout or flags & _OPTIONS
        work.options = _options(priority, timeout, flags) if asks else NO_OPTIONS
        if flags & records.COMING:
            work.course = course = Course()
            course.ready_at = now + coming
        work.extras = self._with_parts(call, entry, flags) if entry.traits.decoupled else NO_EXTRAS
        if payload and not self._hears(work, template, flags, payload, now):
            return
        self._works[call] = work
        if flags & records.BACKGROUND:
            self._engine.submit_background(template.key, work)
            return
        if self.taken and template.key != self._key:
            self.submit()
        self._key = template.key
        self.taken.append(work)

    def _with_parts(self, call: int, entry: ModelEntry, flags: int) -> Extras:
        if not entry.traits.in_parts(not flags & records.PARTS):
            return NO_EXTRAS
        extras = Extras()
        extras.parts = LinkParts(self.outgoing, entry.key, call)
        return extras

    def _hears(self, work: Work, template: ServedTemplate, flags: int, payload: bytes, now: float) -> bool:
        """Reads what a request says of itself: of which group it is, where its inputs are if that is
        not its slot, and its own words. False: refused."""
        try:
            if flags & records.STEP:
                if self.taken:
                    self.submit()  # the gate is to count those who came before
                payload = self.groups.join(work, payload, now)
            if flags & records.REGIONS:
                work.own_extras().reads, payload = template.reads(payload, self._engine.regions)
        except CarpoolError as error:
            assert work.place is not None
            self._refuse(work.place.call, error)
            return False
        if payload:
            work.own_extras().details = checked_details(payload)
        return True

    def submit(self) -> None:
        """Submits what was taken, which is all for one model."""
        works, self.taken = self.taken, []
        try:
            self._engine.routes.get(self._key, NO_ROUTE).submit(works)
        except Exception as error:
            _log.exception("submit-failed", key=self._key)
            for work in works:
                if work.state is NEW and work in self._works.values():  # else the engine has it
                    work.done(work, Outcome(error=ModelError(f"the engine failed: {error}")))
        say = self._outbox.put if len(works) > 1 else self._outbox.send
        for work in works:
            if work.state is OFFERED and work.place is not None:
                say(to_frontend(records.ADMITTED, work.place.call, records.OK))

    def ready(self, call: int) -> None:
        """Marks a call as ready, unless it was given up while the word was on its way."""
        work = self._works.get(call)
        if work is not None and call not in self._cancelled and work.route is not None:
            work.route.ready(work)

    def cancel(self, call: int) -> None:
        """Cancels a call, unless it was answered while the word was on its way."""
        work = self._works.get(call)
        if work is not None and call not in self._cancelled:
            self._cancelled.add(call)
            if work.route is not None and call not in self._roomless:  # else it has run
                work.route.cancel(work)

    def end(self) -> None:
        """Nothing more will come. Those that are left have the memory for as long as they need it."""
        del self._memory
        self.outgoing.clear()
        self.groups.end()
        for call in self._roomless:
            del self._works[call]
        for call in list(self._works):
            self.cancel(call)

    def _done(self, work: Work, outcome: Outcome) -> None:
        """Implements the engine's `done`: once per work, and the last that is known of it here.

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
                error = self._trouble(work, place, outcome)
            if not place.close():
                self._loop.call_later(_WRITING_S, self._done, work, outcome)
                return
            if error is None and len(place.payload) > LARGE and self._asks_for_room(work, place, outcome):
                return
            del self._works[call]
            if call in self._cancelled:
                self._cancelled.discard(call)
                record = to_frontend(records.DONE, call, records.GONE)
            else:
                record = _answer(place, outcome.timing, error)
            if isinstance(work.extras.parts, LinkParts):
                work.extras.parts.put(record)
            elif outcome.timing.batch == 1:  # no other request is answered with it
                self._outbox.send(record)
            else:
                self._outbox.put(record)
        except Exception as error:
            _log.exception("answer-failed", frontend=self._frontend)
            self._works.pop(call, None)
            self._outbox.failed(f"a response cannot be given: {error}")
        # A queue may remember a work that was answered: that must not keep the memory of a front end that is
        # gone, nor may what raised in its batch, whose frames hold its inputs.
        work.inputs, work.extras = NO_INPUTS, NO_EXTRAS
        place.forget()

    def _asks_for_room(self, work: Work, place: RequestPlace, outcome: Outcome) -> bool:
        """Asks where outputs can be that did not fit their slot, unless they take most of the memory."""
        call, size = place.call, inline_size(place.payload)
        if place.form != records.INLINE or size > self._size // MOST_OF_ARENA or call in self._cancelled:
            return False
        self._roomless[call] = (work, outcome)
        self._outbox.put(to_frontend(records.ROOM, call, records.OK, records.ROOM_SIZE.pack(size)))
        return True

    def placed(self, call: int, start: int, capacity: int) -> None:
        """The front end has found room for outputs, or none: then `capacity` is 0."""
        waiting = self._roomless.get(call)
        place = None if waiting is None else waiting[0].place
        if waiting is None or place is None or place.form != records.INLINE:
            raise ProtocolError(f"room for call {call}, which has not asked for it")
        if start + capacity > self._size or 0 < capacity < inline_size(place.payload):
            raise ProtocolError(f"room for call {call} beyond the arena, or too little")
        place.form = records.LISTED
        if not capacity or call in self._cancelled:
            place.payload = b"[]"
            self._done_in_room(call, None if capacity else _no_room())
            return
        put = self._loop.run_in_executor(None, put_inline, place.payload, self._memory, start)
        put.add_done_callback(lambda done: self._put(call, place, done))

    def _put(self, call: int, place: RequestPlace, done: asyncio.Future[bytes]) -> None:
        fault = None if done.cancelled() else done.exception()
        if done.cancelled() or fault is not None:
            self._done_in_room(call, ModelError(f"the outputs could not be written: {fault}"))
            return
        place.payload = done.result()
        self._done_in_room(call, None)

    def _done_in_room(self, call: int, error: CarpoolError | None) -> None:
        work, outcome = self._roomless.pop(call)
        if call in self._works:
            self._done(work, outcome if error is None else replace(outcome, error=error))

    def _trouble(self, work: Work, place: RequestPlace, outcome: Outcome) -> CarpoolError | None:
        """Returns why outputs that the model gave cannot be sent, if they cannot."""
        if work.extras.parts is not None:  # they were, each in its turn
            place.form, place.payload = records.LISTED, b"[]"
            return None
        if place.form is None and place.error is None and outcome.outputs is not None:
            place(outcome.outputs)  # an engine that does not place is served all the same
        if place.error is not None:
            return place.error
        if place.form is None:
            return ModelError("the engine answered without outputs")
        if place.payload and self._outbox.full:
            return Unavailable("the front end does not read its responses", reason="overload")
        return None

    def _refuse(self, call: int, error: CarpoolError) -> None:
        status, payload = write_failure(error)
        self._outbox.put(to_frontend(records.DONE, call, status, payload))


def _options(priority: int, timeout: float, flags: int) -> JobOptions:
    return JobOptions(priority, timeout, flags & records.LATEST != 0, flags & records.AGAIN != 0)


def _answer(place: RequestPlace, timing: Timing, error: CarpoolError | None) -> bytes:
    status, payload = (records.OK, place.payload) if error is None else write_failure(error)
    form = place.form or 0
    if timing.__class__ is StepTiming and error is None:
        form, payload = form | records.WITH_STEPS, payload + write_steps(timing)
    spent = timing.queue, timing.input, timing.infer, timing.output
    head = records.DONE, len(payload), place.call, status, form, timing.batch
    record = _pack_answer(*head, *spent, monotonic(), timing.number)
    return record + payload if payload else record


def _no_room() -> Unavailable:
    return Unavailable("there is no memory for the response; retry", reason="no-slots")


def checked_details(details: bytes) -> bytes:
    """Returns what a request says of itself, if that can be read."""
    try:
        if len(details) > records.MAX_DETAILS_BYTES or not isinstance(orjson.loads(details), dict):
            raise ValueError
    except ValueError:
        raise ProtocolError(f"{len(details)} bytes about a request that cannot be decoded") from None
    return details


def _check_options(
    call: int, template: ServedTemplate, deadline: float, timeout: float, flags: int, coming: float
) -> None:
    if not (deadline >= 0.0 and 0.0 <= timeout < inf):
        raise ProtocolError(f"call {call} has no deadline or timeout that is a number")
    # Of inputs that are to come nothing may be looked at before they are there.
    allowed = template.plain and not template.encoded and not flags & records.BACKGROUND
    if flags & records.COMING and not (allowed and 0.0 <= coming < inf):
        raise ProtocolError(f"call {call} cannot be offered before its inputs")


MOST_UNREAD = (4 << 20) + records.MAX_PART_BYTES
"""Unsent bytes above which nothing more is read from that front end. Parts alone never come to that: they
leave one at a time, while less than `MOST_UNSENT` waits (engine/run/parts.py)."""
_AT_ONCE = 16  # records of one front end in one turn of the loop: of eight front ends, three milliseconds
_MOST_UNHEARD: Final = 8 * _AT_ONCE  # above which no more is read: a burst is not worth two system calls


class LinkGroups:
    """Holds the groups of one front end, by its numbers: requests that are let in together.

    A front end says of each such request which group and which step of it this is (`STEP`), and between the
    steps how far the group is (`BOOKING`). A group begins with its first request, if the gate lets all of it
    in. It ends when the front end says so or when its link is gone. What is said of a group that is over, or
    was refused, is not heard; what can only be a lie costs the link, as everywhere.
    """

    def __init__(self, opens: Callable[[int], OpensGroups | None], most: int) -> None:
        self._opens = opens
        self._most = most
        self._open: dict[int, tuple[str, Group]] = {}  # and the models' names

    def join(self, work: Work, payload: bytes, now: float) -> bytes:
        """Takes a request of a group; returns the rest of what it says. Raises why all of the group, or this
        request, is refused."""
        if len(payload) < records.STEP_PART.size:
            raise ProtocolError("a step without a booking")
        number, key, step = records.STEP_PART.unpack_from(payload)
        name, group = self._open.get(number) or self._begun(number, key, step, work, now)
        try:
            group.asks(step, work, now)
        except (CarpoolError, ProtocolError):
            raise
        except Exception as bug:
            raise _failed(name, bug) from None
        return payload[records.STEP_PART.size :]

    def _begun(self, number: int, key: int, step: int, work: Work, now: float) -> tuple[str, Group]:
        opens = self._opens(key)
        if opens is not None and len(self._open) >= self._most:
            raise ProtocolError(f"more than {self._most} bookings")
        try:
            group = None if opens is None else opens.opened(step, work, now)
        except (CarpoolError, ProtocolError):
            raise
        except Exception as bug:
            raise _failed("" if opens is None else opens.name, bug) from None
        if opens is None or group is None:
            raise Unavailable("the pipeline was unloaded meanwhile", reason="unloading")
        found = self._open[number] = opens.name, group
        return found

    def hear(self, number: int, payload: bytes, now: float) -> None:
        try:
            what, step, images = records.BOOKING_NEWS.unpack(payload)
        except struct.error:
            raise ProtocolError("a malformed update of a booking") from None
        if number not in self._open:
            return
        name, group = self._open[number]
        if what == records.REACHES:
            try:
                group.reaches(step, images)
            except ProtocolError:
                raise
            except Exception as bug:
                group.failed = _failed(name, bug)
        elif what in (records.ANSWERED, records.GIVEN_UP):
            del self._open[number]
            group.over(now, answered=what == records.ANSWERED)
        else:
            raise ProtocolError(f"an unknown booking action {what}")

    def end(self) -> None:
        """Ends all groups: the front end is gone, and the routes cancel its requests."""
        groups, self._open = self._open, {}
        now = monotonic()
        for _, group in groups.values():
            group.over(now, answered=False)


def _failed(name: str, bug: Exception) -> CarpoolError:
    """Returns what is said of a fault of the server: it costs one request, not the link."""
    _log.exception("pipeline-failed", model=name)
    return CarpoolError(f"the engine failed on this request of {name}: {type(bug).__name__}")


class EngineLink:
    """The connection: reads what it says, in turns, and passes it on to who answers."""

    def __init__(
        self, side: EngineSide, frontend: int, memory: mmap, arena: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._side = side
        self._frontend = frontend
        self.arena = arena  # its number among all that this engine ever mapped
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = RecordReader(records.TO_ENGINE, records.MAX_ASK_BYTES)
        self._outbox = Outbox(loop, self._drop)
        self.calls = Calls(side.engine, frontend, memory, arena, side.max_answer_bytes, self._outbox, loop)
        self._questions: set[asyncio.Task[None]] = set()  # that are open
        self._templates: dict[int, ServedTemplate] = {}
        self._unheard: list[tuple[Fields, bytes]] = []  # what it said, for the next turn
        self._behind = self._paused = False  # more waits for it than parts wait behind; it is not read from
        self.seen = 0

    def close(self) -> None:
        self._outbox.close()
        if self._transport is not None:
            self._transport.abort()

    def publish(self, catalog: bytes) -> None:
        """Sends records of a catalogue: all of it first, and from then on what changed."""
        if self._outbox.full:
            self._drop("it does not read")
        self._outbox.put(catalog)

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MOST_UNSENT)
        self._outbox.open(self._transport)
        self._side.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels what waits, since the front end is gone; what runs ends in memory that no one reads."""
        self._transport = None
        self._outbox.close()
        self._side.closed(self)
        self._templates.clear()
        _log.info("link-closed", frontend=self._frontend, calls=len(self.calls))
        self.calls.end()

    def eof_received(self) -> None:
        self.close()  # no reader is left for what is unsent

    def pause_writing(self) -> None:
        self._behind = True
        self.calls.outgoing.pause()

    def resume_writing(self) -> None:
        self._behind = False
        self.calls.outgoing.resume()
        self._listen()

    def _listen(self) -> None:
        """Unless it does not take its answers, or has said far more than was heard yet."""
        deaf = self._behind and self._outbox.unsent > MOST_UNREAD
        pause = deaf or len(self._unheard) > _MOST_UNHEARD
        if self._transport is None or pause == self._paused:
            return
        self._paused = pause
        (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def data_received(self, data: bytes) -> None:
        try:
            said = self._reader.feed(data)
        except ProtocolError as error:
            self._drop(str(error))
            return
        if self._unheard:  # those come first, in a turn that is planned
            self._unheard += said
            self._listen()
        else:
            self._hear(said)
            if self._behind:
                self._listen()

    def _go_on(self) -> None:
        said, self._unheard = self._unheard, []
        if said and self._transport is not None:
            self._hear(said)
            self._listen()

    def _hear(self, said: list[tuple[Fields, bytes]]) -> None:
        """So many in one turn: batches that end, and other front ends, are not to wait for all of a flood."""
        now, templates, take = monotonic(), self._templates, self.calls.take
        try:
            for fields, payload in said[:_AT_ONCE]:
                if fields[0] == records.SUBMIT:
                    take(fields, templates.get(fields[3]), now, payload)
                else:
                    if self.calls.taken:
                        self.calls.submit()
                    self._obey(fields, payload)
            if len(said) > _AT_ONCE:
                self._unheard = said[_AT_ONCE:]
                self._loop.call_soon(self._go_on)
                self._listen()
        except ProtocolError as error:
            self._drop(str(error))
        except Exception:
            _log.exception("link-failed", frontend=self._frontend)
            self._drop("it could not be read")
        finally:
            if self.calls.taken:  # also what came before a lie: it is cancelled with its link
                self.calls.submit()

    def _drop(self, why: str) -> None:
        _log.error("link-dropped", frontend=self._frontend, error=why)
        self.close()
        self._side.dropped(self._frontend)

    # What it asks for.

    def _obey(self, fields: Fields, payload: bytes) -> None:
        kind, number = fields[0], fields[2]
        if kind == records.TEMPLATE:
            if len(self._templates) >= records.MAX_TEMPLATES or number in self._templates:
                raise ProtocolError(f"template {number} is out of order")
            self._templates[number] = read_template(payload, self._side.entries.get)
        elif kind in (records.READY, records.CANCEL, records.PLACE):
            self._obey_of_call(kind, number, fields)
        elif kind == records.SOURCE:
            self.calls.sources.hear(number, payload)
        elif kind == records.SEEN:
            self.seen = max(self.seen, number)
            self._side.acknowledged()
        elif kind == records.ASK:
            self._ask(number, payload)
        elif kind == records.BOOKING:
            self.calls.groups.hear(number, payload, monotonic())
        elif kind == records.RESET:
            self._templates.clear()
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _obey_of_call(self, kind: int, number: int, fields: Fields) -> None:
        if kind == records.READY:
            self.calls.ready(number)
        elif kind == records.CANCEL:
            self.calls.cancel(number)
        else:
            self.calls.placed(number, fields[5], fields[6])

    def _ask(self, number: int, payload: bytes) -> None:
        """Questions are answered in whatever order they end."""
        if len(self._questions) >= records.MAX_ASKS:
            raise ProtocolError(f"more than {records.MAX_ASKS} open questions")
        task = self._loop.create_task(self._settle(number, payload))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _settle(self, number: int, payload: bytes) -> None:
        try:
            what, arguments = orjson.loads(payload)
            answer = orjson.dumps(await self._side.answer(what, arguments))
            status = records.OK
        except CarpoolError as error:
            status, answer = write_failure(error)
        except Exception as fault:
            _log.exception("ask-failed", frontend=self._frontend)
            status, answer = write_failure(CarpoolError(f"the engine failed: {fault}"))
        self._outbox.put(to_frontend(records.ANSWER, number, status, answer))


_SEEN_WITHIN_S = 5.0  # a front end that takes longer is stuck; it must not hold up an operator


class EngineSide:
    """Holds all links of one engine. `dropped` is called with the number of a front end that broke the
    protocol."""

    def __init__(
        self, engine: EngineHost, *, max_answer_bytes: int, dropped: Callable[[int], None] = lambda _: None
    ) -> None:
        self.engine = engine
        self.max_answer_bytes = max_answer_bytes
        self.dropped = dropped
        self.entries: Mapping[int, ModelEntry] = {}
        self.links: set[EngineLink] = set()
        self._arenas = 0
        self._seen = asyncio.Event()
        self._number = 0  # of the catalogue
        self._catalog = CatalogWriter(engine.catalog)
        engine.listen(self._publish, self.everyone_saw)
        self._publish(engine.catalog)

    async def attach(self, frontend: int, sock: socket.socket, arena: int) -> EngineLink:
        """Attaches a new front end: our end of a socket pair, and its arena's file, which is closed once
        mapped."""
        self._arenas += 1
        try:
            memory = map_memory(arena)
            self.engine.share(self._arenas, arena)
        finally:
            os.close(arena)
        loop = asyncio.get_running_loop()
        link = EngineLink(self, frontend, memory, self._arenas, loop)
        await loop.create_unix_connection(lambda: cast(asyncio.Protocol, link), sock=sock)
        return link

    def close(self) -> None:
        """End every link; a loop that is closed with one still open can hang."""
        for link in list(self.links):
            link.close()

    def opened(self, link: EngineLink) -> None:
        self.links.add(link)
        link.publish(self._catalog.whole())

    def closed(self, link: EngineLink) -> None:
        self.links.discard(link)
        self.engine.unshare(link.arena)
        self._seen.set()

    def acknowledged(self) -> None:
        self._seen.set()

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Ask the engine. If that changes the catalogue, every front end has it before the answer leaves."""
        before = self._number
        answer = await self.engine.ask(what, arguments)
        if self._number != before:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.everyone_saw(self._number), _SEEN_WITHIN_S)
        return answer

    async def everyone_saw(self, number: int) -> None:
        """Returns when this catalogue, or a later one, is in force at every front end that is connected."""
        while any(link.seen < number for link in self.links):
            self._seen.clear()
            await self._seen.wait()

    def _publish(self, catalog: Catalog) -> None:
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        self.entries = {entry.key: entry for entry in entries}
        self._number = catalog.number
        change = self._catalog.change(catalog)
        for link in list(self.links):
            link.publish(change)
