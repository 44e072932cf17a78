"""Writes long answers a piece in each turn, while the loop answers others in between.

What an answer is made of may lie in a slot: nothing of it is copied while its client reads. It counts as held
for that client, as bodies do, and the time that its pieces take counts as time of decoding does: beside
others, a client has its part of the loop. Who does not read for a while has its answer moved out of the slot,
which others need.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from carpool.errors import CarpoolError, Unavailable
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.clients.fair_threads import Between, ThreadWork
from carpool.wire.head import Buffer
from carpool.wire.slices import Sliced, SlicedBytes, SlicedJson
from carpool.wire.v2 import HEADER_LENGTH

logger = logging.getLogger(__name__)

_IN_SLOT_S: Final = 1.0
_TEXT: Final = 5  # bytes of JSON for each byte of a tensor, with what is between them
_LEVEL: Final = 1  # of compression, as of all answers
_SHORTEST_REST_S: Final = 0.005  # what is due is saved up until then: timers are coarse
_LONGEST_REST_S: Final = 1.0


Piece: TypeAlias = Buffer | ThreadWork[Any]
"""What is sent; an empty one is a step of work, after which others have their turn."""


class LongEvents(NamedTuple):
    """Defines who hears of a long answer. `begun` is called when the first piece is there, `failed` with what
    is wrong with it before that, and `sent` with the bytes of each piece. `ended` is called once, whatever
    happens: then nothing touches what it was made of."""

    begun: Callable[[], None]
    failed: Callable[[CarpoolError], None]
    ended: Callable[[], None]
    sent: Callable[[int], None]


class LongBody:
    """Describes what is written. When it has begun, its `fields` and `length` are known; an answer whose
    length is not is chunked."""

    moves = True  # it can be moved while it is written

    def __init__(
        self, content: Sliced, events: LongEvents, fields: bytes = b"", length: int | None = None
    ) -> None:
        self.content = content
        self.events = events
        self.fields = fields
        self.length = length

    @property
    def held(self) -> int:
        """Returns the bytes of memory that it takes."""
        return self.content.held

    def pieces(self) -> Iterator[Piece]:
        return self.content.pieces()

    def move(self) -> None:
        """Copies what it is made of into memory of its own. In any thread."""
        self.content.move()


class WholeBody(LongBody):
    """Describes an answer whose head depends on all of it: how long the JSON before its tensors is, or what
    it takes when it is compressed. So its text is all there before any of it is sent."""

    moves = False

    def __init__(
        self,
        json: SlicedJson | None,
        tail: Sequence[Buffer],
        events: LongEvents,
        fields: bytes,
        encoding: bytes | None,
        begin: Callable[[Callable[[Between], memoryview | None]], ThreadWork[memoryview | None]],
    ) -> None:
        """`begin` begins work for its client in a thread."""
        super().__init__(SlicedBytes(tail), events, fields)
        self._json = json
        self._mixed = json is not None and bool(tail)
        self._encoding = encoding
        self._begin = begin

    @property
    def held(self) -> int:
        return self.content.held + (0 if self._json is None else _TEXT * self._json.held)

    def move(self) -> None:
        super().move()
        if self._json is not None:
            self._json.move()

    def pieces(self) -> Iterator[Piece]:
        found: list[Buffer] = []
        for piece in () if self._json is None else self._json.pieces():
            found.append(piece)
            yield b""
        if self._mixed:
            field = b"%b: %d\r\n" % (HEADER_LENGTH.encode(), sum(map(len, found)))
            self.fields += field
        found += self.content.pieces()
        if self._encoding is not None:
            work = self._begin(partial(_compressed, found, self._encoding))
            yield work
            smaller = None if work.failed else work.done.result()  # without memory for that it goes as it is
            if smaller is not None:
                found = [*SlicedBytes((smaller,)).pieces()]
                self.fields += b"Content-Encoding: %b\r\n" % self._encoding
        self.length = sum(map(len, found))
        yield from found


def _compressed(pieces: Sequence[Buffer], encoding: bytes, between: Between) -> memoryview | None:
    """Returns the pieces together, compressed; None if that is no shorter."""
    wbits = zlib.MAX_WBITS + (16 if encoding == b"gzip" else 0)
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits)
    found = bytearray()
    for piece in pieces:
        between()
        found += compressor.compress(piece)
    found += compressor.flush()
    return memoryview(found) if len(found) < sum(map(len, pieces)) else None


class AnswerReader(Protocol):
    """Defines who a long answer is for: a connection."""

    @property
    def unsent(self) -> int: ...

    def begin_long(self, fields: bytes, length: int | None) -> bool:
        """Sends the head, if there is to be one; returns whether pieces are chunks."""

    def send_view(self, piece: Buffer) -> None:
        """Sends a piece. It may be overwritten when this returns."""

    def end_long(self, *, chunked: bool) -> None: ...

    def abort(self) -> None: ...


class LongAnswers:
    """Holds those of one server that are being written, and what they share: the loop, its turns, threads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        accounts: Accounts,
        wait: Callable[[Callable[[], None]], None],
        threads: Callable[[], Executor],
    ) -> None:
        self.loop = loop
        self.accounts = accounts
        self.wait = wait
        self.threads = threads
        self.writing: dict[LongAnswer, None] = {}

    def begin(self, client: str, reader: AnswerReader, body: LongBody, line: deque[LongAnswer]) -> None:
        """Writes it behind those that its connection has in line; fails, if its client holds too much."""
        answer = LongAnswer(self, client, reader, body, line)
        if answer.admit():
            line.append(answer)
            if len(line) == 1:
                answer.start()

    def sweep(self, now: float) -> None:
        """Now and then: those that have been in their slots for long leave them."""
        for answer in list(self.writing):
            answer.check_time(now)


