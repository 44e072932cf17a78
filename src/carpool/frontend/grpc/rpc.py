"""One call on the wire, as its handler sees it: the messages that come, the answers that go, and its end.

    a head ──► messages ──► answers ──► a status
                  │            │
                  └────────────┴──► it is refused, its time is up, or its client leaves

A message has five bytes before it, and may come in frames that are cut anywhere. It is counted from its first
byte until its call is over, and refused at the fifth if it is longer than what any model takes.
"""

from __future__ import annotations

import asyncio
import types
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Executor
from functools import partial
from struct import Struct
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, Unavailable
from carpool.frontend.calls.packing import AT_ONCE
from carpool.frontend.clients.accounts import Stake
from carpool.frontend.grpc.h2_frames import LARGEST_WINDOW
from carpool.frontend.grpc.h2_outgoing import Outgoing, OutgoingCall
from carpool.frontend.grpc.inflater import Inflater, MessageBounds, too_long, too_many_messages
from carpool.frontend.grpc.rpc_heads import FINE, HEAD, HEADS, CallHead, Metadata, Status, trailers

WINDOW = 4 << 20
"""What a call may send before its messages are looked at. A longer message gets more when it is announced."""

_ANNOUNCED: Final = Struct(">BL")  # whether a message is compressed, and its length
_PREFIX = _ANNOUNCED.size
_FIRST_BYTES: Final = 64 * 1024  # of a message that was announced
_MOST_QUEUED: Final = 64  # messages that the handler has not read yet
_EMPTY = memoryview(b"")
_CUT_OFF: Final = "the call ended within a message"
_GROWTH: Final = 4  # bytes copied per byte of a message: at most a third
_LEVEL: Final = 6
_IN_SLOT_S = 1.0  # that a long answer may lie in its slot while its client reads it

TOO_SLOW: Final = "the client does not read responses as fast as the model gives them"

T = TypeVar("T")
Message = bytes | bytearray | memoryview


class Ended(Exception):
    """Reports that the call is over, so that work for it need not go on."""


class Handler(Protocol):
    """Does what a call asks for. Called in the loop's thread, and must not block it."""

    many: bool
    """Its client may send any number of messages: `Rpc.heard` is called as they come, and the handler gets
    them with `Rpc.next_message`."""

    def memory(self, size: int) -> memoryview | None:
        """Returns where the message, of so many bytes, is to be put; None if that does not matter."""

    def take(self, message: Message, compressed: bool) -> None:
        """Takes the one message."""

    def left(self) -> None:
        """No answer is wanted any more. Not called after an answer."""


