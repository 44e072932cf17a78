"""Carries one request from its content to its answer, whatever protocol it comes over.

    READING ──► OFFERED ──► RUNNING ──► ANSWERING ──► OVER
       │           │           │            │           ▲
       └───────────┴───────────┴────────────┴───────────┘   it failed or was rejected, or its client left

A protocol reads a request and says where its tensors lie: in the slot that its body came into
(`offer_in_place`), in pieces (`offer_pieces`), or still in pictures (`offer_pictures`). What comes of it goes
to the protocol's `RequestReply`. The request owns slot, call and content, and gives each back once.

OFFERED is a request whose tensors are still to come: the engine counts it, and nothing is decoded for it
before the engine has let it in. A request in RUNNING waits or runs: only the engine knows which.

Where its lane has wrappers, the request passes them on its way in; the innermost is `place`. A wrapper may
answer (`answer_from`, `fail`), or `listen` and call what it wraps. On the way back every listener gets the
answer once, the innermost first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

from carpool.compiling import mypyc_attr
from carpool.errors import CarpoolError, Unavailable, Unsupported, without_stack
from carpool.frontend.calls.client_memory import names_regions
from carpool.frontend.calls.lane import Infers, LooksEarly
from carpool.frontend.calls.packing import begin_filling
from carpool.frontend.calls.request_facts import (
    ANSWERING,
    NO_REPLY,
    OFFERED,
    OVER,
    READING,
    RUNNING,
    RequestFacts,
    RequestReply,
    RequestService,
)
from carpool.frontend.calls.thread_errors import explained, stopping
from carpool.frontend.clients.fair_threads import ThreadWork
from carpool.link.catalog import ModelEntry
from carpool.link.contents import Content, Pieces, Waiting
from carpool.link.engine_client import IN_PARTS, USUAL, Answer, Ask, Call, Handling
from carpool.link.senders import Sender
from carpool.link.step_times import Times
from carpool.memory.arena import LARGE, Slot
from carpool.memory.layout import answer_size
from carpool.observe.columns import DECODE_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import Row
from carpool.types import RequestOptions, Timing
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.strings import Between, go_on
from carpool.wire.v2 import Buffer, RequestHead

if TYPE_CHECKING:
    from carpool.frontend.pictures.sent_pictures import SentPictures
    from carpool.frontend.pictures.workers import PictureDecoding

T = TypeVar("T")

_NOT_READ = RequestHead("", (), (), RequestOptions(), True, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Listener:
    """Hears what becomes of a request that has passed a wrapper."""

    __slots__ = ()

    def answered(self, request: Request, answer: Answer) -> Answer | None:
        """Returns the answer. None: the listener has taken it, and the request goes on: it was sent in once
        more (`go`), or is answered later."""
        return answer

    def left(self, request: Request) -> bool:
        """The client has left, or another answer was found: what the listener holds is given back here. True:
        the request is computed all the same, since others wait for it."""
        return False


Infer: TypeAlias = "Callable[[Request], None]"
"""Answers a request, or wraps what does."""


def places_at(engine: Infers) -> Infer:
    """Returns the innermost of a chain: it places requests at this engine."""

    def place(request: Request) -> None:
        request.engine = engine
        request.place()

    return place


class ModelLane(NamedTuple):
    """Describes what the requests for one version pass. A lane is made once for each catalogue, and a route
    keeps it in the entry's place, so that no request looks anything up."""

    entry: ModelEntry
    row: Row  # this process's counters of the version
    infer: Infer | None  # the wrappers of the version; None: it has none, and requests place themselves
    holds_back: Callable[[], bool] | None = None
    """While this says so, a request that the gate would reject at its head is read all the same, since it may
    be answered without the engine."""
    divided: bool = False  # a request that finds this version without naming it has a `Choice`
    early: LooksEarly | None = None  # of the outermost wrapper, which may answer pictures that are not read


class LaneService(RequestService):
    """Knows the lanes, too."""

    lane: Callable[[ModelEntry], ModelLane]
    """Returns what requests for this version pass."""