class LongAnswer:
    """Represents one answer while it is written: a holder of its client's account. Of the loop's thread."""

    def __init__(
        self,
        shared: LongAnswers,
        client: str,
        reader: AnswerReader,
        body: LongBody,
        line: deque[LongAnswer],
    ) -> None:
        self._shared = shared
        self._line = line  # of its connection's, this one first when it is written
        self._reader = reader
        self._body = body
        self._ended: Callable[[], None] = body.events.ended
        self._pieces = body.pieces()
        self._began = monotonic()
        self._stake = shared.accounts.body(client, self._began, holder=self)
        self._started = self._chunked = self._over = False
        self._sent = 0
        self._blocked = False  # until its client has taken what was sent
        self._moving: asyncio.Future[None] | None = None
        self._aside: ThreadWork[Any] | None = None

    def admit(self) -> bool:
        """Counts it as held for its client."""
        if not self._shared.accounts.wait(self._stake, self._body.held, self._began):
            self._fail(Unavailable("this client has too many answers that it has not read", reason="busy"))
            return False
        self._shared.writing[self] = None
        return True

    def start(self) -> None:
        """It is the first in its line: its turns begin."""
        self._shared.wait(self._go_on)

    # ── as the account asks ──

    @property
    def taken(self) -> int:
        return self._sent - self._reader.unsent

    @property
    def silent(self) -> bool:
        return False

    def give_up(self) -> None:
        self.stop()
        self._reader.abort()

    # ── as the connection says ──

    def drained(self) -> None:
        """Its client has taken what was sent."""
        if self._blocked:
            self._blocked = False
            self._shared.wait(self._go_on)

    def check_time(self, now: float) -> None:
        """Called every sweep: it has been in its slot for long enough."""
        if self._moving is None and self._body.moves and now - self._began >= _IN_SLOT_S:
            work = self._shared.threads().submit(self._body.move)
            self._moving = asyncio.wrap_future(work)
            self._moving.add_done_callback(self._moved)

    def _moved(self, work: asyncio.Future[None]) -> None:
        if not self._over and not work.cancelled() and work.exception() is None:
            self._let_go()

    def _let_go(self) -> None:
        ended, self._ended = self._ended, _nothing
        ended()

    def stop(self) -> None:
        """Nothing more is written."""
        if not self._over:
            self._over = True
            self._shared.accounts.close(self._stake)
            self._shared.writing.pop(self, None)
            if self._aside is not None:
                self._aside.stop()
            self._let_go()
            self._pieces, self._body = iter(()), _OVER

    # ── its turns ──

    def _go_on(self) -> None:
        began, account, shared = monotonic(), self._stake.account, self._shared
        if self._over or account is None:
            return
        rest_s = shared.accounts.spend(account, 0.0, began)
        if rest_s > _SHORTEST_REST_S:
            shared.loop.call_later(min(rest_s, _LONGEST_REST_S), shared.wait, self._go_on)
            return
        try:
            goes_on = self._write_next()
        except CarpoolError as error:
            self._fail(error)
        except Exception as fault:  # also of those that hear of it: the turns of others are to go on
            logger.exception("a long answer cannot be written")
            self._fail(CarpoolError(f"the server failed on this request: {type(fault).__name__}"))
        else:
            if goes_on:
                self._next(monotonic() - began)

    def _write_next(self) -> bool:
        """Writes the next piece; False where there is none, or it is not here yet."""
        piece = next(self._pieces, None)
        if piece is None:
            self._end()
            return False
        if isinstance(piece, ThreadWork):
            self._aside = piece
            piece.done.add_done_callback(lambda _: self._go_on())
            return False
        if len(piece):
            if not self._started and not self._begin():
                return False
            self._body.events.sent(len(piece))
            self._send(piece)
        return True

    def _begin(self) -> bool:
        """False: its client has left meanwhile."""
        self._started = True
        self._chunked = self._reader.begin_long(self._body.fields, self._body.length)
        self._body.events.begun()
        return not self._over

    def _send(self, piece: Buffer) -> None:
        self._sent += len(piece)
        self._reader.send_view(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if self._chunked else piece)

    def _next(self, seconds: float) -> None:
        """Waits for its client, or else for the next turn."""
        account, shared = self._stake.account, self._shared
        if self._over or account is None:
            return
        shared.accounts.spend(account, seconds, monotonic())
        if self._reader.unsent:
            self._blocked = True
        else:
            shared.wait(self._go_on)

    def _fail(self, error: CarpoolError) -> None:
        started, failed = self._started, self._body.events.failed
        self._leave()
        if started:
            self._reader.abort()
        else:
            failed(error)

    def _end(self) -> None:
        self._leave()
        following = self._line[0] if self._line else None  # what begins behind the end starts itself
        self._reader.end_long(chunked=self._chunked)
        if following is not None:
            following.start()

    def _leave(self) -> None:
        self.stop()
        if self._line and self._line[0] is self:
            self._line.popleft()


def _nothing(*_: object) -> None:
    """Does nothing, since it is over."""


_OVER = LongBody(SlicedBytes(()), LongEvents(_nothing, _nothing, _nothing, _nothing))
