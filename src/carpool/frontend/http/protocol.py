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
import logging
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from carpool.errors import CarpoolError, without_stack
from carpool.frontend.clients.accounts import Stake, client_of
from carpool.frontend.http.body import BodyIntake, CompressedBody, inflate, too_large
from carpool.frontend.http.borrowed_socket import BorrowedSocket, has_hung_up, skip_received
from carpool.frontend.http.exchange import (
    CONTINUE,
    Body,
    BodyPlan,
    Buffer,
    Collect,
    Exchange,
    Fault,
    HttpHead,
    Receive,
    bad_request,
    render_head,
    rest_of,
    stream_head,
)
from carpool.frontend.http.limits import KIB, MIB
from carpool.frontend.http.parsing import HeadFinder
from carpool.frontend.http.shared import BODY_READ, Shared

if TYPE_CHECKING:
    from carpool.frontend.http.long_answer import AnswerReader, LongAnswer, LongBody

logger = logging.getLogger(__name__)

HEAD: Final = 0
BODY: Final = 1
WAITING: Final = 2
LINGER: Final = 3
CLOSED: Final = 4

_REQUESTS_PER_TURN: Final = 16
_SECONDS_PER_TURN = 0.001
_MUCH = 16 * KIB  # what is read at once beyond this counts as work of the turn
_AT_A_STRETCH: Final = 4 * MIB  # of a body that was begun: many halves take more memory than some wholes
_CHUNKS_WORK: Final = 64 * KIB  # some chunks take as long as so many bytes
_CR: Final = 13

_COPIED_TOGETHER: Final = 64 * KIB
_WITHOUT_BODY = (204, 304)
_UNAVAILABLE: Final = 503
_RETRY_S = 1.0  # as such answers say
_MOST_PIECES: Final = 512  # the kernel takes 1024 per call


