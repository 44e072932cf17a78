"""Bodies that are gathered in memory, decompressed if need be. Nothing here belongs on the hot path."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from carpool.errors import without_stack
from carpool.frontend.http.exchange import Collect, Exchange, Fault, bad_request

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW = -zlib.MAX_WBITS
_STEP = 256 * 1024  # bytes of output
_WINDOW = 16 * 1024  # bytes of input
_STEPS_PER_TURN = 64
_AT_ONCE = 8 * 1024  # bytes, in or out
_SHORT_MEMBERS = 64  # each is some work, however little is in it
_MEMBER = 1024  # bytes, on average, where there are more

MOST_MEMBERS = 2048
"""Of one gzip body. Tools that write blocks of 64 KiB need half as many for 64 MiB."""

Failed = Callable[[Exception], None]


class Ledger:
    """How many bytes of gathered bodies there are, of all connections together, wherever they are.

    Loop and threads count in it. The lock can be taken twice by one thread: a body may be freed, and so give
    its bytes back, at any point of any thread.
    """

    __slots__ = ("_lock", "held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.RLock()

    def take(self, size: int) -> bool:
        with self._lock:
            if self.held + size > self.limit:
                return False
            self.held += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.held -= size


class GatheredBody(bytearray):
    """A body in memory. It counts for as long as anybody holds it: a queue, a thread, a view."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self._counted = 0

    def grow(self, piece: bytes | memoryview) -> None:
        if not self.ledger.take(len(piece)):
            raise Fault(503, "too many bodies are here at once; try again", "busy")
        self._counted += len(piece)
        self += piece

    def __del__(self) -> None:
        self.ledger.give_back(self._counted)


class Gather:
    """Keeps a body in memory, up to a limit of its own and one shared by all connections."""

    __slots__ = ("_limit", "body")

    def __init__(self, limit: int, ledger: Ledger) -> None:
        self._limit = limit
        self.body = GatheredBody(ledger)

    def take(self, piece: memoryview) -> None:
        if len(self.body) + len(piece) > self._limit:
            raise too_large(self._limit)
        self.body.grow(piece)


def too_large(limit: int) -> Fault:
    return Fault(413, f"the body is over {limit} bytes", "too-large")


def body_encoding(field: bytes | None) -> bytes | None:
    """What a Content-Encoding field asks to undo: gzip, deflate or None; raises 415 for anything else."""
    if field is None:
        return None
    encoding = field.strip(b" \t").lower()
    if encoding in (b"", b"identity"):
        return None
    if encoding in (b"gzip", b"x-gzip"):
        return b"gzip"
    if encoding == b"deflate":
        return b"deflate"
    raise Fault(415, "the Content-Encoding has to be gzip, deflate or identity", "unsupported-encoding")


class Inflater:
    """Decompresses one body in steps, and stops at the step that takes it over `limit`.

    Each step looks at a window of the compressed bytes: what zlib leaves of its input comes back as a copy,
    and so a copy is never of more than the window, however long the body is.
    """

    def __init__(
        self, encoding: bytes, data: bytes | bytearray, limit: int, ledger: Ledger, *, whole: bool = True
    ) -> None:
        """Of `data` that is not `whole`, there may be more."""
        self._wbits = _GZIP if encoding == b"gzip" else _deflate_kind(data)
        self._data = memoryview(data)
        self._whole = whole
        self._at = 0
        self._members = 1
        self._limit = limit
        self._stream = zlib.decompressobj(self._wbits)
        self.body = GatheredBody(ledger)

    def step(self) -> bool:
        """Produce one more piece; True when the body is complete."""
        window = self._data[self._at : self._at + _WINDOW]
        try:
            piece = self._stream.decompress(window, _STEP)
        except zlib.error:
            raise bad_request("the compressed body is damaged") from None
        if len(self.body) + len(piece) > self._limit:
            raise too_large(self._limit)
        self.body.grow(piece)
        if not self._stream.eof:
            self._at += len(window) - len(self._stream.unconsumed_tail)
            if not piece and self._at == len(self._data) and self._whole:
                raise bad_request("the compressed body ends too early")
            return False
        self._at += len(window) - len(self._stream.unused_data)
        if self._at == len(self._data):
            return True
        self._next_member()
        return False

    def _next_member(self) -> None:
        """gzip may be several members in a row."""
        if self._wbits != _GZIP:
            raise bad_request("something follows the compressed body")
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise bad_request(f"the compressed body has more than {MOST_MEMBERS} members")
        if self._members > _SHORT_MEMBERS and len(self.body) < _MEMBER * (self._members - 1):
            raise bad_request(
                f"the compressed body has more than {_SHORT_MEMBERS} members of under {_MEMBER} bytes"
            )
        self._stream = zlib.decompressobj(self._wbits)

    def begin(self) -> bool:
        """What takes no longer than a thread would to begin: short bodies and members, and what is wrong
        with them. True when the body is complete."""
        while self._at < _AT_ONCE and len(self.body) < _AT_ONCE:
            if self.step():
                return True
        return False

    def turn(self) -> bool:
        """A few milliseconds of steps; True when the body is complete."""
        return any(self.step() for _ in range(_STEPS_PER_TURN))


