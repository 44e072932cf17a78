"""The front end's end of its link to one engine: calls become records, records become answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Protocol, cast

import orjson

from carpool.core.job import INFINITY, NO_SLACK, JobOrigin
from carpool.errors import CarpoolError, DeadlineExceeded, TooLarge, Unavailable
from carpool.frontend.engine_state import EngineState, stalled
from carpool.link.catalog import ModelEntry
from carpool.link.catalog_changes import CatalogReader
from carpool.link.engine_client import USUAL, Answer, Ask, Hears
from carpool.link.link_failures import read_failure
from carpool.link.records import (
    ADMITTED,
    AGAIN,
    ANSWER,
    ANSWERED,
    AS_DECLARED,
    ASK,
    BACKGROUND,
    BOOKING,
    BOOKING_NEWS,
    CANCEL,
    CATALOG,
    CATALOG_PIECE,
    COMING,
    DONE,
    FINISHES,
    GIVEN_UP,
    INLINE,
    LAST,
    LATEST,
    MAX_ASK_BYTES,
    MAX_ASKS,
    MAX_DETAILS_BYTES,
    MAX_PART_BYTES,
    MAX_PRIORITY,
    OK,
    PART,
    PARTS,
    PLACE,
    REACHES,
    READY,
    REGIONS,
    ROOM,
    ROOM_SIZE,
    SEEN,
    STEP,
    STEP_PART,
    SUBMIT,
    TO_ENGINE,
    TO_FRONTEND,
    WITH_STEPS,
    Fields,
    Outbox,
    ProtocolError,
    RecordReader,
    SaidSources,
    to_engine,
)
from carpool.link.senders import Sender
from carpool.link.step_times import read_steps
from carpool.link.templates import DeclaredOutputs, Template, Templates
from carpool.memory.arena import LARGE, ArenaSlot, Slot
from carpool.memory.layout import TensorPlace, end_of, read_places
from carpool.observe.logs import logger
from carpool.types import Tensor, Timing
from carpool.wire.head import write_options
from carpool.wire.v2 import RequestHead, TensorHead, bind

_log = logger("link")
_HIGH_WATER = 1 << 20  # some 16,000 submissions that the engine has not read: no use in adding to them
_LIST_BYTES = 32 << 20  # beside the tensors themselves: lists of outputs, catalogues, answers to questions
_DEADLINE_GRACE_S, _PROMISE_GRACE_S = 0.25, 1.0
_LONGEST_S = 1e9
_IN_VAIN_S = 0.05  # after background work was skipped
_BACKGROUND_PART = 16  # of the memory, at most, for all of it together
_LOST = "the engine stopped before it answered; retry"
_pack = TO_ENGINE.pack
_NO_TIMES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)


class Asks(Protocol):
    def __call__(self, ask: Ask, hears: Hears) -> RemoteCall: ...


class RemoteCall:
    """Implements `Call`. It holds the input slot until the engine has answered, the output slot until it is
    released, and both for a cancelled call until the engine says that nothing touches them.

    While inputs are still to come their slot is not the call's: it is given with `ready`.
    """

    __slots__ = ("coming", "expires", "hears", "in_parts", "link", "number", "output", "slot", "template")

    template: Template  # from here on set before it is submitted
    number: int

    def __init__(self, ask: Ask, hears: Hears) -> None:
        self.coming = ask.handling.ready_in is not None  # until it is let in
        self.slot = None if self.coming else ask.slot
        self.hears: Hears | None = hears  # None: no caller waits for it any more
        self.in_parts = ask.handling.in_parts
        self.output: ArenaSlot | None = None
        self.link: FrontLink | None = None  # while the engine has it
        self.expires = INFINITY  # when the client is answered without the engine

    def ready(self, slot: Slot) -> None:
        self.slot = slot
        if self.link is not None:
            self.link.say(READY, self)
        else:  # it was answered while its inputs were on their way
            slot.release()

    def cancel(self) -> None:
        wanted, self.hears = self.hears is not None, None
        if self.link is None:
            self.release()
        elif wanted:
            self.link.say(CANCEL, self)

    def give_up(self, error: CarpoolError) -> None:
        """Answer without the engine, which may still touch the memory: it is kept until the engine says that
        it is done with it, or is gone. Never raises."""
        hears, self.hears = self.hears, None
        if hears is not None and self.link is not None:
            self.link.say(CANCEL, self)
            try:
                hears.done(Answer(error=error))
            except Exception:
                _log.exception("answer-failed")

    def release(self) -> None:
        if self.link is not None:
            return  # the engine has it, and `finish` will release it
        if self.output is not None:
            self.output.release()
            self.output = None
        if self.slot is not None:
            self.slot.release()

    def finish(self, answer: Answer) -> None:
        """The engine is done with it. Never raises, since others wait behind it."""
        self.link = None
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()
        hears, self.hears = self.hears, None
        if hears is None:
            self.release()
            return
        try:
            hears.done(answer)
        except Exception:
            _log.exception("answer-failed")
            self.release()


class RemoteBooking:
    """Implements `RequestGroup`, over the link that it began on."""

    __slots__ = ("_link", "_number", "begun", "entry")

    def __init__(self, link: FrontLink | None, number: int, entry: ModelEntry) -> None:
        self._link = link
        self._number = number
        self.entry = entry
        self.begun = False

    def part(self, link: FrontLink, step: int) -> bytes:
        """Returns what goes before a step's request, on the link that has the rest of it."""
        if link is not self._link:
            raise Unavailable(_LOST, reason="engine-restarted")
        self.begun = True
        return STEP_PART.pack(self._number, self.entry.key, step)

    def reaches(self, step: int, images: int) -> None:
        if self._link is not None:
            self._link.say_of_booking(self._number, REACHES, step, images)

    def over(self, *, answered: bool) -> None:
        link, self._link = self._link, None
        if link is not None and self.begun:
            link.say_of_booking(self._number, ANSWERED if answered else GIVEN_UP)