class Connection:
    """Implements a connection, whose hot path is `get_buffer` and `buffer_updated` for bodies, `_take_head`,
    `_begin` and `answer`.

    Bytes to send may belong to a slot: they are out or copied when a send returns.
    """

    __slots__ = (
        "_ahead", "_borrowed", "_busy", "_ended", "_exchange", "_expected", "_finder", "_head", "_intake",
        "_keep", "_known", "_known_raw", "_long", "_mark", "_partial", "_peer", "_phase", "_plan", "_queued",
        "_resting", "_rests", "_scratch", "_secure", "_served", "_shared", "_since", "_stalled",
        "_transport", "_written", "stake",
    )  # fmt: skip

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport
        self._secure = False  # over TLS: what the socket holds is not what is sent and received
        self._borrowed: BorrowedSocket
        self._peer = ""  # the client's address
        self._phase = HEAD
        self._since = monotonic()  # when the phase, or its current window, began
        self._served = False  # it had an answer before
        self._rests = 0  # how often it made much work of few bytes
        # what is read
        self._scratch = shared.head_buffer
        self._finder = HeadFinder(shared.limits)
        self._partial = False  # some of a head is here
        self._known_raw = b""  # the last head: a client's next one is often the same, byte for byte
        self._known: HttpHead | None = None
        self._expected: memoryview | None = None  # for the same once more, if a long body follows it
        self._ahead = b""  # read, but not used yet
        self._queued = False  # behind an earlier request of this connection: it lies unread for that reason
        self._busy = False  # requests are being taken out of what was read, further up the stack
        self._ended = False  # the client has sent all it will send
        # the current request
        self._head: HttpHead | None = None
        self._exchange: Exchange | None = None  # None again as soon as there is nothing left to answer
        self._plan: BodyPlan = None
        self._intake = BodyIntake(shared.limits, shared.accounts)
        self._mark = 0  # how much of the body was here when the window began
        self._keep = True  # the connection outlives the current request
        # what is sent
        self._stalled = False  # the client does not read as fast as we answer
        self._long: deque[LongAnswer] | None = None  # the first is being written
        self._resting = False  # what comes is not wanted, and not read yet
        self._written = 0  # bytes, ever
        self.stake: Stake | None = None  # of its client's account

    # ── what the loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._borrowed = BorrowedSocket(self._transport)
        self._secure = transport.get_extra_info("ssl_object") is not None
        # One byte that waits is one too many; over TLS none that waits would already count as 0.
        self._transport.set_write_buffer_limits(high=1 if self._secure else 0)
        self._peer = client_of(transport.get_extra_info("peername"))
        refusal = self._shared.enter(self, self._peer)
        if refusal is not None:
            self._fail(refusal)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._phase == LINGER:
            self._shared.lingering -= 1
        self._phase = CLOSED
        self._plan = None
        self._borrowed.give_back()
        self._intake.forget()
        self._abandon()
        self._shared.leave(self)

    def get_buffer(self, _sizehint: int) -> bytearray | memoryview:
        intake = self._intake
        into = intake.into
        used_up = self._shared.turns.left <= 0
        if into is not None:
            return into[intake.got : intake.got + (_MUCH if used_up else BODY_READ)]
        if used_up:
            self._scratch = self._shared.head_buffer
        expected = self._expected
        return self._scratch if expected is None or self._phase or self._ahead else expected

    def buffer_updated(self, nbytes: int) -> None:
        intake = self._intake
        if intake.into is not None:
            intake.got += nbytes
            turns = self._shared.turns
            if nbytes >= _MUCH:
                turns.spend(nbytes)
            if intake.got >= intake.room:
                self._room_used()
            # A client whose request is all here waits, too: there is nothing to keep from being read.
            if nbytes >= _MUCH and self._phase != WAITING and (nbytes == BODY_READ or turns.left <= 0):
                self._let_others_run()
        elif self._phase == LINGER:
            limit = self._shared.limits.drain_bytes
            intake.got += nbytes + skip_received(self._borrowed.get(), limit)
            if intake.got > limit:
                self._transport.abort()
        elif self._ahead:
            data, self._ahead = self._ahead + self._scratch[:nbytes], b""
            self._queued = True
            self._work(data, len(data))
        else:
            if self._phase == HEAD:
                self._queued = False
                if self._expected is not None and nbytes == len(self._expected) and self._is_as_expected():
                    return
            self._work(self._scratch, nbytes)

    def _is_as_expected(self) -> bool:
        """The head of before, and nothing else: its body comes straight to where it will be used."""
        if self._stalled or not self._shared.head_buffer.startswith(self._known_raw):
            return False
        self._begin(cast(HttpHead, self._known))
        if self._phase == BODY:
            if self._intake.into is None:
                self._after_part_of_body(0)
            elif self._shared.turns.left <= 0:
                self._let_others_run()
        return True

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

    def pause_writing(self) -> None:
        """The client does not read as fast as we answer."""
        self._stalled = True
        self._count_unread(self.unsent)

    def _count_unread(self, size: int) -> None:
        stake = self.stake
        if stake is not None and not self._shared.accounts.wait(stake, size, monotonic()):
            self._transport.abort()

    def resume_writing(self) -> None:
        self._stalled = False
        if self.stake is not None:
            self._shared.accounts.read(self.stake, self.stake.unread)
        if self._long:
            self._long[0].drained()
        if self._phase == HEAD:
            self._continue()

    # ── as its client's account asks ──

    @property
    def taken(self) -> int:
        return self._written - self.unsent

    @property
    def silent(self) -> bool:
        return self._phase == HEAD

    def give_up(self) -> None:
        self._shared.accounts.close(self.stake)
        if self._stalled:
            self._transport.abort()
        else:
            self._close()

    # ── what the server calls ──

    def check_time(self, now: float) -> None:
        """Called every sweep: end what has taken too long."""
        limits = self._shared.limits
        waited = now - self._since
        if self._stalled:
            uncounted = self.stake is None or self.stake.account is None  # else its account looks after it
            if uncounted and waited > limits.write_timeout_s:
                self._transport.abort()
            return
        if self.stake is not None and self._since > self.stake.since:
            self._shared.accounts.heard(self.stake, self._since)
        if self._phase == HEAD:
            if self._partial and waited > limits.header_timeout_s:
                self._fail(Fault(408, "the head took too long", "timeout"))
            elif waited > (limits.idle_timeout_s if self._served else limits.header_timeout_s):
                self._close()
        elif self._phase == BODY:
            self._check_body_time(now, waited)
        elif self._phase == LINGER and waited > limits.linger_timeout_s:
            self._transport.abort()
        elif self._phase == WAITING and not self._ended and not self._has_room():
            self._check_hung_up()

    def _check_hung_up(self) -> None:
        """It is not read while it has sent so much ahead, and its end is behind that."""
        exchange, closing = self._exchange, self._transport.is_closing()
        if exchange is None or exchange.on_disconnect is None or closing:
            return
        if has_hung_up(self._borrowed.descriptor()):
            self._close()

    def _check_body_time(self, now: float, waited: float) -> None:
        limits = self._shared.limits
        if self._exchange is None:
            if waited > limits.drain_timeout_s:
                self._transport.abort()
        elif waited > limits.body_timeout_s:
            received = self._intake.received
            if received - self._mark < limits.min_body_rate * waited:
                self._fail(Fault(408, "the body arrived too slowly", "timeout"))
            self._mark = received
            self._since = now

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def seconds_for_body(self, now: float) -> float:
        """How long a body that comes into memory of the app will have taken at its pace; 0 if there is none,
        or it has not been looked at for long enough."""
        intake = self._intake
        age = 0.0 if self._exchange is None else now - self._exchange.head_at
        if self._phase != BODY or intake.into is None or age < self._shared.limits.look_at_pace_s:
            return 0.0
        return age * intake.size / max(intake.got, 1)

    def cut_off_body(self) -> None:
        self._fail(Fault(408, "memory is short, and the body arrived too slowly", "timeout"))

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
        clock = self._shared.turns.clock
        ends = clock() + _SECONDS_PER_TURN
        self._busy = True
        try:
            while position < end and self._phase <= BODY:
                if turns == _REQUESTS_PER_TURN or (position and clock() >= ends):
                    turns = _REQUESTS_PER_TURN
                    break
                if self._phase == BODY:
                    if position and self._intake.chunks is not None and self._shared.turns.left <= 0:
                        turns = _REQUESTS_PER_TURN  # chunks are dear; requests that are here whole go on
                        break
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

    def _keep_for_later(self, rest: bytes, turns: int) -> None:
        if self._phase >= LINGER:
            return
        self._ahead = rest
        if turns == _REQUESTS_PER_TURN:
            self._let_others_run()
        elif not self._has_room():
            self._transport.pause_reading()

    def _has_room(self) -> bool:
        """Returns whether there is room for more of what is not used yet. A head is read to its end, which
        has a limit of its own."""
        head_goes_on = self._partial and not self._stalled
        return head_goes_on or len(self._ahead) < self._shared.limits.read_ahead_bytes

    def _continue(self) -> None:
        """Go on with what was read ahead: after an answer, a write that got through, a turn of the others."""
        if self._busy or self._resting or self._phase >= LINGER:
            return
        data, self._ahead = self._ahead, b""
        if data:
            self._queued = True
            self._work(data, len(data))
        if self._phase >= LINGER:
            return
        if self._phase == BODY and self._intake.chunks is None:
            self._scratch = self._shared.body_buffer
        if not self._ended:
            if self._has_room():
                self._transport.resume_reading()
        elif self._phase == HEAD and self._partial:
            self._fail(bad_request("the request ended within its head"))
        elif not self._ahead and self._phase == BODY:  # the client has said all that it will
            self.eof_received()
        elif not self._ahead and self._phase == HEAD:
            self._close()

    def _let_others_run(self) -> None:
        """A client with much to say takes turns: the loop would read on from it as long as there is more."""
        if self._phase >= LINGER:
            return
        self._transport.pause_reading()
        intake = self._intake
        if self._phase == BODY and self._ahead and intake.chunks is not None:
            self._shared.charge(self._peer, _SECONDS_PER_TURN)
            self._rests += 1
            self._shared.turns.rest(self._continue, self._rests)
            return
        begun = self._phase == BODY and intake.received % _AT_A_STRETCH >= BODY_READ
        self._shared.turns.wait(self._continue, first=begun)

    def _take_head(self, data: bytes | bytearray, position: int, end: int) -> int:
        raw = self._known_raw
        if raw and data.startswith(raw, position, end):
            if self._partial:
                self._partial = False
                self._finder.reset()
            known = cast(HttpHead, self._known)
            if self._expected is None and (known.content_length or 0) >= _MUCH:
                self._expected = memoryview(self._shared.head_buffer)[: len(raw)]
            self._begin(known)
            return position + len(raw)
        self._head = self._expected = None
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

    def _begin(self, head: HttpHead) -> None:
        now, shared = monotonic(), self._shared
        if shared.unread.seconds and now >= shared.unread.look_at:
            # A request that is rejected for having waited is never read to its end: it is measured here.
            shared.unread.look(None if self._queued else self._borrowed.get(), now)
        exchange = self._exchange = Exchange(self, head, now, self._peer, first=not self._served)
        self._head = head
        self._since = now
        self._keep = head.keep_alive and not shared.stopping
        self._phase = BODY if head.has_body else WAITING
        plan: BodyPlan = None
        try:
            if head.content_length and head.content_length > shared.limits.max_body_bytes:
                raise too_large(shared.limits.max_body_bytes)
            start = head.start
            try:
                plan = shared.app.begin(head, exchange) if start is None else start(exchange)
            except CarpoolError as refusal:
                if isinstance(refusal, Fault):
                    raise
                shared.app.refused(exchange, refusal)
            if self._phase == BODY and self._answers(exchange):
                intake = self._intake
                intake.start(head, plan, exchange)
                self._plan = plan
                self._mark = 0
                if intake.into is None and intake.chunks is None:
                    self._scratch = shared.body_buffer
                if head.expects_continue:
                    self.send(CONTINUE)
        except Exception as error:
            self._failed(error)
        if self._phase == WAITING and self._answers(exchange):
            self._deliver(plan, now, exchange)

    def _answers(self, exchange: Exchange) -> bool:
        """A method, since a compiler believes that an attribute is still what was put there a call ago."""
        return self._exchange is exchange

    def _take_body(self, data: bytes | bytearray, position: int, end: int) -> int:
        intake = self._intake
        try:
            position = intake.take(data, position, end)
        except Fault:
            if self._exchange is not None:
                raise
            self._linger()
            return end
        if intake.got >= intake.size if intake.chunks is None else intake.chunks.finished:
            self._body_done()
        elif position < end:  # there are many chunks
            self._shared.turns.spend(_CHUNKS_WORK)
        return position

    def _after_part_of_body(self, count: int) -> None:
        """All that was read is used, and more of the body is to come."""
        intake = self._intake
        if count >= _MUCH:
            self._shared.turns.spend(count)
            full = intake.into is None and count >= len(self._scratch)  # else the next read goes elsewhere
            if full or self._shared.turns.left <= 0:
                self._let_others_run()
        unwanted = (self._exchange is None or self._plan is None) and not self._resting
        if unwanted and intake.chunks is None and not self._secure:
            intake.skip_in_kernel(self._borrowed.get())
            if intake.got >= intake.size:
                self._body_done()

    def _body_done(self) -> None:
        plan, self._plan = self._plan, None
        shared = self._shared
        self._scratch = shared.head_buffer
        exchange = self._exchange
        if exchange is not None:
            self._phase = WAITING
            now = monotonic()
            if now >= shared.unread.look_at:
                borrowed = self._borrowed
                shared.unread.look(None if self._queued else borrowed.socket or borrowed.get(), now)
            exchange.unread = shared.unread.seconds
            self._deliver(plan, now, exchange)
            return
        self._intake.forget()
        self._next_request()

    def _deliver(self, plan: BodyPlan, now: float, exchange: Exchange) -> None:
        try:
            if type(plan) is Receive:
                self._intake.forget()
                plan.done(now)
                return
            body = self._intake.gathered
            self._intake.forget()
            if body and isinstance(body, CompressedBody) and isinstance(plan, Collect):
                inflate(plan, body, now, exchange, self._shared, self._failed)
            elif isinstance(plan, Collect):
                plan.done(b"" if body is None else body, now)
        except Exception as error:
            self._failed(error)

    # ── what an exchange calls ──

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        """Send the one answer of the current request, and go on."""
        self._exchange = None
        head = self._head
        if self._phase == BODY and self._keep:
            self._keep = self._worth_skipping(cast(HttpHead, head))
        if not self._keep or (head is not None and head.http_minor == 0):
            fields = self._with_end(fields)
        self._send_answer(status, fields, body, head is not None and head.method == "HEAD")
        if self._phase == WAITING:
            self._next_request()
        elif self._keep:
            self._intake.skip(cast(HttpHead, head))
            self._since = monotonic()
            if status == _UNAVAILABLE and self._intake.size - self._intake.received > MIB:
                self._rest()
        else:
            self._linger()

    def _rest(self) -> None:
        """Long bodies that were rejected are read past when they may come again, and no sooner: a client that
        sends them again and again would take the time of those that were admitted."""
        self._resting = True
        self._transport.pause_reading()
        self._shared.loop.call_later(_RETRY_S, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._continue()

    def _with_end(self, fields: bytes) -> bytes:
        """Adds what becomes of the connection, where its client would not expect that."""
        if not self._keep:
            return fields + b"connection: close\r\n"
        return fields + b"connection: keep-alive\r\n" if self._is_old() else fields

    def _is_old(self) -> bool:
        return self._head is not None and self._head.http_minor == 0

    def begin_answer(self, fields: bytes) -> bool:
        chunked = cast(HttpHead, self._head).http_minor == 1
        self._keep = self._keep and chunked
        self.send(stream_head(fields, self._shared.date, keep=self._keep, chunked=chunked))
        return chunked

    def end_answer(self) -> None:
        self._exchange = None
        self._next_request()

    def answer_long(self, exchange: Exchange, body: LongBody, reader: AnswerReader | None = None) -> None:
        line = self._long
        if line is None:
            line = self._long = deque()
        self._shared.long_answers.begin(exchange.payer, reader or self, body, line)

    def begin_long(self, fields: bytes, length: int | None) -> bool:
        if length is None:
            return self.begin_answer(fields)
        self.send(render_head(200, self._with_end(fields), length, self._shared.date))
        return False

    def end_long(self, *, chunked: bool) -> None:
        exchange = self._exchange
        if exchange is not None:
            exchange.forsake()
        if chunked:
            self.send(b"0\r\n\r\n")
        self.end_answer()

    def make_room(self) -> bool:
        """Makes room for an app that has no memory for this body."""
        return self._shared.cut_off_slowest(self)

    # ── after an answer, or instead of one ──

    def _worth_skipping(self, head: HttpHead) -> bool:
        """Returns whether the connection outlives an answer that comes before the end of the body."""
        if head.expects_continue and not self._intake.started:
            return False  # some clients send the body now and others don't: no telling what comes next
        left = 0 if head.content_length is None else head.content_length - self._intake.received
        return left <= self._shared.limits.drain_bytes

    def _next_request(self) -> None:
        if not self._keep:
            if self._ahead:
                self._linger()
            else:
                self._close()
            return
        self._phase = HEAD
        self._since = monotonic()
        self._served = True
        if (self._ahead or self._ended) and not self._busy:
            self._continue()

    def _reject(self, fault: Fault) -> None:
        """Writes an answer in the app's place, and a request's in the words of its clients."""
        head = None if self._exchange is None else self._exchange.head
        self._abandon()
        self._shared.answered_here[fault.reason] += 1
        status, body = fault.status, fault.body()
        if head is not None:
            status, body = self._shared.app.reworded(head, status, body)
        self.answer(status, fault.fields(), body)

    def _fail(self, fault: Fault) -> None:
        """Writes an answer in the app's place and ends the connection: what follows on it could be
        anything."""
        self._keep = False
        self._reject(fault)

    def _linger(self) -> None:
        """Everything is said; wait for the client to read it."""
        shared = self._shared
        full = shared.lingering >= shared.limits.max_lingering
        if self._ended or self._transport.is_closing() or full:
            self._close()
            return
        self._phase = LINGER
        self._since = monotonic()
        self._ahead = b""
        self._intake.forget()
        if not self._stalled:
            self._shared.accounts.close(self.stake)
        self._shared.lingering += 1
        self._transport.resume_reading()
        if not self._secure:  # TLS cannot close one direction alone
            self._transport.write_eof()

    def _close(self) -> None:
        """Close as soon as what was sent is out."""
        if self._phase == LINGER:
            self._shared.lingering -= 1
        self._phase = CLOSED
        self._intake.forget()
        self._abandon()
        self._transport.close()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Fault):
            fault = error
        else:
            logger.error("the app failed on a request", exc_info=error)
            without_stack(error)
            fault = Fault(500, "the server failed on this request", "internal")
        if self._exchange is not None:
            self._reject(fault)

    def _abandon(self) -> None:
        """Whatever the app does for the current request is no longer wanted."""
        exchange, self._exchange = self._exchange, None
        line, self._long = self._long, None
        for answer in line or ():
            answer.stop()
        callback = None if exchange is None else exchange.forsake()
        if callback is not None:
            try:
                callback()
            except Exception:
                logger.exception("the app failed when its client left")

    # ── sending ──

    def send(self, data: bytes) -> None:
        self._written += len(data)
        if self._stalled:
            self._count_unread(len(data))
        try:
            self._transport.write(data)
        except RuntimeError:
            self._transport.abort()  # uvloop raises when the handle is closed already

    def send_view(self, piece: Buffer) -> None:
        """Sends what may be overwritten when this returns: what the kernel does not take at once is
        copied."""
        sent = 0
        if not isinstance(piece, bytes):
            view = memoryview(piece)
            if not (self._stalled or self._secure or self.unsent):
                sent = self._borrowed.write([view])
                self._written += sent
            piece = bytes(view[sent:])
        if piece:
            self.send(piece)

    def _send_answer(self, status: int, fields: bytes, body: Body, head_only: bool) -> None:
        head_only = head_only or status in _WITHOUT_BODY
        date = self._shared.date
        if isinstance(body, bytes):
            start = render_head(status, fields, len(body), date)
            if head_only:
                self.send(start)
            elif len(body) <= _COPIED_TOGETHER:
                self.send(start + body)
            else:
                self._send_pieces([memoryview(start), memoryview(body)])
            return
        pieces = (body,) if isinstance(body, bytearray | memoryview) else body
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        start = render_head(status, fields, sum(map(len, views)), date)
        self._send_pieces([memoryview(start)] if head_only else [memoryview(start), *views])

    def _send_pieces(self, views: Sequence[memoryview]) -> None:
        size = sum(map(len, views))
        if size <= _COPIED_TOGETHER or self._stalled or self._secure or len(views) > _MOST_PIECES:
            self.send(b"".join(views))
            return
        sent = self._borrowed.write(views)
        if sent < size:
            # Copied: the transport would hold the buffers, and so the slot, until the client has read.
            self.send(rest_of(views, sent))
