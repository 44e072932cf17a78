"""Places one request between the content that its protocol read and the answer that is written: memory and
who gives it back, the gate, what is decoded and when, clients' own memory, threads.

    READING ──► OFFERED ──► RUNNING ──► ANSWERING ──► OVER
       │           │           │            │           ▲
       └───────────┴───────────┴────────────┴───────────┘   it failed or was refused, or its client left

OFFERED is a request whose tensors are still to come: the engine counts it, and nothing is decoded for it
before the engine has let it in. What is in RUNNING waits or runs, which only the engine can tell apart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

from carpool.errors import CarpoolError, Unsupported, without_stack
from carpool.frontend.calls.asking import Infers, Made
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.client_memory import Fetch, Outlets, names_regions
from carpool.frontend.calls.packing import AT_ONCE, check, is_in_place
from carpool.frontend.pictures.picture_service import promised
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.frontend.pictures.workers import PictureJob, explained, stopping
from carpool.link.door import Answer, Ask, Call, ModelEntry, Sender
from carpool.memory.arena import LARGE, Slot
from carpool.memory.layout import answer_size
from carpool.observe.columns import DECODE_SECONDS, POST_SECONDS
from carpool.observe.counters import Row
from carpool.types import RequestOptions, Tensor, Timing
from carpool.wire.classes import any_takes_long, with_classes
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.v2 import Buffer, Placed, RequestHead

T = TypeVar("T")
WherePlaced = Callable[[], Mapping[str, Placed]]
"""Says where outputs lie in clients' memory, or raises why they do not."""

READING: Final = 0
OFFERED: Final = 1
RUNNING: Final = 2
ANSWERING: Final = 3
OVER: Final = 4

_NOT_READ = RequestHead("", (), (), RequestOptions(), True, 0)
_COPIED: Final = 1 << 20
_PUT_AT_ONCE: Final = 4 << 20  # bytes: to copy them takes a millisecond, and 60 MB many


