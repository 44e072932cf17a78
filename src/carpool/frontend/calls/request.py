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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from carpool.compiling import mypyc_attr
from carpool.errors import Cancelled, CarpoolError, Unavailable, Unsupported, without_stack
from carpool.frontend.calls.client_memory import ClientMemory, Outlets, names_regions
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.lane import Choice, Infers, LooksEarly
from carpool.frontend.calls.packing import AT_ONCE, fill_slot, is_in_place, put_pieces
from carpool.frontend.calls.reused_answer import AnswerNote, EncodedAnswer
from carpool.frontend.calls.thread_errors import explained, stopping
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.clients.fair_threads import FairThreads, ThreadWork
from carpool.link.catalog import ModelEntry
from carpool.link.contents import Content, Pieces, Waiting
from carpool.link.engine_client import (
    IN_PARTS,
    USUAL,
    Answer,
    Ask,
    Call,
    EngineClient,
    Handling,
)
from carpool.link.senders import Sender
from carpool.link.step_times import Times
from carpool.memory.arena import LARGE, Slot
from carpool.memory.layout import answer_size
from carpool.observe.columns import DECODE_SECONDS, POST_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import Row, count_failure
from carpool.observe.logs import Logger
from carpool.types import RequestOptions, Tensor, Timing
from carpool.wire.classes import any_takes_long, with_classes
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.strings import Between, go_on
from carpool.wire.v2 import Buffer, Placed, RequestHead

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService
    from carpool.frontend.pictures.sent_pictures import SentPictures
    from carpool.frontend.pictures.workers import PictureJob

T = TypeVar("T")
WherePlaced = Callable[[], Mapping[str, Placed]]
"""Says where outputs lie in clients' memory, or raises why they do not."""

READING: Final = 0
OFFERED: Final = 1
RUNNING: Final = 2
ANSWERING: Final = 3
OVER: Final = 4

LEFT = asyncio.CancelledError("the client left")
_NOT_READ = RequestHead("", (), (), RequestOptions(), True, 0)
_PUT_AT_ONCE: Final = 4 << 20  # bytes: to copy them takes a millisecond, and 60 MB many


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestReply:
    """Writes what comes of a request, in the words of its protocol; and says what the protocol knows of it.
    This one is of a client that has left."""

    __slots__ = ()

    form = ""  # distinguishes its encoded answers from other protocols'; empty: they are not encoded
    siblings = b""  # is the same for requests that came as one, and differs from all others'
    looked: object = None  # what was found where its answer was looked for already

    def answer(self, request: Request, answer: Answer) -> None:
        """Sends the outputs, those in `request.placed` excepted, or `request.encoded` in their place. What
        goes on when this returns is marked as `Answer.taken`."""

    def part(self, request: Request, answer: Answer) -> None:
        """Writes one of several answers, in their order; then come `answer`, without any outputs, or `error`.
        What this raises ends the request: a client that reads too slowly is cut off."""

    def error(self, request: Request, error: CarpoolError, times: Times | None) -> None:
        """Writes an error. `times` is None for a request that never came to the engine."""

    def encode(self, request: Request, answer: Answer) -> EncodedAnswer:
        """Returns the outputs as `answer` sends them, without what belongs to this request alone."""
        raise Unsupported("answers of this form are not encoded")

    def current(self) -> ModelLane:
        """Returns what serves it now."""
        raise Unavailable("the client left")

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        """Returns how it came, and how it was answered, for its span."""
        return RequestOrigin("", {})

    def request_id(self, request: Request) -> str:
        """Returns it as the client calls it; empty where it does not."""
        return request.head.id

    def fields(self) -> Mapping[bytes, bytes]:
        """Returns what the client sent beside it, by its name in lower case: headers, or metadata."""
        return {}

    def named(self, head: RequestHead) -> RequestHead:
        """Returns the head with the request's own id, where the head is one that many share."""
        return head

    def facts(self, request: Request) -> Mapping[str, str]:
        """Returns what a log line says of it."""
        return {"model": request.entry.name}

    def takes_long(self) -> None:
        """Notes that a thread works on the answer."""


NO_REPLY: Final = RequestReply()


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