class _BackgroundShare:
    """Limits the background work that this front end has at the engine of one link."""

    def __init__(self, arena_bytes: int) -> None:
        self._most = arena_bytes // _BACKGROUND_PART
        self._calls: list[RemoteCall] = []  # what the engine has of it
        self._in_vain: dict[int, float] = {}  # until when that for a model is skipped here

    def may_run(self, entry: ModelEntry, call: RemoteCall) -> bool:
        """Returns True unless the engine has just skipped one, or those that it has hold too much memory."""
        if self._in_vain.get(entry.key, 0.0) > monotonic():
            return False
        self._calls = [call for call in self._calls if call.link is not None]
        held = sum(len(call.slot.view) for call in (*self._calls, call) if call.slot is not None)
        if held > self._most:
            return False
        self._calls.append(call)
        return True

    def skipped_one(self, key: int) -> None:
        """Where the engine has no slack, it does not hear of all that it would skip."""
        self._in_vain[key] = monotonic() + _IN_VAIN_S

    def renew(self) -> None:
        """Another catalogue may leave more slack."""
        self._in_vain.clear()


class _Background:
    """Passes on the results of one background inference, and notes when the engine had no slack for it."""

    __slots__ = ("_hears", "_key", "_share")

    def __init__(self, share: _BackgroundShare, key: int, hears: Hears) -> None:
        self._share = share
        self._key = key
        self._hears = hears

    def admitted(self) -> None:
        self._hears.admitted()

    def part(self, answer: Answer) -> None:
        self._hears.part(answer)

    def done(self, answer: Answer) -> None:
        if answer.error is not None and answer.error.reason == NO_SLACK and answer.sent > 0.0:
            self._share.skipped_one(self._key)
        self._hears.done(answer)