class RequestPlacement:
    """Everything is called in the loop's thread. What it holds is given back exactly once:

    `_slot` is the call's own while it is not None. A thread that writes to it has it (then it is given back
    when the thread is done), or the door (which gives it back itself).
    """

    __slots__ = (
        *("_call", "_copies", "_done_at", "_door", "_job", "_offered_at", "_outlets", "_pictures"),
        *("_ready_in", "_slot", "_aside_work", "_until"),
        *("arrived", "client", "deadline", "entry", "head", "row", "sender", "service", "state", "unread"),
    )

    entry: ModelEntry  # with `row`: what serves it
    row: Row | None  # None while it is not known whose counters this belongs to

    def __init__(self, service: CallService, sender: Sender, deadline: float, arrived: float) -> None:
        self.service = service
        self._door: Infers = service.door
        self._copies = False  # inputs are wanted in the slot also where the engine could fetch them
        self.sender = sender
        self.client = sender.holder  # whose account it is charged to, or its address
        self.deadline = deadline  # the client's own
        self.arrived = self._offered_at = arrived  # when all of it was here
        self.unread = 0.0  # seconds that it lay in its socket before that
        self.head = _NOT_READ
        self.state = READING
        self._slot: Slot | None = None
        self._call: Call | None = None
        self._outlets: Outlets | None = None  # for outputs that the client wants in its own memory
        self._pictures: SentPictures | None = None
        self._job: PictureJob | None = None  # decodes them
        self._aside_work: Future[Any] | None = None  # does what would hold up the loop
        self._ready_in = self._until = self._done_at = 0.0

    refuses_many = ""  # what is said of a model that may give several answers, where they cannot be written

    # ── what becomes of it ──

    def _finish(self, answer: Answer, placed: WherePlaced | None = dict) -> None:
        """The engine has answered, and what the outputs mean was worked out; without `placed`, the server
        stops. Gives back what the door holds, and never raises."""
        raise NotImplementedError

    def _say_part(self, answer: Answer) -> None:
        """Writes one of the answers of a decoupled model, in their order."""
        raise NotImplementedError

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """End with an error, and give back everything."""
        raise NotImplementedError

    def _current(self) -> tuple[ModelEntry, Row]:
        """Returns what serves it now."""
        raise NotImplementedError

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        """Returns what its client sent beside it, by its name in lower case: headers, or metadata."""
        return {}

    def named(self, head: RequestHead) -> RequestHead:
        """Returns the head with the request's own id, where the head is one that many share."""
        return head

    def _what(self) -> Mapping[str, str]:
        return {"model": self.entry.name}

    def answer_takes_long(self) -> None:
        """Notes that a thread works on the answer."""

    # ── into the engine ──

    def _enter(self, head: RequestHead, *, gate: bool = True) -> None:
        """It is known what is asked: until when, and for whom. Raises the gate's refusal, before more is done
        for it: the engine, which all wait for, need not hear of who is too late."""
        self.head = head
        options, sender, entry = head.options, self.sender, self.entry
        if entry.decoupled and self.refuses_many and not entry.writes:
            raise Unsupported(self.refuses_many)
        if options is not DEFAULT_OPTIONS or sender.latest:
            self.sender = sender = sender.with_options(options)
            if options.timeout is not None and entry.mode != "knobs":
                self.deadline = min(self.deadline, self.arrived + options.timeout)
        if gate and not (options.priority or sender.priority):  # else only the engine can say
            refusal = self.service.door.refuses(entry, self.deadline, monotonic(), sender)
            if refusal is not None:
                raise refusal

    def place_pieces(
        self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool
    ) -> asyncio.Future[Any] | None:
        """The tensors are here, or in the client's own memory. Without `checked`, it is still to be seen
        whether BYTES and BOOL are such. Returns what it waits for, if it is not offered yet."""
        self._enter(head)
        memory = self.service.memory
        by_engine = self.entry.fetches and not self._copies
        fetch = None
        if not head.plain and names_regions(head):
            fetch = memory.fetch(head, self.sender.holder, by_engine=by_engine)
        placed, size = head, head.tail_size
        if fetch is not None:
            placed, self._outlets, size = fetch.head, fetch.outlets, fetch.size
        door = self.service.door
        if size > LARGE:
            answer = answer_size(self.entry.signature, size)
            slot = self._slot = door.large_slot(size, answer, self.client, _no_room)
        else:
            slot = self._slot = door.slot(size)
        if head.tail_size <= _PUT_AT_ONCE or placed.regions:
            _put(pieces, slot.view)
            if placed.regions or (fetch is None and (checked or head.plain)):
                self._offer(placed, slot, 0)
                return None
            pieces = ()
        return self._fill(head, pieces, fetch, slot, checked=checked)

    def _fill(
        self,
        head: RequestHead,
        pieces: Sequence[Buffer],
        fetch: Fetch | None,
        slot: Slot,
        *,
        checked: bool,
    ) -> asyncio.Future[Any] | None:
        """Offer it when its slot has all: these `pieces`, and what is in its client's memory."""
        view = slot.view

        def fill() -> None:
            _put(pieces, view)
            if not checked:
                check(head, view[: head.tail_size], self.entry.name)
            if fetch is not None:
                fetch.into(view)

        placed = head if fetch is None else fetch.head
        takes_long = not checked and head.tail_size > AT_ONCE and not is_in_place(head)
        takes_long = takes_long or bool(pieces) or (fetch is not None and fetch.takes_long)
        return self._aside(takes_long, fill, lambda _: self._offer(placed, slot, 0), slot)

    def _with_headers(self, head: RequestHead) -> RequestHead:
        """Returns the head with the headers that its model is told."""
        forward = self.service.forward
        if forward is None or not self.entry.signature.told:
            return head
        return forward.added(head, self.sent_fields)

    def place_pictures(self, pictures: SentPictures) -> None:
        """Offers pictures at once, which are decoded when they are let in. Or as a file, for the model's
        device to decode; it may be in a slot already."""
        service, on_route = self.service, pictures.on_route
        self._enter(pictures.asked, gate=not on_route)
        if pictures.asked.outputs:
            self._outlets = service.memory.outlets(pictures.asked.outputs, self.sender.holder)
        self._pictures = pictures
        entry = self.entry
        if service.sampler is not None:
            pictures.sampled = service.sampler.pick(entry, pictures, pictures.slot)
        now, weight = monotonic(), pictures.weight
        if pictures.is_file:
            if on_route:
                service.pictures.offers(entry, now)
            self._slot = slot = pictures.slot_of_file(service.door)
            self._offer(pictures.head, slot, 0)
            return
        self._until = until = promised(entry, self.arrived, self.deadline)
        # On a route it was counted at its head, and the gate looks at how many were.
        if on_route:
            given = self.deadline, until, now, self.sender, weight, self.client
            refusal = service.pictures.refuses_now(entry, *given)
        else:
            refusal = service.pictures.cannot_decode(entry, until, now, weight, self.client)
        if refusal is not None:
            raise refusal
        slot = service.door.slot(pictures.size)
        try:
            self._ready_in = service.pictures.workers.foresee(weight, now, self.client)
            self._offer(pictures.head, slot, 0, self._ready_in)
        finally:
            self._slot = slot  # until its tensors are in it
        self.state = OFFERED

    def _offer(self, head: RequestHead, slot: Slot, tail: int, ready_in: float | None = None) -> None:
        """Goes the one way through the door."""
        self._offered_at = monotonic()
        entry, pictures = self.entry, self._pictures
        if entry.signature.told:
            head = self.named(head)
            if pictures is not None:
                head = self._with_headers(head)
        in_parts = entry.decoupled and entry.in_parts(self.refuses_many)
        # By position: names would take as long again.
        times = self.arrived, self.deadline
        ask = Ask(entry, head, slot, tail, *times, self.sender, ready_in, in_parts, False, None, 0, pictures)
        self._call = self._door.infer(ask, self)
        self._slot = None
        self.state = RUNNING

    # ── threads ──

    def _aside(
        self, takes_long: bool, work: Callable[[], T], then: Callable[[T], object], slot: Slot | None = None
    ) -> asyncio.Future[T] | None:
        """Do what would hold up the loop in a thread, then go on. The thread has the slot while it works."""
        if not takes_long:
            then(work())
            return None
        if slot is not None:
            self._slot = None
        self._aside_work = in_thread = self.service.threads.submit(work)
        future = asyncio.wrap_future(in_thread)
        future.add_done_callback(partial(self._came_back, then, slot))
        return future

    def _came_back(self, then: Callable[[T], object], slot: Slot | None, work: asyncio.Future[T]) -> None:
        error = stopping() if work.cancelled() else work.exception()
        self._aside_work = None
        if self.state == OVER:
            if slot is not None:
                slot.release()
            return
        self._slot = slot
        try:
            if error is not None:
                raise error
            self._renew()
            then(work.result())
        except CarpoolError as known:
            self._fail(known)
        except Exception as unknown:
            self._fail_unexpectedly(unknown)

    def _renew(self) -> None:
        """Threads take their time: meanwhile a model may have been replaced by one that takes the same."""
        with contextlib.suppress(CarpoolError):
            entry, row = self._current()
            if entry.signature.is_like(self.entry.signature):
                self.entry, self.row = entry, row

    def admitted(self) -> None:
        """The engine has let it in: now there is sense in decoding."""
        pictures, slot = self._pictures, self._slot
        if self.state == OFFERED and self._job is None and pictures is not None and slot is not None:
            work, workers = partial(pictures.prepare, slot.view), self.service.pictures.workers
            until, weight = self._until, pictures.weight
            try:
                self._job = workers.begin(work, self._decoded, until, weight, self.client)
            except Exception as fault:
                self._break_off(fault)

    def _decoded(self, seconds: float | None, error: BaseException | None) -> None:
        """The thread is done with the slot, which goes over to the door with the tensors in it."""
        self._job = None  # it knows us too: let go, or only the collector could free both
        slot, self._slot = self._slot, None
        call = self._call
        assert slot is not None
        if self.state != OFFERED or call is None:
            slot.release()
        elif seconds is None:
            self._call = None
            call.cancel()
            slot.release()
            self._fail(explained(error, self.entry.name))
        else:
            try:
                self._count_decoded(slot, seconds)
            except Exception as fault:
                self._slot = slot
                self._break_off(fault)
                return
            call.ready(slot)

    def _break_off(self, fault: Exception) -> None:
        """Ends the call after a bug while the engine waits for the input. Never raises."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._fail_unexpectedly(fault)

    def _count_decoded(self, _slot: Slot, seconds: float) -> None:
        now = monotonic()
        weight = 1.0 if self._pictures is None else self._pictures.weight
        self.service.pictures.workers.came_true(weight, self._ready_in, now - self._offered_at, now)
        self._offered_at = now
        self.state = RUNNING
        assert self.row is not None
        self.row.observe(DECODE_SECONDS, seconds)

    # ── the answer ──

    def part(self, answer: Answer) -> None:
        """Takes one answer of several."""
        try:
            if self.state != OVER:
                if isinstance(self._pictures, RoutePicture):
                    answer.text = self._pictures.add(answer)
                self._say_part(answer)
        except CarpoolError as error:
            self._fail(error)
        except Exception as fault:
            self._fail_unexpectedly(fault)
        call = self._call
        if self.state == OVER and call is not None:  # it could not be written: no more are wanted
            self._call = None
            call.cancel()

    def done(self, answer: Answer) -> None:
        """Never raises: the door has nothing more to say of it. Called again when its classes were found."""
        if self.state != ANSWERING:
            self.state = ANSWERING
            self._done_at = monotonic()
        pictures, entry = self._pictures, self.entry
        try:
            for output in self.head.outputs:
                if output.classification and answer.error is None and self._classify(answer):
                    return
            in_parts = entry.decoupled and entry.in_parts(self.refuses_many)
            if (pictures is None and self._outlets is None) or in_parts:
                if isinstance(pictures, RoutePicture) and answer.error is None:
                    pictures.conclude()
                self._finish(answer)
            elif pictures is None or answer.error is not None:
                self._put_out(answer)
            else:
                self._compose(pictures, answer)
        except Exception as fault:
            answer.error = CarpoolError(f"the server failed on this request: {type(fault).__name__}")
            self.service.log.exception("request-failed", **self._what())
            self._finish(answer)

    def _classify(self, answer: Answer) -> bool:
        """Finds the classes that were asked for, if there are many values to look through: in a thread, where
        numpy does it while the loop goes on. Returns whether that is so."""
        entry, asked = self.entry, self.head.outputs
        if isinstance(answer, Made) or not any_takes_long(asked, answer.outputs):
            return False
        self.answer_takes_long()
        batched = entry.signature.max_batch > 0
        work = partial(with_classes, asked, answer.outputs, entry.labels, batched=batched)
        future = asyncio.wrap_future(self.service.threads.submit(work))
        future.add_done_callback(partial(self._classified, answer))
        return True

    def _classified(self, answer: Answer, work: asyncio.Future[list[Tensor]]) -> None:
        error = stopping() if work.cancelled() else work.exception()
        if error is None:
            answer.outputs = work.result()
        elif isinstance(error, CarpoolError):
            answer.error = without_stack(error)
        else:
            self.service.log.error("classes-failed", exc_info=error, **self._what())
            answer.error = CarpoolError(f"the server failed on this request: {type(error).__name__}")
            without_stack(error)
        if self.state == OVER:
            self._finish(answer)  # which gives back what it holds
        else:
            RequestPlacement.done(self, answer)

    def _compose(self, pictures: SentPictures, answer: Answer) -> None:
        """Work out what the outputs mean, where that takes long in a thread."""
        self.service.pictures.ran(self.entry, answer.timing)
        if not pictures.composes:
            self._put_out(answer)
            return
        if not pictures.quick:
            self.answer_takes_long()
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
            self.answer_takes_long()

    # ── the other ends ──

    def _fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach whoever called, which serves others too."""
        self.service.log.exception("request-failed", **self._what())
        self._fail(CarpoolError(f"the server failed on this request: {type(error).__name__}"))
        without_stack(error)

    def _let_go(self) -> None:
        """Lets go of what the door does not hold: a connection may remember its last request for long."""
        self._outlets = self._pictures = None
        if self._aside_work is not None:
            self._aside_work.cancel()  # unless it has begun: then the slot is its
        job, self._job = self._job, None
        if job is not None and not self.service.pictures.workers.drop(job):
            return  # a thread writes to the slot: `_decoded` gives it back
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


def _no_room() -> bool:
    """Cuts nobody off: these bodies are all here."""
    return False


def _put(pieces: Sequence[Buffer], view: memoryview) -> None:
    """One behind the other, a part at a time: a thread that copies holds the interpreter."""
    position = 0
    for piece in pieces:
        source = memoryview(piece)
        for start in range(0, len(source), _COPIED):
            part = source[start : start + _COPIED]
            view[position : position + len(part)] = part
            position += len(part)
