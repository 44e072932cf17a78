"""One client connection: requests are read, handed to the app and answered, one after the other.

A connection is in one phase at a time:

    HEAD ──► BODY ──► WAITING ──► HEAD …      a request without a body skips BODY
      │        │         │
      └────────┴─────────┴──► LINGER ──► CLOSED

An answer may come in BODY already (a refusal, say); the rest of the body is then read past. LINGER is a
connection whose last answer is out while its client may still be sending: closed at once, that answer could
be lost on the way.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import cast

from carpool.frontend.http.answering import BODY, CLOSED, HEAD, LINGER, WAITING, Answering, peer_of
from carpool.frontend.http.body import skip_received, too_large
from carpool.frontend.http.delivery import deliver
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange, Receive
from carpool.frontend.http.limits import KIB, MIB
from carpool.frontend.http.parsing import HeadFinder, RequestHead
from carpool.frontend.http.responses import CONTINUE, Fault, bad_request
from carpool.frontend.http.shared import BODY_READ, Shared

_REQUESTS_PER_TURN = 16
_SECONDS_PER_TURN = 0.001
_MUCH = 16 * KIB  # what is read at once beyond this counts as work of the turn
_AT_A_STRETCH = 4 * MIB  # of a body, once it was begun: many halves would take more memory than some wholes
_CHUNKS_WORK = 64 * KIB  # some chunks take as long as so many bytes
_CR = 13


class Connection(Answering):
    """The hot path: `get_buffer` and `buffer_updated` for bodies, `_take_head`, `_begin` and `answer`."""

    __slots__ = ("_finder", "_known", "_known_raw", "_mark", "_partial", "_peer", "_plan", "_scratch")

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._scratch = shared.head_buffer
        self._finder = HeadFinder(shared.limits)
        self._partial = False  # some of a head is here
        self._known_raw = b""  # the last head: a client's next one is often the same, byte for byte
        self._known: RequestHead | None = None
        self._peer = ""  # the client's address
        self._plan: BodyPlan = None
        self._mark = 0  # how much of the body was here when the window began

    # ── what the loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._secure = transport.get_extra_info("ssl_object") is not None
        # One byte that waits is one too many; over TLS none that waits would already count as 0.
        self._transport.set_write_buffer_limits(high=1 if self._secure else 0)
        self._peer = peer_of(transport)
        refusal = self._shared.enter(self)
        if refusal is not None:
            self._fail(refusal)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._phase == LINGER:
            self._shared.lingering -= 1
        self._phase = CLOSED
        self._plan = None
        self._give_back()
        self._intake.forget()
        self._abandon()
        self._shared.leave(self)

    def get_buffer(self, _sizehint: int) -> bytearray | memoryview:
        intake = self._intake
        into = intake.into
        used_up = self._shared.turns.used_up
        if into is not None:
            return into[intake.got : intake.got + (_MUCH if used_up else BODY_READ)]
        if used_up:
            self._scratch = self._shared.head_buffer
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        intake = self._intake
        into = intake.into
        if into is not None:
            intake.got += nbytes
            if nbytes >= _MUCH:
                self._shared.turns.spend(nbytes)
            if intake.got >= intake.room:
                self._room_used()
            if nbytes == BODY_READ or (nbytes >= _MUCH and self._shared.turns.used_up):
                self._let_others_run()
        elif self._phase == LINGER:
            limit = self._shared.limits.drain_bytes
            intake.got += nbytes + skip_received(self._borrow(), limit)
            if intake.got > limit:
                self._transport.abort()
        elif self._ahead:
            data, self._ahead = self._ahead + self._scratch[:nbytes], b""
            self._queued = True
            self._work(data, len(data))
        else:
            if self._phase == HEAD:
                self._queued = False
            self._work(self._scratch, nbytes)

    def _room_used(self) -> None:
        """The body is complete, or its buffer is full."""
        intake = self._intake
        if intake.got >= intake.size:
            if intake.got > intake.size:
                self._ahead = intake.beyond()
            self._body_done()
            return
        try:
            intake.grow()
        except Exception as error:
            self._failed(error)

    def eof_received(self) -> bool:
        """The client sends no more, and has left or still reads: see `Exchange` for how that is decided."""
        self._ended = True
        if self._phase == WAITING:
            if self._exchange is not None and self._exchange.on_disconnect is not None:
                self._close()
        elif self._phase == HEAD or (self._phase == BODY and self._ahead):
            self._continue()
        elif self._phase == BODY and self._exchange is not None:
            self._fail(bad_request(f"the body ended after {self._intake.received} bytes"))
        else:
            self._close()
        return not self._secure  # TLS has no half-closed connections: the transport ends this one

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase == HEAD:
            self._continue()

    # ── what the server calls ──

    def check_time(self, now: float) -> None:
        """Called every sweep: end what has taken too long."""
        limits = self._shared.limits
        waited = now - self._since
        if self._stalled:
            if self._reads_too_slowly(now):
                self._transport.abort()
        elif self._phase == HEAD:
            if self._partial and waited > limits.header_timeout_s:
                self._fail(Fault(408, "the head took too long", "timeout"))
            elif waited > (limits.idle_timeout_s if self._served else limits.header_timeout_s):
                self._close()
        elif self._phase == BODY:
            self._check_body_time(now, waited)
        elif self._phase == LINGER and waited > limits.linger_timeout_s:
            self._transport.abort()

    def _check_body_time(self, now: float, waited: float) -> None:
        limits = self._shared.limits
        if self._exchange is None:
            if waited > limits.drain_timeout_s:
                self._transport.abort()
        elif waited > limits.body_timeout_s:
            received = self._intake.received
            if received - self._mark < limits.min_body_rate * waited:
                self._fail(Fault(408, "the body came too slowly", "timeout"))
            self._mark = received
            self._since = now

    def seconds_for_body(self, now: float) -> float:
        """How long a body that comes into memory of the app will have taken at its pace; 0 if there is none,
        or it has not been looked at for long enough."""
        intake = self._intake
        age = 0.0 if self._exchange is None else now - self._exchange.head_at
        if self._phase != BODY or intake.into is None or age < self._shared.limits.look_at_pace_s:
            return 0.0
        return age * intake.size / max(intake.got, 1)

    def cut_off_body(self) -> None:
        self._fail(Fault(408, "memory is short, and the body came too slowly", "timeout"))

    def retire(self) -> None:
        """The server stops: go now if idle, else after the answer."""
        self._keep = False
        if self._phase == HEAD and not self._ahead:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    # ── reading ──

    def _work(self, data: bytes | bytearray, end: int) -> None:
        """Take requests out of `data` until it is used up or something has to be waited for."""
        position = turns = 0
        ends = monotonic() + _SECONDS_PER_TURN
        self._busy = True
        try:
            while position < end and self._phase <= BODY:
                if turns == _REQUESTS_PER_TURN or (position and self._had_its_turn(ends)):
                    turns = _REQUESTS_PER_TURN
                    break
                if self._phase == BODY:
                    position = self._take_body(data, position, end)  # of many chunks, a few
                    continue
                if self._stalled:
                    break
                turns += 1
                position = self._take_head(data, position, end)
                if self._partial:
                    break
        except Fault as fault:
            self._fail(fault)
        finally:
            self._busy = False
        if position < end:
            self._keep_for_later(bytes(memoryview(data)[position:end]), turns)
        elif self._phase == BODY:
            self._after_part_of_body(end)

    def _had_its_turn(self, ends: float) -> bool:
        """Chunks are dear. Requests that are here whole are not held up for those who bring more."""
        if self._phase == BODY and self._intake.chunked and self._shared.turns.used_up:
            return True
        return monotonic() >= ends

    def _keep_for_later(self, rest: bytes, turns: int) -> None:
        if self._phase >= LINGER:
            return
        self._ahead = rest
        if turns == _REQUESTS_PER_TURN:
            self._let_others_run()
        elif not self._partial and len(rest) >= self._shared.limits.read_ahead_bytes:
            self._transport.pause_reading()

    def _continue(self) -> None:
        """Go on with what was read ahead: after an answer, a write that got through, a turn of the others."""
        if self._busy or self._phase >= LINGER:
            return
        data, self._ahead = self._ahead, b""
        if data:
            self._queued = True
            self._work(data, len(data))
        if self._phase >= LINGER:
            return
        if self._phase == BODY and not self._intake.chunked:
            self._scratch = self._shared.body_buffer
        if not self._ended:
            if len(self._ahead) < self._shared.limits.read_ahead_bytes:
                self._transport.resume_reading()
        elif self._phase == HEAD and self._partial:
            self._fail(bad_request("the request ended within its head"))
        elif not self._ahead:  # else there is more to come back for
            self._nothing_left()

    def _nothing_left(self) -> None:
        """The client has said all that it will."""
        if self._phase == BODY:
            self.eof_received()
        elif self._phase == HEAD:
            self._close()

    def _let_others_run(self) -> None:
        """A client with much to say takes turns: the loop would read on from it as long as there is more."""
        if self._phase >= LINGER:
            return
        self._transport.pause_reading()
        intake = self._intake
        if self._phase == BODY and self._ahead and intake.chunked:
            self._shared.turns.rest(self._continue)
            return
        begun = self._phase == BODY and intake.received % _AT_A_STRETCH >= BODY_READ
        self._shared.turns.wait(self._continue, first=begun)

    def _take_head(self, data: bytes | bytearray, position: int, end: int) -> int:
        raw = self._known_raw
        if raw and data.startswith(raw, position, end):
            if self._partial:
                self._partial = False
                self._finder.reset()
            self._begin(cast(RequestHead, self._known))
            return position + len(raw)
        self._head = None
        while data.startswith(b"\r\n", position, end):
            position += 2  # some clients send an empty line too many after a body
            self._partial = False
        if position == end:
            return position
        after = self._finder.end_of_head(data, position, end)
        if after < 0:
            if not self._partial:
                self._partial = True
                if data[position] != _CR:  # half an empty line does not count as the start of a head
                    self._since = monotonic()
            return position
        raw = bytes(memoryview(data)[position:after])
        self._known = self._shared.heads.read(raw, self._finder)
        self._known_raw = raw
        self._finder.reset()
        self._partial = False
        self._begin(self._known)
        return after

    def _begin(self, head: RequestHead) -> None:
        now = monotonic()
        shared = self._shared
        if shared.unread.seconds:  # whoever is turned away for it has no body to look at
            self._look_how_long_unread(now)
        exchange = Exchange(self, head, now, self._peer, first=not self._served)
        self._exchange = exchange
        self._head = head
        self._since = now
        self._keep = head.keep_alive and not shared.stopping
        self._phase = BODY if head.has_body else WAITING
        plan: BodyPlan = None
        try:
            if head.content_length and head.content_length > shared.limits.max_body_bytes:
                raise too_large(shared.limits.max_body_bytes)
            plan = shared.app.begin(head, exchange)
            if self._phase == BODY and self._exchange is not None:
                self._start_body(head, plan)
        except Exception as error:
            self._failed(error)
        if self._phase == WAITING and self._exchange is exchange:
            self._deliver(plan, now, exchange)

    def _start_body(self, head: RequestHead, plan: BodyPlan) -> None:
        intake = self._intake
        intake.start(head, plan)
        self._plan = plan
        self._mark = 0
        if intake.into is None and not intake.chunked:
            self._scratch = self._shared.body_buffer
        if head.expects_continue:
            self._send(CONTINUE)

    def _take_body(self, data: bytes | bytearray, position: int, end: int) -> int:
        intake = self._intake
        try:
            position = intake.take(data, position, end)
        except Fault:
            if self._exchange is not None:
                raise
            self._linger()
            return end
        if intake.finished:
            self._body_done()
        elif position < end:  # there are many chunks
            self._shared.turns.spend(_CHUNKS_WORK)
        return position

    def _after_part_of_body(self, count: int) -> None:
        """All that was read is used, and more of the body is to come."""
        intake = self._intake
        if count >= _MUCH:
            self._shared.turns.spend(count)
            if count >= len(self._scratch) or self._shared.turns.used_up:
                self._let_others_run()
        if not intake.chunked and not self._secure and (self._exchange is None or self._plan is None):
            intake.skip_in_kernel(self._borrow())
            if intake.finished:
                self._body_done()

    def _body_done(self) -> None:
        plan, self._plan = self._plan, None
        shared = self._shared
        self._scratch = shared.head_buffer
        exchange = self._exchange
        if exchange is not None:
            self._phase = WAITING
            now = monotonic()
            self._look_how_long_unread(now)
            exchange.unread = shared.unread.seconds
            self._deliver(plan, now, exchange)
            return
        self._intake.forget()
        self._next_request()

    def _deliver(self, plan: BodyPlan, now: float, exchange: Exchange) -> None:
        body = self._intake.finish()
        try:
            if isinstance(plan, Receive):
                plan.done(now)
            elif isinstance(plan, Collect):
                deliver(plan, body, now, exchange, self._shared, self._failed)
        except Exception as error:
            self._failed(error)