class FrontLink:
    """Lives as long as the engine at its other end."""

    def __init__(
        self,
        state: EngineState,
        opened: Callable[[FrontLink], None],
        lost: Callable[[FrontLink, str | None], None],
        loop: asyncio.AbstractEventLoop,
        max_answer_bytes: int,
    ) -> None:
        """`lost` is called once, with what the engine did wrong; without that, it has died."""
        self._state = state
        self._opened, self._lost = opened, lost
        self._background = _BackgroundShare(state.arena.size)
        self._loop = loop
        self._memory = memoryview(state.arena.memory)
        self._transport: asyncio.Transport | None = None
        self._reader = RecordReader(TO_FRONTEND, max_answer_bytes + _LIST_BYTES)
        self._outbox = Outbox(loop, self._fail)
        self._catalog = CatalogReader()
        self.templates = Templates(self._outbox.put)
        self._sources = SaidSources(self._outbox.put)
        self.writable = True
        self._calls: dict[int, RemoteCall] = {}
        self._asks: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._error: str | None = None

    # Towards the engine.

    def infer(self, ask: Ask, hears: Hears) -> RemoteCall:
        """Does the same as `EngineClient.infer`."""
        entry, head, slot, tail, handling = ask.entry, ask.head, ask.slot, ask.tail, ask.handling
        state, background = self._state, handling.background
        call = RemoteCall(ask, _Background(self._background, entry.key, hears) if background else hears)
        if not self.writable or state.stalls:
            return failed_call(self._loop, call, state.trouble())
        if background and not self._background.may_run(entry, call):
            from carpool.core.refusal_words import skipped

            return failed_call(self._loop, call, skipped(entry.name))
        if type(slot) is not ArenaSlot:
            return failed_call(self._loop, call, _not_in_a_slot())
        try:
            if state.known.get(entry.key) is not entry or (
                entry.traits.decoupled and not handling.in_parts and not entry.traits.writes
            ):
                entry = state.current(ask)
            template = self.templates.find(entry, head) or self._learn(entry, head)
            details = _details(head) if entry.signature.told else b""
            booked = handling.booking
            booking = b"" if booked is None else cast(RemoteBooking, booked).part(self, handling.step)
            if template.extent > len(slot.view) - tail:
                raise _not_in_a_slot()
            # Without room for its outputs they come over the socket, which is slower but still an answer;
            # those that are known to be long have room from the beginning, or are rejected.
            size, certain = template.capacity, template.places is not None
            short = size <= LARGE and slot.answer is None
            find = (
                state.arena.allocate
                if short
                else partial(state.answer_slot, slot, _client(hears), certain=certain)
            )
            output = None if handling.in_parts else find(size)
        except CarpoolError as error:
            return failed_call(self._loop, call, error)
        call.template, call.output = template, output
        try:
            self.submit(call, ask, details, booking)
            if booked is not None:  # whose promise holds
                call.expires = expiry(booked.entry, ask.arrived, ask.deadline)
        except BaseException:
            if call.output is not None:
                call.output.release()
            raise
        return call

    def _learn(self, entry: ModelEntry, head: RequestHead) -> Template:
        if any(tensor.data is not None or tensor.shared_memory is not None for tensor in head.inputs):
            raise CarpoolError("tensors must be passed in a slot")
        return self.templates.learn(entry, head)

    def submit(self, call: RemoteCall, ask: Ask, details: bytes, booking: bytes) -> None:
        """Nothing has happened if this raises. `booking` says of which run it is a step."""
        head, sender, handling, deadline = ask.head, ask.sender, ask.handling, ask.deadline
        self._number = number = self._number + 1
        output = call.output
        at, capacity = (0, 0) if output is None else (output.offset, output.capacity)
        template = call.template
        call.expires = expiry(template.entry, ask.arrived, deadline)
        flags = (LATEST if sender.latest else 0) | (AGAIN if sender.again else 0)
        coming = 0.0
        if handling is not USUAL:
            flags |= PARTS if handling.in_parts else 0
            if handling.ready_in is not None:
                flags |= COMING
                coming = min(handling.ready_in, _LONGEST_S)
            if handling.background:
                flags |= BACKGROUND
                call.expires = INFINITY  # the engine has a time for it
        if head.regions:  # where the inputs are that the engine is to fetch
            flags |= REGIONS
            details = head.regions + details
        if booking:
            flags |= STEP
            details = booking + details
        # As `_source`, which is asked for those that are new.
        source = self._sources.known.get((sender.source, sender.holder, sender.weight, sender.payer), -1)
        if source < 0:
            source = self._source(sender)
        options = head.options
        timeout, priority = options.timeout, max(options.priority, sender.priority)
        record = _pack(
            SUBMIT,
            len(details),
            number,
            template.number,
            cast(ArenaSlot, ask.slot).offset + ask.tail,
            at,
            capacity,
            ask.arrived,
            deadline,
            monotonic(),
            template.outside.seconds,
            min(timeout, _LONGEST_S) if timeout else 0.0,
            coming,
            priority if priority < MAX_PRIORITY else MAX_PRIORITY,
            source,
            flags,
        )
        say = self._outbox.put if self._calls else self._outbox.send  # the only call is sent at once
        say(record + details if details else record)
        call.number, call.link = number, self
        self._calls[number] = call

    def _source(self, sender: Sender) -> int:
        return self._sources.number(JobOrigin(sender.source, sender.holder, sender.weight, sender.payer))

    def begin_booking(self, entry: ModelEntry) -> RemoteBooking:
        self._number += 1
        return RemoteBooking(self, self._number, entry)

    def say_of_booking(self, number: int, what: int, step: int = 0, images: int = 0) -> None:
        if self._transport is not None:
            self._outbox.put(to_engine(BOOKING, number, BOOKING_NEWS.pack(what, step, images)))

    def say(self, kind: int, call: RemoteCall) -> None:
        try:
            say = self._outbox.put if len(self._calls) > 1 else self._outbox.send  # it is alone
            say(to_engine(kind, call.number))
        except Exception as error:  # the engine would hold its slots for ever
            _log.exception("link-failed")
            self._fail(str(error))

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if len(self._asks) >= MAX_ASKS:
            raise Unavailable("too many queries are open already", reason="overload")
        question = orjson.dumps((what, arguments))
        if len(question) > MAX_ASK_BYTES:  # the engine would give up the link
            raise TooLarge(f"{what} takes {len(question)} bytes, more than the limit of {MAX_ASK_BYTES}")
        self._number = number = self._number + 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asks[number] = future  # until it is answered, even if no caller waits: the engine counts too
        self._outbox.put(to_engine(ASK, number, question))
        return await future

    def look_at_time(self, now: float, *, hopeless: bool) -> None:
        """Answers the calls whose time is up; all calls, if the engine is not expected to recover."""
        if hopeless:
            for call in [call for call in self._calls.values() if call.hears is not None]:
                call.give_up(stalled())
            for future in self._asks.values():
                if not future.done():
                    future.set_exception(stalled())
            return
        for call in [call for call in self._calls.values() if call.expires < now and call.hears is not None]:
            late = f"{call.template.entry.name} has not answered within its time limit"
            call.give_up(DeadlineExceeded(late, reason="deadline"))

    def close(self) -> None:
        self._outbox.close()
        if self._transport is not None:
            self._transport.abort()

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._outbox.open(self._transport)
        self._opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Answers every call that waits with one clear error. The engine no longer touches the memory."""
        self._transport = None
        self._outbox.close()
        self._lost(self, self._error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            try:
                call.finish(_lost())
            except Exception:  # the others wait as well
                _log.exception("answer-failed")
        asks, self._asks = self._asks, {}
        for future in asks.values():
            if not future.done():
                future.set_exception(Unavailable(_LOST, reason="engine-restarted"))

    def eof_received(self) -> None:
        self.close()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def data_received(self, data: bytes) -> None:
        try:
            for fields, payload in self._reader.feed(data):
                if fields[0] == DONE:
                    self._done(fields, payload)
                elif fields[0] == ADMITTED:
                    self._admitted(fields[2])
                elif fields[0] == PART:
                    self._part(fields, payload)
                else:
                    self._obey(fields, payload)
        except ProtocolError as error:
            self._fail(str(error))
        except Exception as fault:
            _log.exception("link-failed")
            self._fail(str(fault))

    def _fail(self, why: str) -> None:
        self._error = why
        self.close()

    # From the engine.

    def _done(self, fields: Fields, payload: bytes) -> None:
        _, _, number, status, form, batch, queue, input_s, infer_s, output_s, sent, run = fields
        call = self._calls.pop(number, None)
        if call is None:
            raise ProtocolError(f"a response to call {number}, which is not open")
        answer = Answer(timing=Timing(queue, input_s, infer_s, output_s, batch, number=run), sent=sent)
        if sent > 0.0:
            answer.outside = call.template.outside
        if call.hears is not None:
            try:
                if status != OK:
                    answer.error = read_failure(status, payload, call.template.entry.name)
                else:
                    if form & WITH_STEPS:
                        answer.timing, payload = read_steps(answer.timing, payload)
                        form &= ~WITH_STEPS
                    template, output = call.template, call.output
                    if form != AS_DECLARED:
                        answer.outputs = self._listed(call, form, payload)
                    elif template.places is None or output is None:
                        raise ProtocolError(f"outputs of call {number} where there are none")
                    else:
                        answer.outputs = DeclaredOutputs(template, self._memory, output.offset)
            except CarpoolError as error:
                answer.error = error
            except Exception:
                call.finish(_lost())
                raise
        call.finish(answer)

    def _part(self, fields: Fields, payload: bytes) -> None:
        """Takes one answer of several. One that was on its way when its call was given up is dropped."""
        number, finish, last, sent = fields[2], fields[4], fields[5], fields[10]
        call = self._calls.get(number)
        if call is None or not call.in_parts:
            raise ProtocolError(f"a part of call {number}, which waits for none")
        if finish >= len(FINISHES) or last > LAST or len(payload) > MAX_PART_BYTES:
            raise ProtocolError(f"a part of {len(payload)} bytes that ends as {finish}, {last}")
        hears = call.hears
        if hears is None:
            return
        try:
            outputs = _inline(call, payload)
        except CarpoolError as error:
            call.give_up(error)
            return
        try:
            hears.part(Answer(outputs, sent=sent, finish=FINISHES[finish], last=bool(last)))
        except Exception:
            _log.exception("answer-failed")
            call.give_up(_failed())

    def _admitted(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            raise ProtocolError(f"call {number} is let in, which is not open")
        coming, call.coming = call.coming, False
        if coming and call.hears is not None:
            try:
                call.hears.admitted()
            except Exception:  # its own inputs do not come, and all others do
                _log.exception("answer-failed")
                call.give_up(_failed())

    def _listed(self, call: RemoteCall, form: int, payload: bytes) -> Sequence[Tensor]:
        if form == INLINE:
            outputs = _inline(call, payload)
            size = len(payload) - 4 - int.from_bytes(payload[:4], "little")
            call.template.capacity = max(call.template.capacity, size)  # for the next one
            return outputs
        places = read_places(payload)
        room = 0 if call.output is None else call.output.capacity
        start = 0 if call.output is None else call.output.offset
        return _bound(call, places, self._memory[start : start + room])

    def _find_room(self, number: int, payload: bytes) -> None:
        """An answer is there, and does not fit its slot: nothing is written to that any more."""
        call = self._calls.get(number)
        if call is None or call.in_parts or len(payload) != ROOM_SIZE.size:
            raise ProtocolError(f"an answer of call {number}, which waits for none")
        size: int = ROOM_SIZE.unpack(payload)[0]
        output, call.output = call.output, None
        if output is not None:
            output.release()
        if call.hears is not None:
            call.template.capacity = max(call.template.capacity, size)  # for the next one
            with suppress(Unavailable):
                call.output = self._state.answer_slot(None, _client(call.hears), size)
        output = call.output
        at, capacity = (0, 0) if output is None else (output.offset, output.capacity)
        self._outbox.put(_pack(PLACE, 0, number, 0, 0, at, capacity, *_NO_TIMES))

    def _obey(self, fields: Fields, payload: bytes) -> None:
        kind, number, status = fields[0], fields[2], fields[3]
        if kind == ROOM:
            self._find_room(number, payload)
        elif kind == CATALOG:
            self._background.renew()
            self._state.renewed(self._catalog.end(number, payload))
            self._outbox.put(to_engine(SEEN, number))
        elif kind == CATALOG_PIECE:
            self._catalog.piece(payload)
        elif kind == ANSWER:
            future = self._asks.pop(number, None)
            if future is None:
                raise ProtocolError(f"an answer to question {number}, which is not open")
            if not future.done():
                _settle(future, status, payload)
        else:
            raise ProtocolError(f"a record of kind {kind}")


def expiry(entry: ModelEntry, arrived: float, deadline: float) -> float:
    """Returns when the front end answers by itself. The engine is the one to say that a deadline passed, and
    an answer that comes a little late is worth more than none: this is for an engine or a batch that hangs.
    Many answers to one request may take as long as they do."""
    own, slo = deadline + _DEADLINE_GRACE_S, entry.batching.slo
    if slo is None or entry.traits.decoupled:
        return own
    return min(own, arrived + slo + max(slo, _PROMISE_GRACE_S))


def failed_call(loop: asyncio.AbstractEventLoop, call: RemoteCall, error: CarpoolError) -> RemoteCall:
    """Answers a call with an error, after it was returned."""
    loop.call_soon(call.finish, Answer(error=error))
    return call


def _not_in_a_slot() -> CarpoolError:
    return CarpoolError("the tensors are not in a slot of this front end")


def _client(hears: Hears) -> str:
    """Returns whose account a request is charged to; empty for what the server asks itself."""
    client = getattr(hears, "client", "")
    return client if isinstance(client, str) else ""


def _failed() -> CarpoolError:
    return CarpoolError("the server failed on a response of this request")


def _lost() -> Answer:
    return Answer(error=Unavailable(_LOST, reason="engine-restarted"))


def _settle(future: asyncio.Future[Any], status: int, payload: bytes) -> None:
    if status == OK:
        future.set_result(orjson.loads(payload))
    else:
        future.set_exception(read_failure(status, payload))


def _inline(call: RemoteCall, payload: bytes) -> Sequence[Tensor]:
    """Reads outputs in a record: the length of their list, the list, their bytes."""
    length = 4 + int.from_bytes(payload[:4], "little")
    return _bound(call, read_places(payload[4:length]), memoryview(payload)[length:])


def _bound(call: RemoteCall, places: Sequence[TensorPlace], memory: memoryview) -> Sequence[Tensor]:
    if end_of(places) > len(memory):
        raise ProtocolError(f"outputs of call {call.number} reach beyond their slot")
    return bind([_head(place) for place in places], memory, "output")


def _head(place: TensorPlace) -> TensorHead:
    return TensorHead(place.name, place.datatype, place.shape, place.offset, place.size)


def _details(head: RequestHead) -> bytes:
    """Returns the details for a model that receives them; b"" where the request has none."""
    options = write_options(head.options)
    if not (head.id or options):
        return b""
    details = orjson.dumps({"id": head.id, "parameters": options})
    if len(details) > MAX_DETAILS_BYTES:
        raise TooLarge(f"the id and the parameters take more than the limit of {MAX_DETAILS_BYTES} bytes")
    return details