class Request(RequestFacts):
    """Represents one request. All of it is called in the loop's thread. It has no subclasses: protocols and
    wrappers hold a request. While `slot` is not None, the request owns it; else a thread that writes to it
    does, or the call.
    """

    __slots__ = ("_after", "_call", "_decoding", "_listeners", "engine", "infer", "service")

    infer: Infer | None  # with `entry` and `row`: its lane

    def __init__(
        self,
        service: LaneService,
        reply: RequestReply,
        sender: Sender,
        deadline: float,
        arrived: float = 0.0,
    ) -> None:
        self.service = service
        self.reply = reply
        self.engine: Infers = service.engine
        self.row = None
        self.sender = sender
        self.client = sender.holder
        self.deadline = deadline
        self.arrived = self.offered_at = arrived
        self.unread = self.done_at = 0.0
        self.head = _NOT_READ
        self.state = READING
        self.heard = False
        self.slot = self.content = self.pictures = self.choice = None
        self.outlets = self.note = self.encoded = self.thread_work = None
        self.refuses_many, self.more_fields = "", b""
        self.placed = {}
        self._call: Call | None = None
        self._decoding: PictureDecoding | None = None
        self._listeners: list[Listener] | None = None
        self._after: Callable[[Answer], None] | None = None

    def loaded(self, now: float) -> None:
        """The model was loaded for it: what that took is not counted towards its SLO."""
        self.arrived = self.offered_at = now

    def enter(self, lane: ModelLane) -> None:
        """Goes on in this lane: of a newer catalogue, or of another version."""
        self.entry, self.row, self.infer = lane[:3]

    # ── what a protocol has read ──

    def offer_in_place(self, head: RequestHead, tail: int) -> None:
        """The tensors are in the slot, behind `tail` bytes."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        slot = self.slot
        assert slot is not None
        if self.infer is not None:
            self.slot = self.outlets = None
            self._pass(self.infer, head, Content(slot, tail))
            return
        self._enter(head)
        self._offer(head, slot, tail)

    def offer_pieces(self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool) -> Waiting:
        """The tensors are here, or in the client's own memory. Without `checked`, it is still to be seen
        whether BYTES and BOOL are such. Returns what it waits for, if it is not offered yet."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        if self.infer is None:
            return self.place_pieces(head, pieces, checked=checked)
        content = Pieces(pieces, checked=checked)
        self._pass(self.infer, head, content)
        return content.checking

    def offer_pictures(self, pictures: SentPictures) -> None:
        """One may lie in a slot already, which is the request's from here on."""
        if self.infer is None:
            self.place_pictures(pictures)
        else:
            self._pass(self.infer, pictures.asked, pictures)

    def wants_outputs(self, head: RequestHead) -> None:
        """Finds the places of outputs that are wanted in the client's own memory."""
        self.outlets = self.service.memory.outlets(head.outputs, self.sender.holder)

    def _pass(self, infer: Infer, head: RequestHead, content: Content) -> None:
        self.content = content
        self._enter(head, gate=False)
        self.go(infer)

    # ── what a wrapper does ──

    def listen(self, listener: Listener) -> None:
        if self._listeners is None:
            self._listeners = []
        self._listeners.append(listener)

    def go(self, infer: Infer) -> None:
        """Passes this wrapper and what is inside of it, for the first time or once more. What that raises is
        an answer, which passes those who listen."""
        try:
            infer(self)
        except CarpoolError as error:
            self._take_back()
            self.fail(error)
        except Exception as fault:
            self.fail_unexpectedly(fault)

    def recall(self, listener: Listener) -> None:
        """Takes it back from the engine and from those inside of this listener, which hears no more either:
        what comes of it so far is not waited for."""
        listeners = self._listeners or []
        while listener in listeners:
            inside = listeners.pop()
            if inside is not listener:
                inside.left(self)
        self._take_back()
        self.state = RUNNING

    def answer_from(self, listener: Listener, answer: Answer) -> None:
        """Answers in the place of what is inside of this listener."""
        self.recall(listener)
        self.state = ANSWERING
        self.done_at = self.offered_at = monotonic()
        self._finish(answer)

    def after(self, act: Callable[[Answer], None]) -> None:
        """Acts when the answer was written, while the outputs are still there. One wrapper may want this."""
        self._after = act

    def fail(self, error: CarpoolError) -> None:
        """Answers with an error."""
        if self._listeners:
            self._finish(Answer(error=error))
        else:
            self.end_with(error)

    # ── into the engine ──

    def place(self) -> None:
        """The innermost: puts the content into a slot, or takes the one where its tensors are still."""
        content, head = self.content, self.head
        assert content is not None
        slot = content.take_held()
        if slot is None:
            content.offer(self, head)
            return
        self._enter(head, gate=False)  # once more: another version had it before
        self.pictures = cast("SentPictures", content) if content.is_pictures else None
        self.slot = slot
        assert content.offered_as is not None
        self._offer(content.offered_as, slot, content.tail)

    def _enter(self, head: RequestHead, *, gate: bool = True) -> None:
        """It is known what is asked: until when, and for whom. Raises the gate's rejection, before more is
        done for it: the engine, which all wait for, need not hear of a request that would be late."""
        self.head = head
        options, sender, entry = head.options, self.sender, self.entry
        if entry.traits.decoupled and self.refuses_many and not entry.traits.writes:
            raise Unsupported(self.refuses_many)
        if options is not DEFAULT_OPTIONS or sender.latest:
            self.sender = sender = sender.with_options(options)
            if options.timeout is not None and entry.batching.mode != "knobs":
                self.deadline = min(self.deadline, self.arrived + options.timeout)
        if gate and not (options.priority or sender.priority):  # else only the engine can say
            refusal = self.service.engine.refuses(entry, self.deadline, monotonic(), sender)
            if refusal is not None:
                raise refusal

    def place_in_slot(self, head: RequestHead, content: Content) -> None:
        self._enter(head)
        if not head.plain:
            self.wants_outputs(head)
        self.slot = slot = content.take()
        self._offer(head, slot, content.tail)

    def place_pieces(self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool) -> Waiting:
        self._enter(head)
        memory = self.service.memory
        by_engine = self.entry.traits.fetches and not (self.content is not None and self.content.copied)
        fetch = None
        if not head.plain and names_regions(head):
            fetch = memory.fetch(head, self.sender.holder, by_engine=by_engine)
        placed, size = head, head.tail_size
        if fetch is not None:
            placed, self.outlets, size = fetch.head, fetch.outlets, fetch.size
        engine = self.service.engine
        if size > LARGE:
            answer = answer_size(self.entry.signature, size)
            slot = self.slot = engine.large_slot(size, answer, self.client, _no_room)
        else:
            slot = self.slot = engine.slot(size)
        filling = begin_filling(head, pieces, fetch, slot.view, "" if checked else self.entry.name)
        if filling is None:
            self._offer(placed, slot, 0)
            return None
        return self.aside(*filling, lambda _: self._offer(placed, slot, 0), slot)

    def _with_headers(self, head: RequestHead) -> RequestHead:
        """Returns the head with the headers that its model receives."""
        forward = self.service.forward
        if forward is None or not self.entry.signature.told:
            return head
        return forward.added(head, self.reply.fields())

    def place_pictures(self, pictures: SentPictures) -> None:
        """Offers pictures at once, which are decoded when they are let in. Or as a file, for the model's
        device to decode; it may be in a slot already."""
        service, entry = self.service, self.entry
        self._enter(pictures.asked, gate=not pictures.on_route)
        if pictures.asked.outputs:
            self.wants_outputs(pictures.asked)
        self.pictures = pictures
        for sees in service.see_pictures:
            sees(entry, pictures, pictures.slot)
        now = monotonic()
        if pictures.is_file:
            if pictures.on_route:
                service.pictures.offers(entry, now)
            self.slot = slot = pictures.slot_of_file(service.engine)
            self._offer(pictures.head, slot, 0)
            return
        slo = entry.batching.slo  # as `entry.due`, without a call
        until = self.deadline if slo is None else min(self.deadline, self.arrived + slo)
        given = self.deadline, until, now, self.sender, self.client
        self._decoding = decoding = service.pictures.decoding(entry, pictures, *given)
        slot = service.engine.slot(pictures.size)
        try:
            self._offer(pictures.head, slot, 0, decoding.ready_in)
        finally:
            self.slot = slot  # until its tensors are in it
        self.state = OFFERED

    def _offer(self, head: RequestHead, slot: Slot, tail: int, ready_in: float | None = None) -> None:
        """Goes the one way to the engine."""
        self.offered_at = monotonic()
        entry, pictures = self.entry, self.pictures
        if entry.signature.told:
            head = self.reply.named(head)
            if pictures is not None:
                head = self._with_headers(head)
        in_parts = entry.traits.decoupled and entry.traits.in_parts(self.refuses_many)
        if pictures is not None:
            handling = Handling(ready_in, in_parts, content=pictures)
        else:
            handling = IN_PARTS if in_parts else USUAL
        # By position: names would take as long again.
        ask = Ask(entry, head, slot, tail, self.arrived, self.deadline, self.sender, handling)
        self._call = self.engine.infer(ask, self)
        self.slot = None
        self.heard = True
        self.state = RUNNING
        if self.content is not None and ready_in is None:
            self.content.went(head, slot, tail)

    # ── threads ──

    def aside(
        self,
        takes_long: bool,
        work: Callable[[Between], T],
        then: Callable[[T], object],
        slot: Slot | None = None,
    ) -> asyncio.Future[T] | None:
        """Do what would hold up the loop in a thread, charged to the client, then go on. The thread has the
        slot while it works."""
        if not takes_long:
            then(work(go_on))
            return None
        if slot is not None:
            self.slot = None
        self.thread_work = in_thread = self.service.fair_threads.begin(self.client, work)
        in_thread.done.add_done_callback(partial(self._came_back, then, slot, in_thread))
        return in_thread.done

    def _came_back(
        self, then: Callable[[T], object], slot: Slot | None, which: ThreadWork[T], work: asyncio.Future[T]
    ) -> None:
        error = stopping() if work.cancelled() else work.exception()
        if self.state == OVER or self.thread_work is not which:  # or it was recalled
            if slot is not None:
                slot.release()
            return
        self.thread_work = None
        self.slot = slot

        def go_on(_: Request) -> None:
            if error is not None:
                raise error
            self.renew()
            then(work.result())

        self.go(go_on)

    def renew(self) -> None:
        """Threads take their time: meanwhile a model may have been replaced by one that takes the same."""
        with contextlib.suppress(CarpoolError):
            entry = self.reply.current() if self.content is None else self._same_version()
            if entry.signature.is_like(self.entry.signature):
                self.enter(self.service.lane(entry))

    def _same_version(self) -> ModelEntry:
        """Wrappers know it as a request for this version, whatever would be chosen now."""
        entry = self.service.engine.catalog.entries.get((self.entry.name, self.entry.version))
        if entry is None:
            raise Unavailable(f"model '{self.entry.name}' is not loaded any more")
        return entry

    def admitted(self) -> None:
        """The engine has let it in: now there is sense in decoding. The thread has the slot from here on."""
        if self.state != OFFERED:
            return
        decoding, pictures, slot, call = self._decoding, self.pictures, self.slot, self._call
        if decoding is not None and pictures is not None and slot is not None and call is not None:
            self.slot = None
            try:
                decoding.begin(slot, pictures.prepare, partial(self._decoded, slot, call))
            except Exception as fault:
                slot.release()
                self.fail_unexpectedly(fault)

    def _decoded(self, slot: Slot, call: Call, seconds: float | None, error: BaseException | None) -> None:
        """The thread is done with the slot, which goes over to the call that it was decoded for, with the
        tensors in it. By now that may be over, and the request may have another."""
        decoding = self._decoding
        if self.state != OFFERED or self._call is not call or decoding is None:
            slot.release()
            return
        self._decoding = None  # it knows us too: let go, or only the collector could free both
        if seconds is None:
            self._take_back()
            slot.release()
            self.fail(explained(error, self.entry.name))
            return
        try:
            self.offered_at = self.service.pictures.workers.came_true(decoding)
            self.state = RUNNING
            assert self.row is not None
            self.row.observe(DECODE_SECONDS, seconds)
            if self.content is not None and self.pictures is not None:
                self.content.went(self.pictures.head, slot, 0)
        except Exception as fault:
            slot.release()
            self.fail_unexpectedly(fault)
            return
        call.ready(slot)

    # ── the answer ──

    def part(self, answer: Answer) -> None:
        """Takes one answer of several."""
        try:
            if self.state != OVER:
                if self.pictures is not None:
                    answer.text = self.pictures.add(answer)
                self.reply.part(self, answer)
        except CarpoolError as error:  # it could not be written: no more are wanted
            self._take_back()
            self.fail(error)
        except Exception as fault:
            self.fail_unexpectedly(fault)

    def done(self, answer: Answer) -> None:
        """Never raises: the engine says nothing more of it."""
        self.state = ANSWERING
        self.done_at = monotonic()
        if self.content is not None:
            self.content.gone = True
        if self.pictures is None and self.outlets is None:
            for output in self.head.outputs:
                if output.classification:
                    break
            else:
                self._finish(answer)
                return
        from carpool.frontend.calls.answer_work import AnswerWork  # which most servers of tensors never need

        AnswerWork(self.service, self, answer, self._finish).go_on()

    def _finish(self, answer: Answer) -> None:
        """Answers, and gives back what the call holds, unless the answer is still being sent from there.
        Never raises, since others wait behind it."""
        call, self._call = self._call, None  # it knows us too
        taken = False
        try:
            if self.state == OVER:
                return  # the client left while a thread worked
            answer.held = call
            passed = self._hear(answer) if self._listeners else answer
            if passed is None:
                return
            after, self._after = self._after, None
            try:
                if passed.error is not None:
                    self.end_with(passed.error, passed.timing if self.heard else None)
                else:
                    self.reply.answer(self, passed)
                    if not passed.taken:
                        self.written(passed)
            finally:
                if after is not None:
                    after(passed)
            if passed.outside is not None:  # how long its client waited beyond what the engine sees
                now = monotonic()
                passed.outside.seen(self.unread + now - passed.sent, now)
            taken = passed.taken
        except CarpoolError as error:
            self.end_with(error, answer.timing if self.heard else None)
        except Exception as fault:
            self.fail_unexpectedly(fault)
        finally:
            if call is not None and not taken:
                call.release()

    def _hear(self, answer: Answer) -> Answer | None:
        """Every listener gets the answer once, the innermost first; None: one of them has taken it."""
        listeners = self._listeners
        passed: Answer | None = answer
        while listeners and passed is not None:
            try:
                passed = listeners.pop().answered(self, passed)
            except CarpoolError as error:
                passed = Answer(error=error)
            except Exception as fault:
                passed = Answer(error=self._unexpected(fault))
        if passed is None and self.state == ANSWERING:
            self.state = RUNNING
        return passed

    def written(self, answer: Answer) -> None:
        """The answer is out, or its head if it is long."""
        self.state = OVER
        if self.reply is not NO_REPLY:
            now = monotonic()
            times = self.offered_at, self.done_at, now
            for observer in self.service.observers:
                observer.answered(self, answer, times)
            assert self.row is not None
            self.row.observe(REQUEST_SECONDS, now - self.arrived)
            self.reply = NO_REPLY  # which knows us, too
        self.outlets = self.pictures = None
        if self.content is not None:
            self._drop_content()

    def times(self, timing: Timing) -> Times:
        """Returns the times with the front end's own seconds around those of the engine."""
        before, after = self.offered_at - self.arrived, monotonic() - self.done_at
        return Times(
            (before + timing.input) * 1e3,
            timing.queue * 1e3,
            timing.infer * 1e3,
            (after + timing.output) * 1e3,
            timing.batch,
        )

    # ── the other ends ──

    def fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach the caller, which serves others too."""
        self._take_back()
        self.fail(self._unexpected(error))

    def _unexpected(self, error: Exception) -> CarpoolError:
        self.service.log.error("request-failed", exc_info=error, **self.reply.facts(self))
        without_stack(error)
        return CarpoolError(f"the server failed on this request: {type(error).__name__}")

    def end_with(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """Answers with an error, which no listener hears of any more, and gives back everything."""
        state, self.state = self.state, OVER
        if state == OVER:
            return
        self.give_back()
        if self.reply is not NO_REPLY:  # else its client has left
            times = None if timing is None else self.times(timing)
            self.service.answer_error(self, error, timing, times)
            self.reply = NO_REPLY

    def leave(self) -> None:
        """The client has gone: no answer is wanted any more, and what has not begun is not done, unless
        others wait for it."""
        if self.state == OVER or self.reply is NO_REPLY:
            return
        listeners, self._listeners = self._listeners or [], None
        for number, listener in enumerate(listeners):
            if listener.left(self):
                self._listeners = listeners[number:]
                break
        if self._listeners is None:
            state, self.state = self.state, OVER
            self._stop_aside()
            if state != ANSWERING:  # else a thread has the outputs, and `_finish` releases them
                self._take_back()
            self._drop_content()
        self.service.count_left(self)
        self.reply = NO_REPLY

    def _take_back(self) -> None:
        """Takes it back from the engine, too."""
        self._give_back()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def give_back(self) -> None:
        """Gives back what neither the engine nor a thread holds: a connection may remember its last request
        for long."""
        self._give_back()
        if self.content is not None:
            self._drop_content()

    def _give_back(self) -> None:
        self.outlets = self.pictures = None
        self._stop_aside()
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.drop()
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()

    def _stop_aside(self) -> None:
        """Stops work that is not needed any more. Its thread owns the slot until it ends."""
        work, self.thread_work = self.thread_work, None
        if work is not None:
            work.stop()

    def _drop_content(self) -> None:
        content, self.content = self.content, None
        if content is not None:
            content.drop()


def _no_room() -> bool:
    """Never cuts a client off for slow sending: these bodies are complete."""
    return False