class Observer(Protocol):
    """Sees how requests end, in the loop's thread: it must not raise or take long."""

    def answered(self, call: Request, answer: Answer, times: tuple[float, float, float]) -> None:
        """Notes that a call was answered well: when it was offered, when that was done, and now, by
        `time.monotonic()`."""

    def failed(self, call: Request, error: CarpoolError, timing: Timing | None, now: float) -> None: ...


SeesPictures: TypeAlias = "Callable[[ModelEntry, SentPictures, Slot | None], None]"
"""Sees what goes to the engine before it is decoded, with the slot of a file that lies in one already."""


class RequestService:
    """Holds what every request needs of its front end."""

    engine: EngineClient
    log: Logger
    server_row: Row  # this process's counters that belong to no model
    memory: ClientMemory
    threads: ThreadPoolExecutor
    fair_threads: FairThreads  # their work is charged to clients
    forward: ForwardedHeaders | None  # headers that models receive
    observers: tuple[Observer, ...]
    see_pictures: tuple[SeesPictures, ...]
    lane: Callable[[ModelEntry], ModelLane]
    """Returns what requests for this version pass."""
    pictures: PictureService
    """Serves images. There is none before a model takes images, or `with_pictures` is called."""


class Request:
    """Represents one request. All of it is called in the loop's thread. It has no subclasses: protocols and
    wrappers hold a request. While `slot` is not None, the request owns it; else a thread that writes to it
    does, or the call.
    """

    __slots__ = (
        *("_after", "_aside_work", "_call", "_done_at", "_job", "_listeners", "_offered_at"),
        *("_outlets", "_ready_in", "_until", "arrived", "choice", "client", "content"),
        *("deadline", "engine", "encoded", "entry", "head", "heard", "infer", "more_fields", "note"),
        *("pictures", "placed", "refuses_many", "reply", "row", "sender", "service", "slot", "state"),
        "unread",
    )

    entry: ModelEntry  # with `row` and `infer`: its lane
    infer: Infer | None

    def __init__(
        self,
        service: RequestService,
        reply: RequestReply,
        sender: Sender,
        deadline: float,
        arrived: float = 0.0,
    ) -> None:
        self.service = service
        self.reply = reply
        self.engine: Infers = service.engine
        self.row: Row | None = None  # None while it is not known whose counters this belongs to
        self.sender = sender
        self.client = sender.holder  # whose account it is charged to, or its address
        self.deadline = deadline  # the client's own
        self.arrived = self._offered_at = arrived  # when all of it was here
        self.unread = 0.0  # seconds that it lay in its socket before that
        self.head = _NOT_READ
        self.state = READING
        self.heard = False  # the engine has heard of it
        self.slot: Slot | None = None
        self.content: Content | None = None  # for the wrappers
        self.pictures: SentPictures | None = None  # until it is over, and while observers hear of it
        self.choice: Choice | None = None  # what has chosen its version, between several
        self.refuses_many = ""  # what is said of a model that may give several answers, where one is taken
        self.note: AnswerNote | None = None  # what a wrapper says of the answer
        self.encoded: EncodedAnswer | None = None  # the answer, where a wrapper has it so
        self.placed: Mapping[str, Placed] = {}  # outputs that are in the client's memory
        self.more_fields = b""  # for the head of the answer, over HTTP
        self._call: Call | None = None
        self._outlets: Outlets | None = None  # for outputs that the client wants in its own memory
        self._job: tuple[PictureJob, Slot] | None = None  # decodes pictures into the slot
        self._aside_work: ThreadWork[Any] | None = None  # does what would hold up the loop
        self._listeners: list[Listener] | None = None
        self._after: Callable[[Answer], None] | None = None
        self._ready_in = self._until = self._done_at = 0.0

    def promise_begins(self, now: float) -> None:
        """The model was loaded for it: what it took until now is no part of the promise."""
        self.arrived = self._offered_at = now

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
            self.slot = self._outlets = None
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
        self._outlets = self.service.memory.outlets(head.outputs, self.sender.holder)

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
        self._done_at = self._offered_at = monotonic()
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
            placed, self._outlets, size = fetch.head, fetch.outlets, fetch.size
        engine = self.service.engine
        if size > LARGE:
            answer = answer_size(self.entry.signature, size)
            slot = self.slot = engine.large_slot(size, answer, self.client, _no_room)
        else:
            slot = self.slot = engine.slot(size)
        if head.tail_size <= _PUT_AT_ONCE or placed.regions:
            put_pieces(pieces, slot.view)
            if placed.regions or (fetch is None and (checked or head.plain)):
                self._offer(placed, slot, 0)
                return None
            pieces = ()
        fill = partial(fill_slot, head, pieces, fetch, slot.view, "" if checked else self.entry.name)
        takes_long = not checked and head.tail_size > AT_ONCE and not is_in_place(head)
        takes_long = takes_long or bool(pieces) or (fetch is not None and fetch.takes_long)
        return self.aside(takes_long, fill, lambda _: self._offer(placed, slot, 0), slot)

    def _with_headers(self, head: RequestHead) -> RequestHead:
        """Returns the head with the headers that its model receives."""
        forward = self.service.forward
        if forward is None or not self.entry.signature.told:
            return head
        return forward.added(head, self.reply.fields())

    def place_pictures(self, pictures: SentPictures) -> None:
        """Offers pictures at once, which are decoded when they are let in. Or as a file, for the model's
        device to decode; it may be in a slot already."""
        service, on_route = self.service, pictures.on_route
        self._enter(pictures.asked, gate=not on_route)
        if pictures.asked.outputs:
            self.wants_outputs(pictures.asked)
        self.pictures = pictures
        entry = self.entry
        for sees in service.see_pictures:
            sees(entry, pictures, pictures.slot)
        now, weight = monotonic(), pictures.weight
        if pictures.is_file:
            if on_route:
                service.pictures.offers(entry, now)
            self.slot = slot = pictures.slot_of_file(service.engine)
            self._offer(pictures.head, slot, 0)
            return
        slo = entry.batching.slo  # as `entry.due`, without a call
        until = self.deadline if slo is None else min(self.deadline, self.arrived + slo)
        self._until = until
        # On a route it was counted at its head, and the gate looks at how many were.
        if on_route:
            given = self.deadline, until, now, self.sender, weight, self.client
            refusal = service.pictures.refuses_now(entry, *given)
        else:
            refusal = service.pictures.cannot_decode(entry, until, now, weight, self.client)
        if refusal is not None:
            raise refusal
        slot = service.engine.slot(pictures.size)
        try:
            self._ready_in = service.pictures.workers.foresee(weight, now, self.client)
            self._offer(pictures.head, slot, 0, self._ready_in)
        finally:
            self.slot = slot  # until its tensors are in it
        self.state = OFFERED

    def _offer(self, head: RequestHead, slot: Slot, tail: int, ready_in: float | None = None) -> None:
        """Goes the one way to the engine."""
        self._offered_at = monotonic()
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
        self._aside_work = in_thread = self.service.fair_threads.begin(self.client, work)
        in_thread.done.add_done_callback(partial(self._came_back, then, slot, in_thread))
        return in_thread.done

    def _came_back(
        self, then: Callable[[T], object], slot: Slot | None, which: ThreadWork[T], work: asyncio.Future[T]
    ) -> None:
        error = stopping() if work.cancelled() else work.exception()
        if self.state == OVER or self._aside_work is not which:  # or it was recalled
            if slot is not None:
                slot.release()
            return
        self._aside_work = None
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
            lane = self.reply.current() if self.content is None else self._same_version()
            if lane.entry.signature.is_like(self.entry.signature):
                self.enter(lane)

    def _same_version(self) -> ModelLane:
        """Wrappers know it as a request for this version, whatever would be chosen now."""
        entry = self.service.engine.catalog.entries.get((self.entry.name, self.entry.version))
        if entry is None:
            raise Unavailable(f"model '{self.entry.name}' is not loaded any more")
        return self.service.lane(entry)

    def admitted(self) -> None:
        """The engine has let it in: now there is sense in decoding. The thread has the slot from here on."""
        pictures, slot, call = self.pictures, self.slot, self._call
        if self.state == OFFERED and pictures is not None and slot is not None and call is not None:
            self.slot = None
            work, workers = partial(pictures.prepare, slot.view), self.service.pictures.workers
            until, weight = self._until, pictures.weight
            decoded = partial(self._decoded, slot, call)
            try:
                self._job = workers.begin(work, decoded, until, weight, self.client), slot
            except Exception as fault:
                slot.release()
                self.fail_unexpectedly(fault)

    def _decoded(self, slot: Slot, call: Call, seconds: float | None, error: BaseException | None) -> None:
        """The thread is done with the slot, which goes over to the call that it was decoded for, with the
        tensors in it. By now that may be over, and the request may have another."""
        if self.state != OFFERED or self._call is not call:
            slot.release()
            return
        self._job = None  # it knows us too: let go, or only the collector could free both
        if seconds is None:
            self._take_back()
            slot.release()
            self.fail(explained(error, self.entry.name))
            return
        try:
            now = monotonic()
            weight = 1.0 if self.pictures is None else self.pictures.weight
            self.service.pictures.workers.came_true(weight, self._ready_in, now - self._offered_at, now)
            self._offered_at = now
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
        """Never raises: the engine says nothing more of it. Called again when its classes were found."""
        if self.state != ANSWERING:
            self.state = ANSWERING
            self._done_at = monotonic()
        pictures, entry = self.pictures, self.entry
        if self.content is not None:
            self.content.gone = True
        try:
            for output in self.head.outputs:
                if output.classification and answer.error is None and self._classify(answer):
                    return
            in_parts = entry.traits.decoupled and entry.traits.in_parts(self.refuses_many)
            if (pictures is None and self._outlets is None) or in_parts:
                if pictures is not None and answer.error is None:
                    pictures.conclude()
                self._finish(answer)
            elif pictures is None or answer.error is not None:
                self._put_out(answer)
            else:
                self._compose(pictures, answer)
        except Exception as fault:
            answer.error = CarpoolError(f"the server failed on this request: {type(fault).__name__}")
            self.service.log.exception("request-failed", **self.reply.facts(self))
            self._finish(answer)

    def _classify(self, answer: Answer) -> bool:
        """Finds the classes that were asked for, if there are many values to look through: in a thread, where
        numpy does it while the loop goes on. Returns whether that is so."""
        entry, asked = self.entry, self.head.outputs
        if not any_takes_long(asked, answer.outputs):
            return False
        batched = entry.signature.max_batch > 0
        work = partial(with_classes, asked, answer.outputs, entry.published.labels, batched=batched)
        self._aside_work = in_thread = self.service.fair_threads.begin(self.client, work)
        in_thread.done.add_done_callback(partial(self._classified, answer))
        return True

    def _classified(self, answer: Answer, work: asyncio.Future[list[Tensor]]) -> None:
        error = stopping() if work.cancelled() else work.exception()
        self._aside_work = None
        if error is None:
            answer.outputs = work.result()
        elif isinstance(error, CarpoolError):
            answer.error = without_stack(error)
        else:
            self.service.log.error("classes-failed", exc_info=error, **self.reply.facts(self))
            answer.error = CarpoolError(f"the server failed on this request: {type(error).__name__}")
            without_stack(error)
        if self.state == OVER:
            self._finish(answer)  # which gives back what it holds
        else:
            self.done(answer)

    def _compose(self, pictures: SentPictures, answer: Answer) -> None:
        """Work out what the outputs mean, where that takes long in a thread."""
        self.service.pictures.ran(self.entry, answer.timing)
        if not pictures.composes:
            self._put_out(answer)
            return
        if not pictures.quick:
            self.reply.takes_long()
            work = partial(pictures.compose, answer.outputs)
            self.service.pictures.workers.finish(work, partial(self._composed, answer))
            return
        try:
            answer.outputs, seconds = pictures.compose(answer.outputs)
        except Exception as error:
            answer.error = explained(error, self.entry.name)
        else:
            assert self.row is not None
            self.row.observe(POST_SECONDS, seconds)
        if self._outlets is None:
            self._finish(answer)
        else:
            self._put_out(answer)

    def _composed(
        self, answer: Answer, composed: tuple[Sequence[Tensor], float] | None, error: BaseException | None
    ) -> None:
        """What the outputs mean was worked out."""
        if composed is None:
            answer.error = explained(error, self.entry.name)
        else:
            answer.outputs, seconds = composed
            assert self.row is not None
            self.row.observe(POST_SECONDS, seconds)
        self._put_out(answer)

    def _put_out(self, answer: Answer) -> None:
        """Write outputs that are wanted there to the client's own memory, long ones in a thread."""
        outlets = self._outlets
        if outlets is None or answer.error is not None or self.state == OVER:
            self._finish(answer)
        elif outlets.put(answer.outputs, self.entry, self.service.threads, partial(self._finish, answer)):
            self.reply.takes_long()

    def _finish(self, answer: Answer, placed: WherePlaced | None = dict) -> None:
        """Answers, and gives back what the call holds; without `placed`, the server stops. Never raises,
        since others wait behind it."""
        call, self._call = self._call, None  # it knows us too
        taken = False
        try:
            if self.state == OVER:
                return  # the client left while a thread worked
            answer.held = call
            if placed is not dict:
                self._find_placed(answer, placed)
            passed: Answer | None = answer
            if self._listeners:
                passed = self._hear(answer)
            if passed is not None:
                taken = self._end(passed)
        except CarpoolError as error:
            self.end_with(error, answer.timing if self.heard else None)
        except Exception as fault:
            self.fail_unexpectedly(fault)
        finally:
            if call is not None and not taken:
                call.release()

    def _find_placed(self, answer: Answer, placed: WherePlaced | None) -> None:
        if answer.error is None:
            try:
                if placed is None:
                    raise stopping()
                self.placed = placed()
            except CarpoolError as error:
                answer.error = error

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

    def _end(self, answer: Answer) -> bool:
        """Returns whether the answer is being sent, and has what its outputs lie in until that is over."""
        after, self._after = self._after, None
        try:
            if answer.error is not None:
                self.end_with(answer.error, answer.timing if self.heard else None)
            else:
                self.reply.answer(self, answer)
                if not answer.taken:
                    self.written(answer)
        finally:
            if after is not None:
                after(answer)
        if answer.outside is not None:  # how long its client waited beyond what the engine sees
            now = monotonic()
            answer.outside.seen(self.unread + now - answer.sent, now)
        return answer.taken

    def written(self, answer: Answer) -> None:
        """The answer is out, or its head if it is long: those hear of it who only look on."""
        self.state = OVER
        now = monotonic()
        if self.reply is not NO_REPLY:
            times = self._offered_at, self._done_at, now
            for observer in self.service.observers:
                observer.answered(self, answer, times)
            assert self.row is not None
            self.row.observe(REQUEST_SECONDS, now - self.arrived)
            self.reply = NO_REPLY  # which knows us, too
        self._outlets = self.pictures = None
        if self.content is not None:
            self._drop_content()

    def times(self, timing: Timing) -> Times:
        """Returns the times with the front end's own seconds around those of the engine."""
        before, after = self._offered_at - self.arrived, monotonic() - self._done_at
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
        reply, self.reply = self.reply, NO_REPLY
        if reply is NO_REPLY:
            return  # its client has left
        now = monotonic()
        times: Times | None = None
        if timing is not None:
            times = self.times(timing)
        elif self.heard:
            times = Times(decode=(now - self.arrived) * 1e3)
        if self.row is not None:
            unheard = self.head.batch if times is None and not self.sender.again else 0
            if times is None:
                source = self.sender.source or self.head.options.source
                self.service.engine.turned_away(self.entry, error, self.arrived, self.head.batch, source)
            count_failure(self.row, error, now - self.arrived, unheard)
        reply.error(self, error, times)
        self.reply = reply
        for observer in self.service.observers:
            observer.failed(self, error, timing, now)
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
        now = monotonic()
        if self.row is not None:
            count_failure(self.row, LEFT, now - self.arrived if self.arrived else 0.0)
        for observer in self.service.observers:
            observer.failed(self, Cancelled("the client left"), None, now)
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
        self._outlets = self.pictures = None
        self._stop_aside()
        job, self._job = self._job, None
        if job is not None and self.service.pictures.workers.drop(job[0]):
            job[1].release()  # else a thread writes to it: `_decoded` gives it back
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()

    def _stop_aside(self) -> None:
        """Stops work that is not needed any more. Its thread owns the slot until it ends."""
        work, self._aside_work = self._aside_work, None
        if work is not None:
            work.stop()

    def _drop_content(self) -> None:
        content, self.content = self.content, None
        if content is not None:
            content.drop()

    # ── what observers see ──

    @property
    def request_id(self) -> str:
        return self.reply.request_id(self)

    @property
    def siblings(self) -> bytes:
        return self.reply.siblings

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        return self.reply.fields()

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return self.reply.origin(error)


def _no_room() -> bool:
    """Never cuts a client off for slow sending: these bodies are complete."""
    return False
