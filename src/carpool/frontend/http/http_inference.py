"""One inference over HTTP: from its body, over a slot and the door, to its answer. This is the hot path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from carpool.errors import CarpoolError, without_stack
from carpool.frontend.client_memory import Fetch, Outlets, names_regions
from carpool.frontend.http.body_slots import larger_slot, no_slots
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import log
from carpool.frontend.http.infer_answer import TIMING, send_answer
from carpool.frontend.http.packing import check, is_in_place, is_plain, prepare, takes_long
from carpool.frontend.server_timing import times_of
from carpool.link.door import Answer, Call, Slot
from carpool.observe.columns import BYTES_RECEIVED, REQUEST_SECONDS
from carpool.observe.counters import count_failure
from carpool.types import InferResponse, RequestOptions, Timing
from carpool.wire.v2 import (
    Buffer,
    Placed,
    RequestHead,
    check_tail,
    encode_response,
    raw_head,
    read_head,
)

if TYPE_CHECKING:
    from carpool.frontend.http.infer import InferRoute, Target

T = TypeVar("T")
_Prepared: TypeAlias = tuple[RequestHead, list[Buffer]]
_NONE_PLACED: Mapping[str, Placed] = {}
_NOT_READ = RequestHead("", (), (), RequestOptions(), True, 0)
_LEFT = asyncio.CancelledError("the client left")


class Inference:
    """One request. It holds a slot until the door takes it over, then a call until the answer is sent."""

    __slots__ = (
        "_arrived",
        "_call",
        "_exchange",
        "_head",
        "_offered",
        "_outlets",
        "_route",
        "_slot",
        "_target",
    )

    def __init__(self, route: InferRoute, exchange: Exchange, target: Target, slot: Slot | None) -> None:
        self._route = route
        self._exchange = exchange
        self._slot = slot
        self._target = target
        self._call: Call | None = None
        self._outlets: Outlets | None = None  # for outputs that the client wants in its own memory
        self._arrived = 0.0
        self._offered = 0.0
        self._head = _NOT_READ
        exchange.on_disconnect = self._left

    # ── the request ──

    def more(self, received: int) -> memoryview | None:
        """The slot is full, and the body is longer."""
        slot, self._slot = self._slot, None
        assert slot is not None
        size = (self._exchange.head.content_length or 0) + 1
        try:
            self._slot = larger_slot(self._route.service.door, self._exchange, slot, received, size)
        except CarpoolError as error:
            self._arrived = self._exchange.head_at
            self._fail(error)
            return None
        return self._slot.view

    def received(self, at: float) -> None:
        """The body is in the slot."""
        self._arrived = at
        route = self._route
        slot = self._slot
        size = self._exchange.head.content_length or 0
        end = route.asked.header_length
        assert slot is not None
        assert end is not None
        route.service.server_row.add(BYTES_RECEIVED, size)
        try:
            view = slot.view
            self._target = route.current()  # what serves may have changed while the body came
            signature = self._target.entry.signature
            head = read_head(view[:end], signature) if end else raw_head(signature, size)
            check_tail(head, size - end, signature.model)
            if not is_plain(head):
                if not is_in_place(head):
                    self._prepare(bytes(view[:size]))
                    return
                check(head, view[end:size])
                self._outlets = route.service.memory.outlets(head.outputs)
            self._offer(head, slot, end)
        except CarpoolError as error:
            self._fail(error)

    def collected(self, body: bytes | bytearray, at: float) -> None:
        """The body was chunked, compressed or all JSON: only its tensors go into a slot."""
        self._arrived = at
        self._route.service.server_row.add(BYTES_RECEIVED, self._exchange.head.content_length or len(body))
        try:
            self._target = self._route.current()
            self._prepare(body)
        except CarpoolError as error:
            self._fail(error)

    def _prepare(self, body: bytes | bytearray) -> None:
        """The rarer requests: their tensors have to be checked one by one, or made binary first."""
        self._let_go()
        route = self._route
        length = route.asked.header_length
        signature = self._target.entry.signature
        if not takes_long(len(body), length, signature):
            self._offer_prepared(prepare(body, length, signature))
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(
            route.service.threads, route.service.long_json.prepare, body, length, signature
        )
        work.add_done_callback(partial(self._go_on, self._offer_prepared))

    def _go_on(self, step: Callable[[T], None], work: asyncio.Future[T]) -> None:
        """After a thread's work: the next step, unless it failed or nobody waits any more."""
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or not self._exchange.pending:
            self._let_go()
            return
        try:
            if error is not None:
                raise error
            self._renew()
            step(work.result())
        except CarpoolError as known:
            self._fail(known)
        except Exception as unknown:
            self._fail_unexpectedly(unknown)

    def _renew(self) -> None:
        """Threads take their time: meanwhile a model may have been replaced by one that takes the same."""
        with contextlib.suppress(CarpoolError):
            target = self._route.current()
            if target.entry.signature.is_like(self._target.entry.signature):
                self._target = target

    def _offer_prepared(self, prepared: _Prepared) -> None:
        head, pieces = prepared
        self._head = head
        service = self._route.service
        fetch = service.memory.fetch(head) if names_regions(head) else None
        slot = self._slot = service.door.slot(sum(map(len, pieces)) if fetch is None else fetch.size)
        if slot is None:
            raise no_slots()
        position = 0
        for piece in pieces:
            slot.view[position : position + len(piece)] = piece
            position += len(piece)
        if fetch is None:
            self._offer(head, slot, 0)
        else:
            self._fetch(fetch, slot)

    def _fetch(self, fetch: Fetch, slot: Slot) -> None:
        """Inputs from the client's own memory."""
        self._outlets = fetch.outlets
        if not fetch.takes_long:
            fetch.into(slot.view)
            self._offer(fetch.head, slot, 0)
            return

        def fetched(work: asyncio.Future[None]) -> None:
            self._slot = slot
            self._go_on(lambda _nothing: self._offer(fetch.head, slot, 0), work)

        self._slot = None  # the thread writes to it: until it is done nobody may give it back
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._route.service.threads, fetch.into, slot.view).add_done_callback(fetched)

    def _offer(
        self,
        head: RequestHead,
        slot: Slot,
        tail: int,
        ready_in: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> None:
        route = self._route
        entry = self._target.entry
        options = head.options
        asked = route.asked
        deadline = self._exchange.head_at + asked.budget
        if options.timeout is not None and entry.mode != "knobs":
            deadline = min(deadline, self._arrived + options.timeout)
        self._head = head
        self._offered = now = monotonic()
        sender = asked.sender.with_options(options)
        if ready_in is None and not (options.priority or sender.priority):  # else only the engine can say
            # The body took its time, and the engine, which all wait for, need not hear of who is too late.
            refusal = route.service.door.refuses(entry, deadline, now, sender)
            if refusal is not None:
                raise refusal
        self._call = route.service.door.infer(
            entry,
            head,
            slot,
            tail,
            self._done,
            arrived=self._arrived,
            deadline=deadline,
            sender=sender,
            ready_in=ready_in,
            admitted=admitted,
        )
        self._slot = None

    # ── the answer ──

    def _done(self, answer: Answer) -> None:
        call, self._call = self._call, None  # it knows us too: let go, or only the collector could free both
        outlets, self._outlets = self._outlets, None
        assert call is not None
        if outlets is None or answer.error is not None:
            self._finish(answer, call, monotonic())
        else:
            self._put_out(outlets, answer, call)

    def _put_out(self, outlets: Outlets, answer: Answer, call: Call) -> None:
        """Write outputs to the client's own memory, long ones in a thread."""
        done_at = monotonic()

        def written(placed: Callable[[], Mapping[str, Placed]] | None) -> None:
            if placed is None:
                call.release()
            else:
                self._finish(answer, call, done_at, placed)

        if outlets.put(answer.outputs, self._target.entry, self._route.service.threads, written):
            self._exchange.on_disconnect = None  # the model's work is done: there is nothing left to save

    def _finish(
        self,
        answer: Answer,
        call: Call,
        done_at: float,
        placed: Callable[[], Mapping[str, Placed]] = lambda: _NONE_PLACED,
    ) -> None:
        try:
            if answer.error is None:
                self._answer(answer, done_at, placed())
            else:
                self._fail(answer.error, answer.timing)
            answer.left(self._exchange.unread)
        except CarpoolError as error:
            self._fail(error, answer.timing)
        except Exception as error:
            self._fail_unexpectedly(error)
        finally:
            call.release()

    def _answer(self, answer: Answer, done_at: float, placed: Mapping[str, Placed]) -> None:
        route = self._route
        entry, row, _ = self._target
        head = self._head
        response = InferResponse(entry.name, list(answer.outputs), entry.version, head.id)
        encoded = encode_response(
            response,
            head.outputs,
            binary_output=head.binary_output,
            labels=entry.labels,
            batched=entry.signature.max_batch > 0,
            placed=placed,
        )
        timing = answer.timing
        now = monotonic()
        times = times_of(timing, self._offered - self._arrived, now - done_at)
        send_answer(route.service, self._exchange, route.asked, encoded, times)
        row.observe(REQUEST_SECONDS, now - self._arrived)
        tracer = route.service.tracer
        if tracer.on:
            tracer.answered(entry, head, timing, self._arrived, self._offered, now)

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """Answer with an error, and let go of the slot if the door has not taken it."""
        now = monotonic()
        more = b""
        route, entry = self._route, self._target.entry
        source = route.asked.sender.source or self._head.options.source
        if timing is None:
            route.service.door.turned_away(entry, error, self._arrived, self._head.batch, source)
        else:
            more = TIMING % times_of(timing, self._offered - self._arrived, 0.0)
        route.service.fair.tell(self._exchange, error, entry, source, more)
        self._let_go()
        count_failure(self._target.row, error, now - self._arrived)

    def _fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach whoever called, which serves others too."""
        log.exception("request-failed", model=self._target.entry.name, path=self._exchange.head.path)
        self._fail(CarpoolError(f"the server failed on this request: {type(error).__name__}"))
        without_stack(error)

    def _left(self) -> None:
        """No answer is wanted any more, and `_done` will not come."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._let_go()
        seconds = monotonic() - self._arrived if self._arrived else 0.0
        count_failure(self._target.row, _LEFT, seconds)

    def _let_go(self) -> None:
        """Of the slot, and of the client's regions: a connection may remember its last request for long."""
        self._outlets = None
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