class RpcService(MessageBounds, Protocol):
    """Defines what a call needs of the front end that it belongs to."""

    @property
    def long_answers(self) -> dict[Rpc, None]:
        """Returns the calls whose answers are sent from slots, which they enter and leave."""

    @property
    def threads(self) -> Executor: ...

    async def aside(self, client: str, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Works on so many bytes: in a thread, if others would have to wait for it."""

    async def inflate(self, rpc: Rpc, inflater: Inflater) -> None:
        """Inflates a message in threads, in turns with those of other clients."""

    def end(self, rpc: Rpc, error: CarpoolError) -> None:
        """Ends a call that its handler has not ended."""

    def failed(self, rpc: Rpc, error: Exception) -> None:
        """Ends a call whose handler has raised what it should not."""


class Rpc(OutgoingCall):
    __slots__ = (
        *("_compressed", "_drained", "_ended", "_got", "_head_sent", "_inflated", "_later", "_long_since"),
        "_messages",
        *("_outgoing", "_prefix", "_queue", "_size", "_timer", "_unread", "body", "client", "compress"),
        *(
            "deadline",
            "handler",
            "head",
            "heard",
            "of_models",
            "over",
            "owed",
        ),
        *("received", "service", "since", "window"),
    )

    def __init__(self, outgoing: Outgoing[Rpc], number: int, head: CallHead, service: RpcService) -> None:
        self._outgoing: Outgoing[Rpc] | None = outgoing
        self.number = number
        self.head = head
        self.service = service
        self.client = outgoing.client  # whose call it is, by address
        self.since = now = monotonic()
        self.deadline = now + head.timeout
        self.handler: Handler | None = None
        self.compress = ""  # how its answers are encoded, where its client takes that
        self._timer: asyncio.TimerHandle | None = None
        self.stake: Stake | None = None  # of its client's account, from its handler's beginning
        self.of_models = False  # its messages name the models that they are for
        self.owed = False  # its client waits for us, and not we for it
        # what comes
        self.window = WINDOW  # bytes that the client may still send
        self.received = 0  # bytes of data
        self.ended = False  # the client has said all
        self._prefix = b""  # of the next message, in part
        self.body: memoryview | None = None  # of the message that is coming
        self._size = self._got = 0
        self._compressed = False
        self._messages = 0
        self._inflated = 0  # bytes of the message that was read last
        self._queue: deque[tuple[memoryview, bool]] = deque()  # messages that the handler has not read yet
        self._later = bytearray()  # what came behind as many as are kept
        self._unread = 0  # bytes of both
        self.heard: Callable[[], None] | None = None  # for a handler of many: there is something for it
        # what goes
        self.over = False  # its status is on its way, or its client has left
        self.send_window = outgoing.call_window
        self.sent = 0  # bytes of data that went out as the windows opened
        self._head_sent = False
        self.pending: deque[memoryview] = deque()  # data for which there is no window
        self.last_block: bytes | None = None  # the last block, behind them
        self._drained: asyncio.Future[None] | None = None
        self._ended: Callable[[], None] | None = None  # gives back what a long answer lies in
        self._long_since = 0.0

    def start(self, handler: Handler) -> None:
        self.handler = handler
        if self.deadline != INFINITY:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self.deadline - monotonic()), self._too_late)

    @property
    def outgoing(self) -> Outgoing[Rpc] | None:
        return self._outgoing

    def mistake(self, credit: int = 8) -> None:
        """It asks for what cannot be had: that costs its connection more credit than its answer brings."""
        if self._outgoing is not None:
            self._outgoing.mistake(credit)

    def others_like_this(self) -> int:
        """Counts the calls of this name on its connection, with this one."""
        rpcs = {} if self._outgoing is None else self._outgoing.rpcs
        return sum(rpc.head.path == self.head.path for rpc in rpcs.values())

    @property
    def incomplete(self) -> bool:
        """Returns whether its one message is not all here."""
        return not self.over and not self._messages and self.handler is not None and not self.handler.many

    # ── as its client's account asks ──

    @property
    def taken(self) -> int:
        return self.sent

    @property
    def silent(self) -> bool:
        return not self.owed and not self.over

    def give_up(self) -> None:
        """Its client does not read, or has more calls than its part. What waits for a window is dropped, so
        that the status, which needs none, goes out; an answer that was begun cannot end well any more."""
        unread = self.stake is not None and self.stake.unread > 0
        if self.over:
            outgoing = self._outgoing
            if outgoing is not None:
                outgoing.reset(self)
            return
        self.pending.clear()
        if unread:
            error = Unavailable(TOO_SLOW, reason="slow-reader")
        else:
            error = Unavailable("this client has used its share of all calls", reason="busy")
        self.service.end(self, error)
        self.free()

    def answered(self) -> None:
        """Its messages are not needed any more, while its answer waits to be read."""
        if self.stake is not None:
            self._let_go(self.stake.bytes - self.stake.unread)

    def free(self) -> None:
        """Nothing is held for it any more."""
        stake, self.stake = self.stake, None
        self.service.accounts.close(stake)
        if self._ended is not None:
            self._give_back()

    def _let_go(self, size: int) -> None:
        if self.stake is not None:
            self.service.accounts.give(self.stake, size)

    # ── messages that come ──

    def take(self, data: memoryview) -> None:
        """Takes some of its data: of a message, of several, or of a prefix."""
        used = 0 if self._later else self._use(data)
        if used < len(data) and not self.over:
            self._put_off(data[used:])

    def _use(self, data: memoryview) -> int:
        """Uses as much as there is room for in the queue; returns how much of it."""
        position, end = 0, len(data)
        while position < end and not self.over:
            if self.body is None:
                if len(self._queue) >= _MOST_QUEUED:
                    break
                if self._prefix or end - position < _PREFIX:
                    position = self._take_prefix(data, position)
                else:
                    flags, size = _ANNOUNCED.unpack_from(data, position)
                    position += _PREFIX
                    self._announced(flags, size)
                continue
            got = self._got
            count = min(end - position, len(self.body) - got)
            self.body[got : got + count] = data[position : position + count]
            position += count
            self.filled(count)
        return position

    def room(self) -> memoryview | None:
        """Returns where the next bytes of its data belong, if that is known."""
        return None if self.body is None else self.body[self._got :]

    def filled(self, count: int) -> None:
        """So many bytes of the message were put there."""
        stake = self.stake
        if stake is None or not self.service.accounts.take(stake, count):
            self.service.end(self, too_many_messages())
            return
        self._got += count
        if self._got == self._size:
            self._complete()
        elif self.body is not None and self._got == len(self.body):
            longer = bytearray(min(_GROWTH * self._got, self._size))
            longer[: self._got] = self.body
            self.body = memoryview(longer)

    def _put_off(self, data: memoryview) -> None:
        """Stores messages that the queue has no room for as the bytes that they came in, to save memory."""
        stake, size = self.stake, len(data)
        if stake is None or not self.service.accounts.take(stake, size):
            self.service.end(self, too_many_messages())
            return
        self._later += data
        self._unread += size

    def _take_later(self) -> None:
        with memoryview(self._later) as data:
            used = self._use(data)
        if not self.over:
            del self._later[:used]
            self._unread -= used
            self._let_go(used)

    def _take_prefix(self, data: memoryview, position: int) -> int:
        """Takes a part of a prefix that comes in pieces; returns where the rest begins."""
        end = position + _PREFIX - len(self._prefix)
        self._prefix += data[position:end]
        if len(self._prefix) < _PREFIX:
            return len(data)
        prefix, self._prefix = self._prefix, b""
        self._announced(*_ANNOUNCED.unpack(prefix))
        return end

    def _announced(self, flags: int, size: int) -> None:
        service, handler = self.service, self.handler
        if handler is None:
            return
        if self._messages and not handler.many:
            self.cut(Status.INTERNAL, "this call takes one message, but a second one was received")
        elif flags > 1 or (flags and self.head.encoding == "identity"):
            self.cut(Status.INTERNAL, "a message is marked as compressed, but no encoding was given")
        elif size > service.largest_message:
            self.cut(Status.RESOURCE_EXHAUSTED, too_long(size, service.largest_message))
        else:
            self._compressed = bool(flags)
            self._size, self._got = size, 0
            self.body = None if flags else handler.memory(size)
            if size == 0:
                self.body = _EMPTY
                self._complete()
                return
            if self.body is None:
                self.body = memoryview(bytearray(min(size, _FIRST_BYTES)))  # more when more is here
            if size > self.window:
                self._open_window()

    def _complete(self) -> None:
        message, compressed = self.body, self._compressed
        assert message is not None
        self.body = None
        self._messages += 1
        handler = self.handler
        if handler is None:
            return
        if not handler.many:
            self.owed = True
            handler.take(message, compressed)
            return
        self._queue.append((message, compressed))
        self._unread += len(message) + _PREFIX
        if not message and self.of_models:
            self.mistake()  # it names no model: nothing that it could be answered is worth a flood of them
        if self.heard is not None:
            self.heard()

    def said_all(self) -> None:
        """The client ends its side."""
        self.ended = True
        if self.over or self.handler is None:
            return
        if self.heard is not None:
            self.heard()
        elif self.body is not None or self._prefix:
            self.cut(Status.INTERNAL, _CUT_OFF)
        elif not self._messages:
            self.cut(Status.INTERNAL, "the call ended without its message")

    @property
    def has_more(self) -> bool:
        """There is a message, or the end of all."""
        return self.ended or bool(self._queue)

    def next_message(self) -> tuple[Message, bool] | None:
        """Returns the next message, with whether it is compressed; None while there is none. The one before
        is not needed any more."""
        self._let_go(self._inflated)
        self._inflated = 0
        if not self._queue:
            if self.ended and (self.body is not None or self._prefix):
                self.cut(Status.INTERNAL, _CUT_OFF)
            return None
        message, compressed = self._queue.popleft()
        size = len(message)
        self._unread -= size + _PREFIX
        self._let_go(size)
        if self._later and len(self._queue) < _MOST_QUEUED // 2:
            self._take_later()
        self._open_window()
        return message, compressed

    def _open_window(self) -> None:
        """As much as the message that is coming takes, and for more of them unless they lie unread."""
        outgoing, handler = self._outgoing, self.handler
        if outgoing is None or self.ended or handler is None:
            return
        left = self._size - self._got if self.body is not None else 0
        wanted = left + (max(0, WINDOW - self._unread) if handler.many else 0)
        more = min(wanted, LARGEST_WINDOW) - self.window
        if more >= WINDOW // 2 or (more > 0 and left > self.window):
            self.window += more
            outgoing.grant(self.number, more)

    async def plain(self, message: Message, compressed: bool) -> Message:
        """Returns the message as it was before its client compressed it. Ends the call if it cannot be
        had."""
        if not compressed:
            return message
        encoding = self.head.encoding
        view = memoryview(message)
        inflater = Inflater(view, encoding, self.service, self.stake, by_model=self.of_models)
        await self.service.inflate(self, inflater)
        if self.over:
            raise Ended
        if inflater.fault is not None:
            self.end(*inflater.fault)
            raise Ended
        self._inflated = len(inflater.found)
        return memoryview(inflater.found)

    # ── answers that go ──

    def answer(self, message: bytes, metadata: Metadata = ()) -> None:
        """Sends the one answer, and the end of the call."""
        if self.over:
            return
        if self.compress and self.compress in self.head.accepts:
            if len(message) > AT_ONCE:
                work = self.service.threads.submit(compressed, message, self.compress)
                asyncio.wrap_future(work).add_done_callback(
                    lambda done: self._compressed_aside(done, metadata)
                )
                return
            flag, message = compressed(message, self.compress)
            self._answer(flag, message, metadata)
        else:
            self._answer(b"\x00", message, metadata)

    def answer_long(
        self, pieces: Sequence[Message], ended: Callable[[], None], metadata: Metadata = ()
    ) -> None:
        """As `answer`, from memory that is not copied before it is sent. `ended` is called once, when nothing
        of it is needed any more."""
        outgoing = self._outgoing
        if self.over or outgoing is None:
            ended()
        elif self.compress and self.compress in self.head.accepts:
            work = self.service.threads.submit(compressed_pieces, pieces, self.compress)

            def go_on(done: asyncio.Future[tuple[bytes, bytes]]) -> None:
                ended()
                self._compressed_aside(done, metadata)

            asyncio.wrap_future(work).add_done_callback(go_on)
        else:
            self._head_sent = True
            self._finish()
            self._ended, self._long_since = ended, monotonic()
            self.service.long_answers[self] = None
            last = trailers(Status.OK, "", metadata) if metadata else FINE
            outgoing.send_long(self, HEAD, pieces, last)

    def check_time(self, now: float) -> None:
        """Called every sweep, for a long answer: where its client is slow, it leaves the slot that it lies
        in."""
        if self._ended is not None and now - self._long_since >= _IN_SLOT_S:
            self._long_since = INFINITY
            work = self.service.threads.submit(together, list(self.pending))
            asyncio.wrap_future(work).add_done_callback(self._moved)

    def _moved(self, work: asyncio.Future[memoryview]) -> None:
        if self._ended is None or work.cancelled() or work.exception() is not None:
            return
        moved, left = work.result(), sum(map(len, self.pending))
        self.pending.clear()
        if left:
            self.pending.append(moved[len(moved) - left :])
        self._give_back()

    def _give_back(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            self.service.long_answers.pop(self, None)
            ended()

    def _compressed_aside(self, done: asyncio.Future[tuple[bytes, bytes]], metadata: Metadata) -> None:
        if not self.over and not done.cancelled():
            flag, message = done.result()
            self._answer(flag, message, metadata)

    def _answer(self, flag: bytes, message: bytes, metadata: Metadata) -> None:
        outgoing = self._outgoing
        assert outgoing is not None
        last = trailers(Status.OK, "", metadata) if metadata else FINE
        head = HEADS[self.compress] if flag == b"\x01" else HEAD
        self._head_sent = True
        self._finish()
        outgoing.send_whole(self, head, flag + len(message).to_bytes(4, "big"), message, last)

    async def write(self, message: bytes) -> None:
        """Sends one of several answers. Returns when there was room for it."""
        outgoing = self._outgoing
        if self.over or outgoing is None:
            raise Ended
        flag, head = b"\x00", HEAD
        if self.compress and self.compress in self.head.accepts:
            flag, message = await self.service.aside(
                self.client, len(message), compressed, message, self.compress
            )
            head = HEADS[self.compress]
            if self.over:
                raise Ended
        if not self._head_sent:
            self._head_sent = True
            outgoing.send_head(self, head)
        outgoing.send_data(self, flag + len(message).to_bytes(4, "big") + message)
        if self.pending:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    @property
    def compresses(self) -> bool:
        """Its answers are compressed."""
        return bool(self.compress) and self.compress in self.head.accepts

    async def write_long(self, pieces: Sequence[Message], ended: Callable[[], None]) -> None:
        """As `write`, uncompressed, from memory that is not copied before it is sent. `ended` is called once,
        when nothing of it is needed any more."""
        outgoing = self._outgoing
        if self.over or outgoing is None:
            ended()
            raise Ended
        if not self._head_sent:
            self._head_sent = True
            outgoing.send_head(self, HEAD)
        self._ended, self._long_since = ended, monotonic()
        self.service.long_answers[self] = None
        size = sum(map(len, pieces))
        outgoing.send_data(self, b"\x00" + size.to_bytes(4, "big"), *pieces)
        if self.pending:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        self._give_back()

    def end(self, status: Status = Status.OK, details: str = "", metadata: Metadata = ()) -> None:
        """Ends the call for its handler, which has nothing more to say."""
        outgoing = self._outgoing
        if self.over or outgoing is None:
            return
        last = trailers(status, details, metadata)
        self._finish()
        outgoing.send_end(self, last if self._head_sent else HEAD + last)

    # ── ends that its handler has not chosen ──

    def cut(self, status: Status, details: str, metadata: Metadata = ()) -> None:
        """Ends the call with a status for the client, and notifies the handler that the call is over."""
        handler, self.handler = self.handler, None
        self.end(status, details, metadata)
        if handler is not None:
            handler.left()

    def leave(self) -> None:
        """The client has gone, or what it sent cannot be followed."""
        handler, self.handler = self.handler, None
        over, self._outgoing = self.over, None
        if not over:
            self._finish()
        self.pending.clear()
        self.free()
        if handler is not None and not over:
            handler.left()
        if self._drained is not None:
            self.drained()

    def drained(self) -> None:
        """All that was written is on its way."""
        waiting, self._drained = self._drained, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _finish(self) -> None:
        """Nothing but what is written already belongs to it any more."""
        self.over = True
        self.handler = self.body = None
        self._queue.clear()
        self._later = bytearray()
        self.heard = None
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _too_late(self) -> None:
        self._timer = None
        self.cut(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")


def compressed(message: bytes, encoding: str) -> tuple[bytes, bytes]:
    """Returns whether it is compressed, as its first byte says it, and the message: as it is, where there is
    no memory for that. The client waits, and would get no other answer."""
    wbits = zlib.MAX_WBITS + (16 if encoding == "gzip" else 0)
    try:
        compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits)
        return b"\x01", compressor.compress(message) + compressor.flush()
    except (MemoryError, zlib.error):
        return b"\x00", message


def compressed_pieces(pieces: Sequence[Message], encoding: str) -> tuple[bytes, bytes]:
    """As `compressed`, of what is never in one piece before that."""
    wbits = zlib.MAX_WBITS + (16 if encoding == "gzip" else 0)
    try:
        compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits)
        found = [compressor.compress(piece) for piece in pieces]
        return b"\x01", b"".join((*found, compressor.flush()))
    except (MemoryError, zlib.error):
        return b"\x00", b"".join(pieces)


def together(pieces: Sequence[memoryview]) -> memoryview:
    """Returns a copy, which is made without the interpreter lock."""
    copied = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces if len(piece)])
    return memoryview(copied.data)


# ── work for a call ──


def begin_now(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Do it as far as it goes without waiting: mostly that is all. Else a task does the rest."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    left = [(work, waits_for)]  # until the task has it: one cancelled before its first step never runs
    task = asyncio.get_running_loop().create_task(_go_on(left))
    task.add_done_callback(partial(_forget, left))
    return task


def _forget(left: list[tuple[Coroutine[Any, Any, None], Any]], _task: asyncio.Task[None]) -> None:
    """Closes work that its task has not taken over, and cancels what that work waits for."""
    for work, waits_for in left:
        if waits_for is not None:
            waits_for.cancel()
        work.close()


async def _go_on(left: list[tuple[Coroutine[Any, Any, None], Any]]) -> None:
    await _rest(*left.pop())


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    while True:
        raised: BaseException | None = None
        try:
            yield waits_for
        except BaseException as error:  # also that the task is cancelled
            raised = error
        try:
            waits_for = work.send(None) if raised is None else work.throw(raised)
        except StopIteration:
            return
        finally:
            raised = None  # its stack has this frame, and the message that was worked on


class InTask:
    """A handler whose work is a coroutine. It gets the message, if there is one to wait for, and returns the
    answer, or nothing if it has answered or refused itself."""

    __slots__ = ("_rpc", "_task", "_work")

    many = False

    def __init__(self, rpc: Rpc, work: Callable[..., Coroutine[Any, Any, bytes | None]]) -> None:
        self._rpc = rpc
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def memory(self, size: int) -> memoryview | None:
        return None

    def take(self, message: Message, compressed: bool) -> None:
        self._task = begin_now(self._run_with(message, compressed))

    async def _run_with(self, message: Message, compressed: bool) -> None:
        try:
            plain = await self._rpc.plain(message, compressed)
        except Ended:
            return
        rpc = self._rpc
        try:
            answer = await self._work(bytes(plain))
        except Ended:
            return
        except Exception as error:
            rpc.service.failed(rpc, error)
            return
        if answer is None:
            rpc.end()
        else:
            rpc.answer(answer)

    def left(self) -> None:
        task, self._task = self._task, None  # it knows us too: only the collector could free both
        if task is not None:
            task.cancel()
