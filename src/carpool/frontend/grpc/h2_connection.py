"""One client connection of gRPC: frames are read, calls are opened, fed and answered, all at once.

    PREFACE ──► OPEN ──► LEAVING ──► CLOSED     leaving: it takes no new calls, and goes after the last

What a frame says is checked as RFC 9113 has it: a breach ends the connection with a word why. Clients that
keep a server busy with nothing are known by it: each frame that asks for work and brings none costs credit,
which time and calls that are answered give back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

from carpool.frontend.clients.accounts import Stake, client_of
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.h2_frames import FRAME, FRAME_BYTES, Breach, Code
from carpool.frontend.grpc.h2_outgoing import Outgoing
from carpool.frontend.grpc.h2_shared import CONNECTION_WINDOW, LARGEST_FRAME, MOST_CALLS, H2Shared
from carpool.frontend.grpc.rpc import Rpc
from carpool.frontend.grpc.rpc_heads import CallHead, HeadReader, Status, refused_head
from carpool.frontend.http.borrowed_socket import has_hung_up

PREFACE: Final = 0
OPEN: Final = 1
LEAVING: Final = 2
CLOSED: Final = 3

_MUCH = 16 * 1024  # what is read at once beyond this counts as work of the turn
_DIRECT: Final = 32 * 1024  # bytes of a message that are worth a read of their own
_FEW: Final = 8  # connections that wait for their turn, with all that was read of them
_UNSENT: Final = 256 * 1024  # what may wait in the transport before calls wait, too
_SECONDS_PER_TURN = 0.001
_MOST_CREDIT: Final = 1000
_CREDIT_PER_S: Final = 100
_MOST_EARLY: Final = 1024
_KEEPALIVE_S: Final = 60.0  # a client that is gone is noticed within this and the next
_KEEPALIVE_WAIT_S: Final = 20.0
_CHARGED_AT_S: Final = 0.0005
_LONGEST_REST_S: Final = 1.0
# about what a connection, or a call, costs that came to nothing
_BREACH_S: Final = 0.005
_CALL_S: Final = 0.0003
TOO_LONG_HEAD: Final = 48  # credit
_MISTAKES: Final = "too many messages that are mistakes"
_OURS: Final = b"carpool1"
_ALIVE: Final = b"carpool2"


class H2Connection:
    """Implements a connection, whose hot path is `get_buffer`, `buffer_updated`, `_parse`, `_head_complete`
    and `send_whole`."""

    __slots__ = (
        *("_ahead", "_ahead_since", "_block", "_block_ends", "_block_number", "_credit", "_cuts"),
        *("_data_bytes", "_direct", "_early", "_ends", "_final", "_heads", "_heard", "_last", "_left"),
        *("_mark", "_mark_at", "_owed", "_pad", "_phase", "_pinged_at", "_quiet_since"),
        *("_receiver", "_rests", "_rpcs", "_settled", "_shared", "_since", "_swept_at", "_transport"),
        *("_window", "outgoing", "stake"),
    )

    def __init__(self, shared: H2Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport
        self._phase = PREFACE
        self._final = False  # no call after the last one counts
        self._since = self._swept_at = self._quiet_since = monotonic()
        self._settled = False  # the client's first settings are here
        self._credit = _MOST_CREDIT
        self._rests = False  # it has made us decode too much, and is not read for a while
        self.stake: Stake | None = None
        # what is read
        self._heads = HeadReader(shared.limits.max_header_bytes)
        self._ahead = b""  # read, but not used yet
        self._ahead_since = 0.0
        self._heard = False  # anything, since the last look
        self._block = b""  # of a head that goes on in the next frame
        self._block_number = 0
        self._block_ends = False
        self._last = 0  # the highest number of a call
        self._early: dict[int, None] = {}  # calls that ended before their client had said all
        # the frame of data that is being read
        self._receiver: Rpc | None = None
        self._left = 0  # of its content
        self._pad = 0  # behind that
        self._ends = False
        self._direct = False  # the loop reads straight into a message
        self._cuts = False  # its client cuts messages into frames, which cannot be read like that
        self._window = CONNECTION_WINDOW
        self._owed = 0  # of the window, used and not given back yet
        self._data_bytes = 0
        self._mark, self._mark_at = 0, 0.0  # how much data there was when the window of time began
        # what is sent
        self.outgoing: Outgoing[Rpc] = Outgoing(
            shared.loop, shared.accounts, self._sent, self._earn, self._given_up, shared.turns.wait
        )
        self._rpcs = self.outgoing.rpcs
        self._pinged_at = 0.0

    # ── what the loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outgoing.connect(self._transport)
        self.outgoing.client = client_of(transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=_UNSENT)
        self.outgoing.send(self._shared.greeting)
        refusal = self._shared.enter(self)
        if refusal is not None:
            self._breach(refusal)
        else:
            self._rests_for(0.0)  # a client cut off for a flood reconnects, and still pays for it

    def connection_lost(self, _exc: Exception | None) -> None:
        self._phase = CLOSED
        self._shared.leave(self)
        self._abandon()

    def get_buffer(self, _sizehint: int) -> bytearray | memoryview:
        if self._receiver is not None and self._left >= _DIRECT:
            room = self._receiver.room()
            if room is not None and len(room) >= _DIRECT:
                self._direct = True
                return room[: self._left]
        self._direct = False
        shared = self._shared
        return shared.buffer if self._cuts and shared.turns.waiting < _FEW else shared.less

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self._phase == CLOSED:
            return
        turns = self._shared.turns
        if nbytes >= _MUCH:
            turns.spend(nbytes)
        if self._direct:
            self._received(nbytes)
        elif self._ahead:
            data, self._ahead = self._ahead + self._shared.buffer[:nbytes], b""
            self._work(data, len(data))
        else:
            self._work(self._shared.buffer, nbytes)
        used_up = nbytes >= _MUCH and turns.left <= 0
        # A client that waits for us, too, has nothing that could be kept from being read.
        if used_up and (self._left or self._ahead or not self.outgoing.is_awaited):
            self._let_others_run()

    def eof_received(self) -> bool:
        """Closes the connection when its client stops sending: HTTP/2 has no half-closed connections."""
        return False

    def pause_writing(self) -> None:
        """The client does not read as fast as we answer: then we do not read either."""
        self.outgoing.stalled = True
        self._transport.pause_reading()
        stake = self.stake
        if stake is not None and not self._shared.accounts.wait(stake, self.outgoing.unsent, monotonic()):
            self._transport.abort()

    def resume_writing(self) -> None:
        self.outgoing.stalled = False
        if self.stake is not None:
            self._shared.accounts.read(self.stake, self.stake.unread)
        if self._phase != CLOSED:
            self._mark, self._mark_at = self._data_bytes, monotonic()  # meanwhile nothing could come
            self.outgoing.pump_later()
            self._continue()

    # ── as its client's account asks ──

    @property
    def taken(self) -> int:
        """Returns a number made of what waits for its socket, which is more only when that has room again."""
        return -self.outgoing.unsent

    @property
    def silent(self) -> bool:
        return not self._rpcs

    def give_up(self) -> None:
        self._shared.accounts.close(self.stake)
        if self.outgoing.stalled:
            self._transport.abort()
        else:
            self._breach(Breach(Code.ENHANCE_YOUR_CALM, "this client has used its share of all connections"))

    # ── what the server calls ──

    def check_time(self, now: float) -> None:
        """Called every sweep: end what has taken too long."""
        limits = self._shared.limits
        self._earn(int(_CREDIT_PER_S * (now - self._swept_at)))
        self._swept_at = now
        if self._phase == CLOSED:
            if now - self._since > limits.write_timeout_s:
                self._transport.abort()
        elif not self._settled:
            if now - self._since > limits.header_timeout_s:
                self._breach(Breach(Code.SETTINGS_TIMEOUT, "no settings were received"))
        elif self.outgoing.stalled:
            pass  # its account has an eye on it
        elif self._ahead_since and now - self._ahead_since > limits.header_timeout_s:
            self._breach(Breach(Code.ENHANCE_YOUR_CALM, "a frame took too long"))
        elif self._is_gone():
            self._transport.abort()
        else:
            self._check_alive(now)
            self._check_calls(now)

    def _is_gone(self) -> bool:
        """Its client has hung up, behind what is not read while it rests or others have their turn."""
        if self._transport.is_closing() or not (self._rests or self._ahead):
            return False
        return has_hung_up(self._transport.get_extra_info("socket").fileno())

    def _check_alive(self, now: float) -> None:
        if self._heard:
            self._heard, self._quiet_since, self._pinged_at = False, now, 0.0
            if self.stake is not None:
                self._shared.accounts.heard(self.stake, now)
        elif self._pinged_at:
            if now - self._pinged_at > _KEEPALIVE_WAIT_S:
                self._transport.abort()
        elif now - self._quiet_since > _KEEPALIVE_S:
            self._pinged_at = now
            self.outgoing.send(h2.frame(h2.PING, 0, 0, _ALIVE))

    def _check_calls(self, now: float) -> None:
        """Ends messages that come too slowly."""
        limits = self._shared.limits
        if now - self._mark_at <= limits.body_timeout_s:
            return
        if self._data_bytes - self._mark < limits.min_body_rate * (now - self._mark_at):
            for rpc in list(self._rpcs.values()):
                if rpc.incomplete and now - rpc.since > limits.body_timeout_s:
                    rpc.cut(Status.DEADLINE_EXCEEDED, "the message arrived too slowly")
        self._mark, self._mark_at = self._data_bytes, now

    def retire(self) -> None:
        """Ends the connection in order, since the server stops. First it asks the client for no more calls;
        those that are on their way still count, until the client has answered."""
        if self._phase == OPEN:
            self._phase = LEAVING
            self.outgoing.send(h2.goaway(h2.LARGEST_WINDOW, Code.NO_ERROR) + h2.frame(h2.PING, 0, 0, _OURS))
        elif self._phase == PREFACE:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    # ── reading ──

    def _work(self, data: bytes | bytearray, end: int) -> None:
        position, over = 0, False
        self.outgoing.busy = True
        try:
            if self._phase == PREFACE:
                position = h2.end_of_preface(data, end)
                self._phase = OPEN if position else PREFACE
            if self._phase != PREFACE:
                position, over = self._parse(data, position, end)
        except Breach as breach:
            self._breach(breach)
            return
        finally:
            self.outgoing.busy = False
        if position < end and self._phase != CLOSED:
            if not self._ahead_since or position:
                self._ahead_since = monotonic()
            self._ahead = bytes(memoryview(data)[position:end])
        elif not self._block_number:
            self._ahead_since = 0.0
        if self._final and not self._rpcs:
            self._close()
        elif self._heads.spent >= _CHARGED_AT_S and self._rests_for(self._heads.spent):
            return
        elif over:
            self._let_others_run()

    def _rests_for(self, spent: float) -> bool:
        """Charge its client for so much work that came to nothing; whether it is not read for a while now."""
        self._heads.spent = 0.0
        accounts, now = self._shared.accounts, monotonic()
        seconds = accounts.spend(accounts.account(self.outgoing.client, now), spent, now)
        if seconds <= 0.0 or self._phase == CLOSED or self._transport.is_closing():
            return False
        self._rests = True
        self._transport.pause_reading()
        self._shared.loop.call_later(min(seconds, _LONGEST_REST_S), self._rested)
        return True

    def _rested(self) -> None:
        self._rests = False
        self._continue()

    def _continue(self) -> None:
        """Go on with what was read ahead: after a turn of the others, or a write that got through."""
        if (
            self._phase == CLOSED
            or self._rests
            or self.outgoing.busy
            or self.outgoing.stalled
            or self._transport.is_closing()
        ):
            return
        data, self._ahead = self._ahead, b""
        self._transport.resume_reading()
        if data:
            self._work(data, len(data))

    def _let_others_run(self) -> None:
        """A client with much to say takes turns: the loop would read on from it as long as there is more."""
        if self._phase != CLOSED and not self._transport.is_closing() and not self._rests:
            self._transport.pause_reading()
            self._shared.turns.wait(self._continue, first=self._left > 0)

    def _parse(self, data: bytes | bytearray, position: int, end: int) -> tuple[int, bool]:
        """Use what is complete; returns where the rest begins, and whether that has to wait for others."""
        view = memoryview(data)
        clock = self._shared.turns.clock
        ends = clock() + self._turn_left()
        while position < end and self._phase != CLOSED:
            if clock() >= ends:
                self._turn_used(_SECONDS_PER_TURN)
                return position, True
            if self._left or self._pad:
                position += self._take_payload(view[position:end])
                continue
            start = position + FRAME_BYTES
            if start > end:
                break
            high, low, kind, flags, number = FRAME.unpack_from(data, position)
            length = high << 8 | low
            number &= h2.LARGEST_WINDOW
            if kind or length > LARGEST_FRAME or self._block_number or not self._settled:
                self._check_frame(kind, length)
            padded = kind == h2.DATA and flags & h2.PADDED and length
            if (padded and start == end) or (h2.DATA < kind <= h2.CONTINUATION and start + length > end):
                break
            if kind == h2.DATA:
                after = self._take_frames(view, position, end, flags, number, length)
                if after > position:
                    position = after
                    continue
                self._begin_data(flags, number, length, data[start] if padded else -1)
                position = start + bool(padded)
            elif kind > h2.CONTINUATION:
                self._spend(1)
                self._left = length
                position = start
            else:
                position = start + length
                _FRAMES[kind](self, flags, number, view[start:position])
        return position, False

    def _turn_left(self) -> float:
        """Returns seconds for which it may be read in this turn of the loop: all connections of a client
        together."""
        stake, shared = self.stake, self._shared
        account = None if stake is None else stake.account
        if account is None or shared.accounts.alone:
            return _SECONDS_PER_TURN
        if account.turn != shared.turns.number:
            account.turn, account.turn_left = shared.turns.number, _SECONDS_PER_TURN
            shared.turns.spend(0)  # the next one begins soon
        return account.turn_left

    def _turn_used(self, seconds: float) -> None:
        if self.stake is not None and self.stake.account is not None:
            self.stake.account.turn_left -= seconds

    def _check_frame(self, kind: int, length: int) -> None:
        """Checks whether a frame can come now, before it is waited for."""
        if length > LARGEST_FRAME:
            raise Breach(Code.FRAME_SIZE_ERROR, "a frame is too long")
        if not self._settled and kind != h2.SETTINGS:
            raise Breach(Code.PROTOCOL_ERROR, "settings come first")
        if self._block_number and kind != h2.CONTINUATION:
            raise Breach(Code.PROTOCOL_ERROR, "a head goes on in CONTINUATION, and in nothing else")
        if kind in (h2.HEADERS, h2.CONTINUATION):
            if len(self._block) + length > self._shared.longest_block:
                raise Breach(Code.ENHANCE_YOUR_CALM, "a head is too long")
        elif h2.SIZES.get(kind, length) != length:
            raise Breach(Code.FRAME_SIZE_ERROR, f"a frame of kind {kind} has {h2.SIZES[kind]} bytes")
        elif h2.CONTINUATION > kind > h2.DATA and length > h2.SMALLEST_FRAME:
            raise Breach(Code.ENHANCE_YOUR_CALM, "a frame is too long for what it says")

    # ── data ──

    def _take_frames(
        self, view: memoryview, position: int, end: int, flags: int, number: int, length: int
    ) -> int:
        """Whole frames of one call: as much of its message as is here, or the one frame in which it begins
        or ends. Returns where the rest begins."""
        rpc = self._rpcs.get(number)
        if rpc is None or rpc.ended or rpc.over or flags & h2.PADDED:
            return position
        room = None if rpc.body is None else rpc.room()
        if room is not None:
            most = min(rpc.window, self._window)
            into = room[:most] if most < len(room) else room
            after, count, rpc.ended = h2.copy_data(view, position, end, number, into)  # before it is answered
            if after > position:
                ended = rpc.ended
                self._cuts = self._cuts or not ended
                self._take_in(rpc, count)
                rpc.filled(count)
                if ended:
                    self._said_all(rpc)
                return after
        stop = position + FRAME_BYTES + length
        if stop > end or length > rpc.window or length < h2.SMALL:
            return position
        self._take_in(rpc, length)
        rpc.ended = ended = bool(flags & h2.END_STREAM)  # before it is answered
        rpc.take(view[stop - length : stop])
        if ended:
            self._said_all(rpc)
        return stop

    def _take_in(self, rpc: Rpc, count: int) -> None:
        self._used(count)
        self._data_bytes += count
        rpc.window -= count
        rpc.received += count

    def _used(self, length: int) -> None:
        """Uses so much of the connection's window."""
        self._window -= length
        self._owed += length
        if self._window < 0:
            raise Breach(Code.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        if self._credit < 0:
            raise Breach(Code.ENHANCE_YOUR_CALM, _MISTAKES)
        if self._owed >= CONNECTION_WINDOW // 2:
            self.outgoing.send(h2.window_update(0, self._owed))
            self._window += self._owed
            self._owed = 0

    def _begin_data(self, flags: int, number: int, length: int, pad: int) -> None:
        if (pad >= length and pad >= 0) or (flags & h2.PADDED and not length):
            raise Breach(Code.PROTOCOL_ERROR, "a frame has more padding than bytes")
        self._used(length)
        self._left, self._pad = (length, 0) if pad < 0 else (length - 1 - pad, pad)
        self._ends = bool(flags & h2.END_STREAM)
        rpc = self._rpcs.get(number)
        if rpc is not None and rpc.ended:
            self._reset(rpc, Code.STREAM_CLOSED)
            rpc = None
        elif rpc is None:
            self._data_for_nobody(number, length)
        else:
            rpc.window -= length
            rpc.received += self._left
            if rpc.window < 0:
                self._reset(rpc, Code.FLOW_CONTROL_ERROR)
                rpc = None
            elif length < h2.SMALL and not self._ends:
                self._spend(1)
        self._receiver = rpc
        if not self._left and not self._pad:
            self._data_done()

    def _data_for_nobody(self, number: int, length: int) -> None:
        if not number & 1 or number > self._last:
            raise Breach(Code.PROTOCOL_ERROR, "data of a stream that was never opened")
        if number in self._early:
            self._spend(1 if length < h2.SMALL else 0)
            if self._ends:
                del self._early[number]
        else:
            self._spend(5)
            self.outgoing.send(h2.reset(number, Code.STREAM_CLOSED))

    def _take_payload(self, data: memoryview) -> int:
        """Some of the frame of data, or of its padding; returns how much of it."""
        count = min(self._left, len(data))
        if count:
            self._received(count, data[:count])
        else:
            count = min(self._pad, len(data))
            self._pad -= count
            if not self._pad:
                self._data_done()
        return count

    def _received(self, count: int, data: memoryview | None = None) -> None:
        """So much of the frame; without `data`, the loop has read it straight into the message."""
        self._left -= count
        self._data_bytes += count
        rpc = self._receiver
        done = not self._left and not self._pad
        if rpc is not None and not rpc.over:
            rpc.ended = done and self._ends  # before it is answered
            if data is None:
                rpc.filled(count)
            else:
                rpc.take(data)
        if done:
            self._data_done()

    def _data_done(self) -> None:
        rpc, self._receiver = self._receiver, None
        if self._ends and rpc is not None:
            self._said_all(rpc)

    def _said_all(self, rpc: Rpc) -> None:
        """The client ends its side of a call, which may be over by now."""
        if rpc.number not in self._rpcs:
            return
        if rpc.head.length not in (None, rpc.received):
            self._reset(rpc, Code.PROTOCOL_ERROR)
        else:
            rpc.said_all()

    # ── heads ──

    def _on_headers(self, flags: int, number: int, payload: memoryview) -> None:
        block = h2.head_block(flags, number, payload)
        ends = bool(flags & h2.END_STREAM)
        if flags & h2.END_HEADERS:
            self._head_complete(number, block, ends)
        else:
            self._block, self._block_number, self._block_ends = block, number, ends
            self._ahead_since = monotonic()

    def _on_continuation(self, flags: int, number: int, payload: memoryview) -> None:
        if not number or number != self._block_number:
            raise Breach(Code.PROTOCOL_ERROR, "there is nothing to continue")
        self._spend(1 if len(payload) >= h2.SMALL else 4)
        self._block += payload
        if flags & h2.END_HEADERS:
            block, self._block, self._block_number = self._block, b"", 0
            self._head_complete(number, block, self._block_ends)

    def _head_complete(self, number: int, block: bytes, ends: bool) -> None:
        if number <= self._last:
            self._trailers_complete(number, block, ends)
            return
        if len(block) > _MUCH // 4:  # text in Huffman's code takes a while
            self._shared.turns.spend(8 * len(block))
            if len(block) > self._shared.limits.max_header_bytes:
                self._spend(len(block) >> 8)
        head = self._heads.read(block)
        if head.size > self._shared.limits.max_header_bytes:
            self._spend(TOO_LONG_HEAD)  # its refusal earns a part of that
        self._last = number
        if head.fault:
            self._refuse_stream(number, Code.PROTOCOL_ERROR, ends)
        elif self._final or len(self._rpcs) >= MOST_CALLS:
            self._refuse_stream(number, Code.REFUSED_STREAM, ends)
        elif head.http_status != 200:
            self._spend(5)
            self.outgoing.send_block(number, h2.END_HEADERS | h2.END_STREAM, refused_head(head.http_status))
            if not ends:
                self._over_early(number)
        else:
            self._open(number, head, ends)

    def _open(self, number: int, head: CallHead, ends: bool) -> None:
        shared = self._shared
        rpc = Rpc(self.outgoing, number, head, shared.service)
        rpc.ended = ends
        self._rpcs[number] = rpc
        if not self._mark_at or len(self._rpcs) == 1:
            self._mark, self._mark_at = self._data_bytes, rpc.since
        shared.begin(rpc)
        if ends and not rpc.over:
            rpc.said_all()

    def _trailers_complete(self, number: int, block: bytes, ends: bool) -> None:
        fault = self._heads.read_trailers(block)
        rpc = self._rpcs.get(number)
        if rpc is None:
            if number not in self._early:
                raise Breach(Code.STREAM_CLOSED, "a head for a stream that is closed")
            self._spend(1)
            return
        if rpc.ended:
            self._reset(rpc, Code.STREAM_CLOSED)
        elif fault or not ends or rpc.head.length not in (None, rpc.received):
            self._reset(rpc, Code.PROTOCOL_ERROR)
        else:
            rpc.said_all()

    def _refuse_stream(self, number: int, code: Code, ended: bool) -> None:
        self._spend(5)
        self.outgoing.send(h2.reset(number, code))
        self._remember(number, ended)

    # ── the other frames ──

    def _on_priority(self, _flags: int, number: int, payload: memoryview) -> None:
        self._spend(1)
        if not number:
            raise Breach(Code.PROTOCOL_ERROR, "a priority of no stream")
        if h2.read_number(payload[:4]) == number:
            raise Breach(Code.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_reset(self, _flags: int, number: int, payload: memoryview) -> None:
        self._check_opened(number)
        rpc = self._rpcs.get(number)
        self._early.pop(number, None)
        self._spend(8 if rpc is not None and rpc.incomplete else 1)
        if rpc is not None:
            del self._rpcs[number]
            self._gone(rpc)

    def _on_settings(self, flags: int, number: int, payload: memoryview) -> None:
        if number:
            raise Breach(Code.PROTOCOL_ERROR, "settings of a stream")
        pairs = h2.read_settings(flags, payload)
        if flags & h2.ACK:
            self._spend(1)
            return
        self._spend(4 if self._settled else 0)
        self._settled = True
        for name, value in pairs:
            self.outgoing.set(name, value, self._rpcs.values())
        self.outgoing.send(h2.SETTINGS_SEEN)
        self.outgoing.pump_all()

    def _on_push(self, _flags: int, _number: int, _payload: memoryview) -> None:
        raise Breach(Code.PROTOCOL_ERROR, "clients do not push")

    def _on_ping(self, flags: int, number: int, payload: memoryview) -> None:
        if number:
            raise Breach(Code.PROTOCOL_ERROR, "a ping of a stream")
        self._spend(1)
        if not flags & h2.ACK:
            self.outgoing.send(h2.frame(h2.PING, h2.ACK, 0, bytes(payload)))
        elif bytes(payload) == _OURS and self._phase == LEAVING:
            self.outgoing.send(h2.goaway(self._last, Code.NO_ERROR))
            self._final = True

    def _on_goaway(self, _flags: int, number: int, payload: memoryview) -> None:
        if number:
            raise Breach(Code.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise Breach(Code.FRAME_SIZE_ERROR, "GOAWAY has eight bytes or more")
        self._spend(1)
        self._phase, self._final = LEAVING, True

    def _on_window(self, _flags: int, number: int, payload: memoryview) -> None:
        more = h2.read_number(payload)
        self._spend(1)
        if not number:
            self.outgoing.widen(more)
            return
        rpc = self._rpcs.get(number)
        if rpc is None:
            self._check_opened(number)
            return
        rpc.send_window += more
        if not more:
            self._reset(rpc, Code.PROTOCOL_ERROR)
        elif rpc.send_window > h2.LARGEST_WINDOW:
            self._reset(rpc, Code.FLOW_CONTROL_ERROR)
        elif rpc in self.outgoing.blocked:
            self.outgoing.pump(rpc)

    def _check_opened(self, number: int) -> None:
        if not number & 1 or number > self._last:
            raise Breach(Code.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def _spend(self, credit: int) -> None:
        self._credit -= credit
        if self._credit < 0:
            raise Breach(Code.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _earn(self, credit: int) -> None:
        """Or lose: a message that is a mistake costs more than its answer brings."""
        before = self._credit
        self._credit = min(_MOST_CREDIT, before + credit)
        if self._credit < 0 <= before:
            breach = Breach(Code.ENHANCE_YOUR_CALM, _MISTAKES)
            self._shared.loop.call_soon(self._breach, breach)

    # ── the ends of calls ──

    def _sent(self, rpc: Rpc) -> None:
        """The last of a call is on its way."""
        self._earn(8)
        self._rpcs.pop(rpc.number, None)
        if not rpc.ended:
            self._over_early(rpc.number)
        self._gone(rpc)

    def _over_early(self, number: int) -> None:
        """Ends a call early: a client that is not done saying something need not go on."""
        self.outgoing.send(h2.reset(number, Code.NO_ERROR))
        self._remember(number, ended=False)

    def _remember(self, number: int, ended: bool) -> None:
        if not ended:
            self._early[number] = None
            if len(self._early) > _MOST_EARLY:
                del self._early[next(iter(self._early))]

    def _reset(self, rpc: Rpc, code: Code) -> None:
        self._credit -= 5
        self.outgoing.send(h2.reset(rpc.number, code))
        self._rpcs.pop(rpc.number, None)
        self._remember(rpc.number, rpc.ended)
        self._gone(rpc)

    def _given_up(self, rpc: Rpc) -> None:
        """Its client does not read the answer. It costs no credit: an account is no flood."""
        if rpc.number in self._rpcs:
            self._reset(rpc, Code.CANCEL)
            self._credit += 5

    def _gone(self, rpc: Rpc) -> None:
        self.outgoing.blocked.pop(rpc, None)
        rpc.leave()
        if self._final and not self._rpcs and not self.outgoing.busy:
            self._close()

    # ── the end ──

    def _breach(self, breach: Breach) -> None:
        if self._phase != CLOSED:
            self.outgoing.send(h2.goaway(self._last, breach.code, str(breach)))
            self._shared.log_breach(breach)
            self._charge(_BREACH_S)
            self._close()

    def _charge(self, seconds: float) -> None:
        accounts, now = self._shared.accounts, monotonic()
        accounts.spend(accounts.account(self.outgoing.client, now), seconds, now)

    def _close(self) -> None:
        """Closes it as soon as what was sent is out."""
        self._phase = CLOSED
        self._since = monotonic()
        self._ahead = self._block = b""
        self._receiver = None
        self._abandon()
        self.outgoing.flush()
        self._transport.close()

    def _abandon(self) -> None:
        rpcs = list(self._rpcs.values())
        self._rpcs.clear()
        wasted = sum(not rpc.sent for rpc in rpcs)
        if wasted:
            self._charge(wasted * _CALL_S)
        self.outgoing.blocked.clear()
        self._shared.abandon(rpcs)


_H2 = H2Connection
_FRAMES: tuple[Callable[[H2Connection, int, int, memoryview], None], ...] = (
    *(_H2._on_push, _H2._on_headers, _H2._on_priority, _H2._on_reset, _H2._on_settings),
    *(_H2._on_push, _H2._on_ping, _H2._on_goaway, _H2._on_window, _H2._on_continuation),
)
