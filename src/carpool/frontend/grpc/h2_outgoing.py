"""What goes out on a connection of HTTP/2: answers as far as the windows allow, the rest when they open, and
all that was said in one turn of the loop in one write. What answers its only call goes at once. Answers that
wait are counted in their client's account."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final, Generic, TypeVar

from carpool.frontend.clients.accounts import Accounts, Stake
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.h2_frames import FRAME, Breach, Code
from carpool.wire.head import Buffer

_WRITTEN_TOGETHER: Final = 64 * 1024
_LONGEST_FRAME: Final = 64 * 1024  # also for clients that take frames of megabytes, as gRPC's own do
_IN_A_TURN: Final = 256 * 1024  # bytes of data of one connection
_LAST_BLOCK = h2.END_HEADERS | h2.END_STREAM


class OutgoingCall:
    """Represents a call as far as its answer is concerned."""

    __slots__ = ("ended", "last_block", "number", "pending", "send_window", "sent", "stake")

    number: int
    ended: bool  # the client has said all
    stake: Stake | None  # of its client's account, from its handler's beginning
    send_window: int
    sent: int  # bytes of data that went out as the windows opened
    pending: deque[memoryview]  # data for which there is no window
    last_block: bytes | None  # the last block, behind them

    def answered(self) -> None:
        """Its messages are not needed any more, while its answer waits to be read."""
        raise NotImplementedError

    def drained(self) -> None:
        """All that was written is on its way."""
        raise NotImplementedError


CallT = TypeVar("CallT", bound=OutgoingCall)


class Outgoing(Generic[CallT]):
    """Sends the answers of one connection's calls. `sent` is called for each call whose last block went out,
    `credit` for each frame of data, and `ended` for each call whose answer is given up."""

    __slots__ = (
        *("_accounts", "_bytes", "_credit", "_ended", "_file", "_loop", "_out", "_scheduled", "_sent"),
        *("_transport", "_wait", "_waits", "blocked", "busy", "call_window", "client", "largest", "no_table"),
        *("rpcs", "stalled", "window"),
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        accounts: Accounts,
        sent: Callable[[CallT], None],
        credit: Callable[[int], None],
        ended: Callable[[CallT], None],
        wait: Callable[[Callable[[], None]], None],
    ) -> None:
        self._loop = loop
        self._accounts = accounts
        self._sent = sent
        self._credit = credit
        self._ended = ended
        self._wait = wait  # for a turn
        self._waits = False
        self.client = ""  # whose connection it is, by address
        self._transport: asyncio.Transport
        self._file = -1  # of the transport's socket; over TLS nothing is written past the transport
        self.rpcs: dict[int, CallT] = {}  # the calls that are under way
        self.busy = False  # frames are being taken out of what was read, further up the stack
        self._out: list[bytes] = []
        self._bytes = 0
        self._scheduled = False
        self.window = self.call_window = h2.DEFAULT_WINDOW  # of the connection, and of each new call
        self.largest = h2.SMALLEST_FRAME  # that the client takes
        self.no_table = False  # to be said before the next header block
        self.blocked: dict[CallT, None] = {}  # calls with data that waits for a window
        self.stalled = False  # the client does not read as fast as we answer

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        if transport.get_extra_info("ssl_object") is None:
            self._file = transport.get_extra_info("socket").fileno()

    def disconnect(self) -> None:
        """Drops the callbacks. The connection, which refers to this, is thereby freed at once, and not by the
        garbage collector, which hardly ever runs."""
        self._sent = self._credit = self._ended = self._wait = _nobody

    @property
    def unsent(self) -> int:
        """Returns bytes that wait for the socket. Those that wait for a window are their calls'."""
        return self._transport.get_write_buffer_size() + self._bytes

    def mistake(self, credit: int) -> None:
        self._credit(-credit)

    def reset(self, rpc: CallT) -> None:
        """Its answer was begun, and is given up."""
        self._ended(rpc)

    @property
    def is_awaited(self) -> bool:
        """The client has one call, has said all of it, and is not answered yet."""
        return len(self.rpcs) == 1 and next(iter(self.rpcs.values())).ended

    # ── calls ──

    def send_whole(self, rpc: CallT, head: bytes, prefix: bytes, message: bytes, last: bytes) -> None:
        """An answer and its end: mostly there is room for all of it."""
        number, size = rpc.number, len(message) + len(prefix)
        fits = size <= rpc.send_window and size <= self.window and size <= self.largest
        if not fits or self.stalled or self.no_table:
            self._send_later(rpc, head, prefix + message, last)
            return
        self.window -= size
        start = FRAME.pack(0, len(head), h2.HEADERS, h2.END_HEADERS, number)
        data = FRAME.pack(size >> 8, size & 0xFF, h2.DATA, 0, number)
        end = FRAME.pack(len(last) >> 8, len(last) & 0xFF, h2.HEADERS, _LAST_BLOCK, number)
        if size <= _WRITTEN_TOGETHER:
            answer = b"".join((start, head, data, prefix, message, end, last))
            if len(self.rpcs) == 1 and not self.busy:
                self._send_now(answer)
            else:
                self.send(answer)
        else:
            self.send(b"".join((start, head, data, prefix)))
            self.send(message)
            self.send(end + last)
        self._sent(rpc)

    def _send_later(self, rpc: CallT, head: bytes, data: bytes, last: bytes) -> None:
        """Sends as much as there is room for now; the rest waits, if its client's account has room for
        that."""
        rpc.answered()
        if rpc.stake is not None and not self._accounts.wait(rpc.stake, len(data), monotonic()):
            self._ended(rpc)
            return
        self.send_head(rpc, head)
        rpc.pending.append(memoryview(data))
        self.send_end(rpc, last)

    def send_long(self, rpc: CallT, head: bytes, pieces: Sequence[Buffer], last: bytes) -> None:
        """Sends an answer out of the memory that it lies in, a part in each turn of the loop."""
        views = [memoryview(piece) for piece in pieces if len(piece)]
        size = sum(map(len, views))
        rpc.answered()
        if rpc.stake is not None and not self._accounts.wait(rpc.stake, size, monotonic()):
            self._ended(rpc)
            return
        self.send_head(rpc, head)
        rpc.pending.append(memoryview(b"\0" + size.to_bytes(4, "big")))
        rpc.pending += views
        self.send_end(rpc, last)

    def send_head(self, rpc: CallT, head: bytes) -> None:
        self.send_block(rpc.number, h2.END_HEADERS, head)

    def send_data(self, rpc: CallT, *pieces: Buffer) -> None:
        rpc.pending += [memoryview(piece) for piece in pieces if len(piece)]
        self.pump(rpc)

    def send_end(self, rpc: CallT, last: bytes) -> None:
        """Sends the end of a call behind its data."""
        rpc.last_block = last
        self.pump(rpc)

    def grant(self, number: int, more: int) -> None:
        """The client may send so much more."""
        self.send(h2.window_update(number, more))

    # ── windows ──

    def pump(self, rpc: CallT) -> None:
        """Send what the windows allow, and no more than a part of a turn: the rest in later ones."""
        pending = rpc.pending
        while pending and not self.stalled and self._bytes < _IN_A_TURN:
            piece = pending[0]
            count = min(len(piece), rpc.send_window, self.window, self.largest, _LONGEST_FRAME)
            if count <= 0:
                break
            if count == len(piece):
                pending.popleft()
            else:
                pending[0] = piece[count:]
            rpc.send_window -= count
            rpc.sent += count
            self.window -= count
            self._credit(2)
            self.send(FRAME.pack(count >> 8, count & 0xFF, h2.DATA, 0, rpc.number) + piece[:count])
        if pending:
            self.blocked[rpc] = None
            return
        self.blocked.pop(rpc, None)
        if rpc.last_block is None:
            rpc.drained()
        else:
            self.send_block(rpc.number, _LAST_BLOCK, rpc.last_block)
            self._sent(rpc)

    def pump_later(self) -> None:
        """Goes on in its turn: each long write may take this thread off its core, and others have theirs in
        between."""
        if self.blocked and not self._waits:
            self._waits = True
            self._wait(self._pump_in_turn)

    def _pump_in_turn(self) -> None:
        self._waits = False
        self.pump_all()
        if self._bytes >= _WRITTEN_TOGETHER:
            self.flush()

    def pump_all(self) -> None:
        for rpc in list(self.blocked):
            if self.stalled or self._bytes >= _IN_A_TURN:
                return
            self.pump(rpc)

    def set(self, name: int, value: int, rpcs: Iterable[CallT]) -> None:
        """Sets what the client wants, also of the calls that are under way."""
        if name == h2.INITIAL_WINDOW_SIZE:
            if value > h2.LARGEST_WINDOW:
                raise Breach(Code.FLOW_CONTROL_ERROR, "a window is too large")
            more, self.call_window = value - self.call_window, value
            for rpc in rpcs:
                rpc.send_window += more
                if rpc.send_window > h2.LARGEST_WINDOW:
                    raise Breach(Code.FLOW_CONTROL_ERROR, "a window is too large")
        elif name == h2.MAX_FRAME_SIZE:
            if not h2.SMALLEST_FRAME <= value <= h2.LARGEST_FRAME:
                raise Breach(Code.PROTOCOL_ERROR, "frames cannot have that size")
            self.largest = value
        elif name == h2.HEADER_TABLE_SIZE:
            self.no_table = True
        elif name == h2.ENABLE_PUSH and value > 1:
            raise Breach(Code.PROTOCOL_ERROR, "push is on or off")

    def widen(self, more: int) -> None:
        """Widens the window of the connection."""
        if not more:
            raise Breach(Code.PROTOCOL_ERROR, "a window is opened by nothing")
        self.window += more
        if self.window > h2.LARGEST_WINDOW:
            raise Breach(Code.FLOW_CONTROL_ERROR, "a window is too large")
        if self.blocked:
            self.pump_all()

    # ── bytes ──

    def send_block(self, number: int, flags: int, block: bytes) -> None:
        if self.no_table:
            self.no_table = False
            block = h2.NO_TABLE + block
        self.send(h2.frame(h2.HEADERS, flags, number, block))

    def send(self, data: bytes) -> None:
        self._out.append(data)
        self._bytes += len(data)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def _send_now(self, data: bytes) -> None:
        """As `send`, for a client that waits for nothing else: it can read while this loop goes on with its
        turn. Nothing overtakes what was said before, and what does not fit the socket is left to `send`."""
        transport = self._transport
        if self._out or self._file < 0 or transport.is_closing() or transport.get_write_buffer_size():
            self.send(data)
            return
        try:  # without the interpreter lock: see `link.records.Outbox.send`
            rest = data[os.write(self._file, data) :]
        except OSError:  # it is full, or gone, which the next read reports
            rest = data
        if rest:
            self.send(rest)

    def flush(self) -> None:
        out, self._out = self._out, []
        size, self._bytes = self._bytes, 0
        self._scheduled = False
        if not out or self._transport.is_closing():
            return
        try:
            if size <= _WRITTEN_TOGETHER:
                self._transport.write(b"".join(out))
            else:
                self._transport.writelines(out)
        except RuntimeError:
            self._transport.abort()  # uvloop raises when the handle is closed already
            return
        if size >= _IN_A_TURN:
            self.pump_later()


def _nobody(_what: object) -> None:
    """Does nothing, in place of a callback that was dropped."""
