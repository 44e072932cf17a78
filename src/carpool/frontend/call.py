"""One request from its head to its answer, whatever protocol it comes over: the one state machine.

    READING ──► OFFERED ──► RUNNING ──► ANSWERING ──► OVER
       │           │           │            │           ▲
       └───────────┴───────────┴────────────┴───────────┘   it failed or was refused, or its client left

A protocol reads a request, and says where its tensors lie: in the slot that its body came into
(`_offer_in_place`), in pieces (`_offer_pieces`), or still in pictures (`_offer_pictures`). It writes what
comes of it (`_write`, `_write_error`). The rest is here: memory and who gives it back, deadlines, the gate,
what is decoded and when, clients' own memory, threads, counters, traces and times. Where a model's answers
are kept, a `Lookup` stands before each offer: it answers, or lets the same offer pass when it is made again.

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
from typing import Any, TypeVar

from carpool.cache.answer_store import Kept
from carpool.cache.cache_key import ANY
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, Unsupported, without_stack
from carpool.frontend.cached_call import Asked, Lookup
from carpool.frontend.client_memory import Fetch, Outlets, names_regions
from carpool.frontend.comparison import may_run_again
from carpool.frontend.front_caches import Looked, Told
from carpool.frontend.front_service import FrontService
from carpool.frontend.mirror import Beside
from carpool.frontend.packing import AT_ONCE, check, is_in_place
from carpool.frontend.pictures.picture_service import promised
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.frontend.pictures.workers import Job, explained, stopping
from carpool.frontend.routing import Split
from carpool.frontend.trace_context import Origin
from carpool.link.door import Answer, Call, ModelEntry, Sender, Slot
from carpool.link.step_times import Times
from carpool.observe.columns import DECODE_SECONDS, POST_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import Row, count_failure
from carpool.types import RequestOptions, Tensor, Timing
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.v2 import Buffer, Placed, RequestHead

T = TypeVar("T")

READING, OFFERED, RUNNING, ANSWERING, OVER = range(5)

_NOT_READ = RequestHead("", (), (), RequestOptions(), True, 0)
_COPIED = 1 << 20
_PUT_AT_ONCE = 4 << 20  # bytes: to copy them takes a millisecond, and 60 MB many
LEFT = asyncio.CancelledError("the client left")


class ClientCall:
    """Everything is called in the loop's thread. What it holds is given back exactly once:

    `_slot` is the call's own while it is not None. A thread that writes to it has it (then it is given back
    when the thread is done), or the door (which gives it back itself).
    """

    __slots__ = (
        *("_beside", "_call", "_done_at", "_job", "_lookup", "_offered_at", "_outlets", "_pictures"),
        *("_ready_in", "_slot", "_until", "arrived", "client", "deadline", "entry", "head", "row", "sender"),
        *("_aside_work", "service", "split", "state", "told", "unread", "wish"),
    )

    entry: ModelEntry  # with `row`: what serves it
    row: Row | None  # None while it is not known whose counters this belongs to

    def __init__(self, service: FrontService, sender: Sender, deadline: float, arrived: float = 0.0) -> None:
        self.service = service
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
        self._job: Job | None = None  # decodes them
        self._aside_work: Future[Any] | None = None  # does what would hold up the loop
        self.split: Split | None = None  # between two versions, one of which has been chosen
        self._beside: Beside | None = None  # what is done beside it for that
        self._ready_in = self._until = self._done_at = 0.0
        self.wish = ANY  # what the request says about caches
        self.told: Told | None = None  # what its answer says about them
        self._lookup: Lookup | None = None

    # ── what a protocol does ──

    form = ""  # of its answers, by which those of other protocols are told apart
    one_answer = ""  # what is said of a model that may give several, where they cannot be written
    siblings = b""  # tells requests that came as one from all others
    looked: Looked | None = None  # what was found where its answer was looked for already

    def _write(self, answer: Answer, placed: Mapping[str, Placed], kept: Kept | None = None) -> None:
        """Send the outputs; those in `placed` are in the client's memory already. Or what is `kept` of them,
        as the answer to this request."""
        raise NotImplementedError

    def _write_part(self, answer: Answer) -> None:
        """One of the answers of a decoupled model, in their order; then `_write` for the end, without any
        outputs, or `_write_error`. What this raises ends the request: who reads too slowly is cut off."""

    def _encode(self, answer: Answer, placed: Mapping[str, Placed]) -> Kept:
        """The outputs as `_write` sends them, without what belongs to this request alone."""
        raise NotImplementedError

    def _write_error(self, error: CarpoolError, times: Times | None) -> None:
        """`times` is None for a request that never came to the engine."""
        raise NotImplementedError

    def _current(self) -> tuple[ModelEntry, Row]:
        raise NotImplementedError

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        """What its client sent beside it, by its name in lower case: headers, or metadata."""
        return {}

    def origin(self, error: CarpoolError | None) -> Origin:
        """How it came, and how it was answered, for its span."""
        raise NotImplementedError

    def _named(self, head: RequestHead) -> RequestHead:
        """With the request's own id, where the head is one that many share."""
        return head

    def _what(self) -> Mapping[str, str]:
        return {"model": self.entry.name}

    def _answer_takes_long(self) -> None:
        """A thread works on the answer."""

    def _keep_to_source(self, head: RequestHead) -> None:
        """Its own parameters name a source: between two versions, the choice is that source's."""

    @property
    def pictures(self) -> SentPictures | None:
        """Until it has been answered, and while observers are told."""
        return self._pictures

    @property
    def request_id(self) -> str:
        """As the client calls it; empty where it does not."""
        return self.head.id

    # ── the request ──

    def _enter(self, head: RequestHead, *, gate: bool = True) -> None:
        """It is known what is asked: until when, and for whom. Raises the gate's refusal, before more is done
        for it: the engine, which all wait for, need not hear of who is too late."""
        self.head = head
        options, sender, entry = head.options, self.sender, self.entry
        if entry.decoupled and self.one_answer and not entry.writes:
            raise Unsupported(self.one_answer)
        if options is not DEFAULT_OPTIONS or sender.latest:
            self.sender = sender = sender.with_options(options)
            if options.timeout is not None and entry.mode != "knobs":
                self.deadline = min(self.deadline, self.arrived + options.timeout)
        if gate and not (options.priority or sender.priority):  # else only the engine can say
            refusal = self.service.door.refuses(entry, self.deadline, monotonic(), sender)
            if refusal is not None and self._moves_to_stable(refusal):
                refusal = self.service.door.refuses(self.entry, self.deadline, monotonic(), sender)
            if refusal is not None:
                raise refusal

    def _offer_in_place(self, head: RequestHead, tail: int) -> None:
        """The tensors are in the slot, behind `tail` bytes."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        if self.split is not None and head.options.source:
            self._keep_to_source(head)
        slot = self._slot
        assert slot is not None
        if self.entry.cache is not None and self._lookup is None:
            asked = Asked(head, self.form, (slot.view[tail : tail + head.tail_size],), in_slot=True)
            if self._look_in_cache(asked, partial(self._offer_in_place, head, tail)):
                return
        self._enter(head)
        self._offer(head, slot, tail)

    def _offer_pieces(
        self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool
    ) -> asyncio.Future[Any] | None:
        """The tensors are here, or in the client's own memory. Without `checked`, it is still to be seen
        whether BYTES and BOOL are such. Returns what it waits for, if it is not offered yet."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        if self.split is not None and head.options.source:
            self._keep_to_source(head)
        if self.entry.cache is not None and self._lookup is None:
            again = partial(self._offer_pieces, head, pieces, checked=checked)
            if self._look_in_cache(Asked(head, self.form, pieces), again):
                return None
        self._enter(head)
        memory = self.service.memory
        by_engine = self.entry.fetches and self.split is None  # the mirror would read its slot
        fetch = None if head.plain or not names_regions(head) else memory.fetch(head, by_engine=by_engine)
        placed, size = head, head.tail_size
        if fetch is not None:
            placed, self._outlets, size = fetch.head, fetch.outlets, fetch.size
        slot = self._slot = self.service.door.slot(size)
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
        """With those that its model is told, before anybody looks whether the same was asked before."""
        forward = self.service.forward
        if forward is None or not self.entry.signature.told:
            return head
        return forward.added(head, self.sent_fields)

    def _offer_pictures(self, pictures: SentPictures, slot: Slot | None = None) -> None:
        """Offered at once, decoded when they are let in. Or as a file, for the model's device to decode; it
        may be in a slot already, which is the call's from here on."""
        self._slot = slot
        told_headers = self.service.forward is not None and self.entry.signature.told
        if self.entry.cache is not None and self._lookup is None and not told_headers:
            asked = Asked.of(pictures, self.form, slot)
            if self._look_in_cache(asked, lambda: self._offer_pictures(pictures, self._slot)):
                return
        service = self.service
        on_route = pictures.on_route
        self._enter(pictures.asked, gate=not on_route)
        if self.split is not None:
            pictures = pictures.for_model(service.pictures.model(self.entry))
        if pictures.asked.outputs:
            self._outlets = service.memory.outlets(pictures.asked.outputs)
        self._pictures = pictures
        entry = self.entry
        if service.sampler is not None:
            pictures.sampled = service.sampler.pick(entry, pictures, slot)
        if pictures.is_file:
            self._offer_file(pictures)
            return
        now, weight = monotonic(), pictures.weight
        refusal = self._cannot_decode(on_route, weight, now)
        if refusal is not None:
            if not self._moves_to_stable(refusal):
                raise refusal
            self._offer_pictures(pictures)
            return
        slot = service.door.slot(pictures.size)
        try:
            self._ready_in = service.pictures.workers.foresee(weight, now, self.client)
            self._offer(pictures.head, slot, 0, self._ready_in)
        finally:
            self._slot = slot  # until its tensors are in it
        self.state = OFFERED

    def _offer_file(self, pictures: SentPictures) -> None:
        service, slot = self.service, self._slot
        if pictures.on_route:
            service.pictures.offers(self.entry, monotonic())
        if slot is None:
            slot = self._slot = service.door.slot(pictures.size)
            pictures.put_file(slot.view)
        self._offer(pictures.head, slot, 0)

    def _cannot_decode(self, on_route: bool, weight: float, now: float) -> CarpoolError | None:
        """In time. On a route it was counted at its head, and the gate looks at how many were."""
        entry, pictures = self.entry, self.service.pictures
        self._until = until = promised(entry, self.arrived, self.deadline)
        if on_route:
            return pictures.refuses_now(entry, self.deadline, until, now, self.sender, weight, self.client)
        return pictures.cannot_decode(entry, until, now, weight, self.client)

    def _offer(self, head: RequestHead, slot: Slot, tail: int, ready_in: float | None = None) -> None:
        """The one way through the door."""
        self._offered_at = monotonic()
        if self.entry.signature.told:
            head = self._named(head)
            if self._pictures is not None:
                head = self._with_headers(head)
        infer, pictures = self.service.door.infer, self._pictures
        if pictures is not None and pictures.through is not None:
            infer = partial(pictures.through.infer, pictures)
        if self.entry.decoupled and self.entry.in_parts(self.one_answer):
            infer = partial(infer, part=self._part)
        sender = self.sender
        if self.entry.has_places and not sender.holder:
            sender = sender._replace(payer=self.client)
        self._call = infer(
            self.entry,
            head,
            slot,
            tail,
            self._done,
            arrived=self.arrived,
            deadline=self.deadline,
            sender=sender,
            ready_in=ready_in,
            admitted=None if ready_in is None else self._admitted,
        )
        self._slot = None
        self.state = RUNNING
        if self.split is not None and not self.entry.in_parts(self.one_answer):
            self._beside = self.service.mirror.watch(self, self._beside, head, slot, tail, ready_in)

    # ── between two versions ──

    def _moves_to_stable(self, error: CarpoolError) -> bool:
        """The candidate does not take it: from here on it is stable's, if it may be."""
        split = self.split
        if split is None or not split.spares(self.entry) or not may_run_again(error):
            return False
        lookup = self._lookup
        if lookup is not None:  # what stable says is no answer of the candidate's: nothing is kept of it
            if lookup.abandoned:
                return False
            self._lookup = None
            lookup.failed(error)
        self.service.mirror.fell_back(split, error)
        self.entry, self.row = split.stable, self.service.row(split.stable)
        return True

    def _runs_again(self, error: CarpoolError) -> bool:
        """The candidate had it and failed, or is about to be late: run it on stable, if that can be in time.
        Its inputs are still in their slot; pictures that stable wants in another size are decoded again."""
        beside = self._beside
        if beside is None or monotonic() >= promised(self.entry, self.arrived, self.deadline):
            return False
        if not beside.can_run_again(self._pictures) or not self._drop_input():
            return False
        if not self._moves_to_stable(error):
            return False
        call, self._call = self._call, None
        if call is not None:
            call.cancel()  # gives back what it holds, also if it is over
        try:
            self._slot, head, tail = beside.take()
            if self._pictures is not None:
                self._pictures = self._pictures.for_model(self.service.pictures.model(self.entry))
                head = self._pictures.head
            if self._slot is not None:
                self._offer(head, self._slot, tail)
            elif self._pictures is not None:
                self._offer_pictures(self._pictures)
        except CarpoolError as another:
            self._fail(another)
        except Exception as unknown:
            self._fail_unexpectedly(unknown)
        return True

    def too_slow(self) -> None:
        """If the candidate has not answered by now, stable just could."""
        if self.state == RUNNING:
            self._runs_again(DeadlineExceeded("the candidate takes too long", reason="deadline"))

    # ── answers that are kept ──

    def _look_in_cache(self, asked: Asked, again: Callable[[], object]) -> bool:
        """True: it is answered without the engine, or will be, or `again` makes the same offer later."""
        self._enter(asked.head, gate=False)
        self._lookup = lookup = Lookup(self, asked, again)
        return lookup.begin()

    def _resume(self, again: Callable[[], object]) -> None:
        """Go on, from wherever; never raises."""
        if self.state == OVER:
            return
        try:
            again()
        except CarpoolError as error:
            self._fail(error)
        except Exception as fault:
            self._fail_unexpectedly(fault)

    def _answer_kept(self, kept: Kept, told: Told) -> bool:
        """Unless the engine has it already: then that answer is as near. Never raises."""
        if self.state > OFFERED:
            return False
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        else:
            source = self.sender.source or self.head.options.source
            self.service.door.answered_from_cache(self.entry, self.arrived, self.head.batch, source)
        self.state = ANSWERING
        self.told = told
        self._offered_at = self._done_at = now = monotonic()
        try:
            self._write(Answer(), {}, kept)
        except CarpoolError as error:
            self._fail(error)
            return False
        except Exception as fault:
            self._fail_unexpectedly(fault)
            return False
        self.state = OVER
        self._lookup = None
        self._let_go()
        assert self.row is not None
        self.row.observe(REQUEST_SECONDS, now - self.arrived)
        if self.service.tracer.on:
            self.service.tracer.found(self, now)
        return True

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

    def _admitted(self) -> None:
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
        """A bug while the engine waits for the input. Never raises."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._fail_unexpectedly(fault)

    def _count_decoded(self, slot: Slot, seconds: float) -> None:
        now = monotonic()
        self.service.pictures.workers.came_true(self._ready_in, now - self._offered_at, now)
        self._offered_at = now
        self.state = RUNNING
        assert self.row is not None
        self.row.observe(DECODE_SECONDS, seconds)
        if self._beside is not None:
            self._beside.decoded(slot)

    # ── the answer ──

    def _part(self, answer: Answer) -> None:
        """One answer of several."""
        self._resume(partial(self._write_part, answer))
        call = self._call
        if self.state == OVER and call is not None:  # it could not be written: no more are wanted
            self._call = None
            call.cancel()

    def _done(self, answer: Answer) -> None:
        """Never raises: the door has nothing more to say of it."""
        try:
            self._take_answer(answer)
        except Exception as fault:
            answer.error = CarpoolError(f"the server failed on this request: {type(fault).__name__}")
            self.service.log.exception("request-failed", **self._what())
            self._finish(answer)

    def _take_answer(self, answer: Answer) -> None:
        if self._beside is not None and answer.error is not None and self._runs_again(answer.error):
            return
        self.state = ANSWERING
        self._done_at = monotonic()
        if self._lookup is not None:
            self._lookup.bytes_are_gone()
        pictures = self._pictures
        entry = self.entry
        in_parts = entry.decoupled and entry.in_parts(self.one_answer)
        if (pictures is None and self._outlets is None) or in_parts:
            self._finish(answer)
            return
        if pictures is None or answer.error is not None:
            self._put_out(answer)
            return
        self.service.pictures.ran(self.entry, answer.timing)
        if pictures.quick:
            try:
                composed = pictures.compose(answer.outputs)
            except Exception as error:
                self._composed(answer, None, error)
            else:
                self._composed(answer, composed, None)
        elif pictures.composes:
            self._answer_takes_long()
            work = partial(pictures.compose, answer.outputs)
            self.service.pictures.workers.finish(work, partial(self._composed, answer))
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
        if self._outlets is None:
            self._finish(answer)
        else:
            self._put_out(answer)

    def _put_out(self, answer: Answer) -> None:
        """Write outputs that are wanted there to the client's own memory, long ones in a thread."""
        outlets = self._outlets
        if outlets is None or answer.error is not None or self.state == OVER:
            self._finish(answer)
        elif outlets.put(answer.outputs, self.entry, self.service.threads, partial(self._finish, answer)):
            self._answer_takes_long()

    def _finish(self, answer: Answer, placed: Callable[[], Mapping[str, Placed]] | None = dict) -> None:
        """Answer, and give back what the door holds. Never raises, since others wait behind it."""
        call, self._call = self._call, None  # it knows us too
        try:
            if self.state == OVER:
                return  # the client left while a thread worked
            if answer.error is not None or placed is None:
                self._fail(answer.error or stopping(), answer.timing)
            else:
                self._answer(answer, placed())
            if answer.outside is not None:  # how long its client waited beyond what the engine sees
                now = monotonic()
                answer.outside.seen(self.unread + now - answer.sent, now)
        except CarpoolError as error:
            self._fail(error, answer.timing)
        except Exception as fault:
            self._fail_unexpectedly(fault)
        finally:
            if self._beside is not None:
                self._beside.failed()
                self._beside = None
            if call is not None:
                call.release()

    def _answer(self, answer: Answer, placed: Mapping[str, Placed]) -> None:
        """Send it; then those hear of it who only look on."""
        lookup = self._lookup
        if lookup is None:
            self._write(answer, placed)
        else:
            lookup.finish(answer, placed)
        self.state = OVER
        for observer in self.service.observers:
            observer.answered(self, answer)
        self._outlets = self._pictures = self._lookup = None
        now = monotonic()
        assert self.row is not None
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.answered(answer)
        if lookup is not None and lookup.abandoned:
            return  # its client left, which was counted; those who joined it are counted themselves
        self.row.observe(REQUEST_SECONDS, now - self.arrived)
        if self.service.tracer.on:
            self.service.tracer.answered(self, answer.timing, (self._offered_at, self._done_at, now))

    def _times(self, timing: Timing) -> Times:
        """With the front end's own seconds around those of the engine."""
        before, after = self._offered_at - self.arrived, monotonic() - self._done_at
        return Times(
            (before + timing.input) * 1e3,
            timing.queue * 1e3,
            timing.infer * 1e3,
            (after + timing.output) * 1e3,
            timing.batch,
        )

    # ── the other ends ──

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """Answer with an error, and give back everything."""
        state, self.state = self.state, OVER
        if state == OVER:
            return
        self._let_go()
        lookup, self._lookup = self._lookup, None  # it knows us, too
        if lookup is not None and lookup.failed(error):
            return
        now = monotonic()
        times: Times | None = None
        if timing is not None:
            times = self._times(timing)
        elif state != READING:
            times = Times(decode=(now - self.arrived) * 1e3)
        if self.split is not None:
            self.service.mirror.count_failure(self.split, self.entry, error)
        if self.row is not None:
            unheard = self.head.batch if times is None and not self.sender.again else 0
            if times is None:
                source = self.sender.source or self.head.options.source
                self.service.door.turned_away(self.entry, error, self.arrived, self.head.batch, source)
            count_failure(self.row, error, now - self.arrived, unheard)
        self._write_error(error, times)
        if self.service.tracer.on:
            self.service.tracer.failed(self, error, timing, now)

    def _fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach whoever called, which serves others too."""
        self.service.log.exception("request-failed", **self._what())
        self._fail(CarpoolError(f"the server failed on this request: {type(error).__name__}"))
        without_stack(error)

    def leave(self) -> None:
        """The client has gone: no answer is wanted any more, and what has not begun is not done. Unless
        others wait for it, too."""
        state = self.state
        if state == OVER:
            return
        waited_for = self._lookup is not None and self._lookup.left()
        if not waited_for:
            self.state = OVER
            self._lookup = None
        # Else a thread has the outputs, and `_finish` releases them.
        if state != ANSWERING and not waited_for:
            if self._aside_work is not None:
                self._aside_work.cancel()  # unless it has begun: then the slot is its
            self._let_go()
            call, self._call = self._call, None
            if call is not None:
                call.cancel()
        if self.row is not None:
            count_failure(self.row, LEFT, monotonic() - self.arrived if self.arrived else 0.0)
        if self.service.tracer.on:
            self.service.tracer.failed(self, Cancelled("the client left"), None, monotonic())

    def _let_go(self) -> None:
        """Of what the door does not hold: a connection may remember its last request for long."""
        if self._beside is not None:
            self._beside.failed()
            self._beside = None
        self._outlets = self._pictures = None
        self._drop_input()

    def _drop_input(self) -> bool:
        """Of what is still to be offered or decoded. False: a thread writes to the slot, and `_decoded` gives
        it back."""
        job = self._job
        if job is not None and not self.service.pictures.workers.drop(job):
            return False
        self._job = None
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
        return True


def _put(pieces: Sequence[Buffer], view: memoryview) -> None:
    """One behind the other, a part at a time: a thread that copies holds the interpreter."""
    position = 0
    for piece in pieces:
        source = memoryview(piece)
        for start in range(0, len(source), _COPIED):
            part = source[start : start + _COPIED]
            view[position : position + len(part)] = part
            position += len(part)