class GatherCompressed(Gather):
    """Looks at the start of a body before the rest is kept: what is wrong with it is often wrong there."""

    __slots__ = ("_encoding", "_looked", "_most")

    def __init__(self, encoding: bytes, limit: int, most: int, ledger: Ledger) -> None:
        """`limit` is of the body as it comes, `most` of what may become of it."""
        super().__init__(limit, ledger)
        self._encoding = encoding
        self._most = most
        self._looked = False

    def take(self, piece: memoryview) -> None:
        super().take(piece)
        if not self._looked and len(self.body) >= _WINDOW:
            self._looked = True
            start = bytes(self.body[:_WINDOW])
            Inflater(self._encoding, start, self._most, self.body.ledger, whole=False).begin()


def _deflate_kind(data: bytes | bytearray) -> int:
    """`deflate` means zlib, but some senders leave out its two-byte header."""
    is_zlib = len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] * 256 + data[1]) % 31 == 0
    return _ZLIB if is_zlib else _RAW


def deliver(
    plan: Collect, body: bytearray, received_at: float, exchange: Exchange, shared: Shared, failed: Failed
) -> None:
    """Tell the app that its request is here. Raises what goes wrong, or tells it later to `failed`."""
    field = exchange.head.headers.get(b"content-encoding")
    encoding = body_encoding(field) if plan.inflate and body else None
    if encoding is None:
        plan.done(body, received_at)
        return
    inflater = Inflater(encoding, body, plan.limit, shared.ledger)
    if inflater.begin():
        plan.done(inflater.body, received_at)
        return
    if shared.inflating >= shared.limits.max_inflating:
        raise Fault(503, "too many compressed bodies are here at once; try again", "busy")
    Inflation(plan, inflater, received_at, exchange, shared, failed).go_on()


class Inflation:
    """A few KB can hold many MB: what is not done in one step is done in a thread, not in the loop.

    There it gets one turn after the other, with those of other bodies in between, and no more of them once
    its client has left.
    """

    __slots__ = ("_exchange", "_failed", "_inflater", "_plan", "_received_at", "_shared")

    def __init__(
        self,
        plan: Collect,
        inflater: Inflater,
        received_at: float,
        exchange: Exchange,
        shared: Shared,
        failed: Failed,
    ) -> None:
        self._plan = plan
        self._inflater = inflater
        self._received_at = received_at
        self._exchange = exchange
        self._shared = shared
        self._failed = failed
        shared.inflating += 1

    def go_on(self) -> None:
        work = self._shared.loop.run_in_executor(self._shared.inflaters, self._inflater.turn)
        work.add_done_callback(self._turned)

    def _turned(self, work: asyncio.Future[bool]) -> None:
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None and self._exchange.pending and not work.result():
            self.go_on()
            return
        self._shared.inflating -= 1
        if isinstance(error, asyncio.CancelledError) or not self._exchange.pending:
            return
        if isinstance(error, Exception):
            self._failed(error)
            without_stack(error)
            return
        try:
            self._plan.done(self._inflater.body, self._received_at)
        except Exception as raised:
            self._failed(raised)
