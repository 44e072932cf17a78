"""Where the body of the current request goes: straight into a buffer, into memory, or nowhere."""

from __future__ import annotations

import socket
from typing import cast

from carpool.frontend.http.body import (
    ChunkedReader,
    Discard,
    Gather,
    Ledger,
    LengthReader,
    Sink,
    skip_received,
    too_large,
)
from carpool.frontend.http.compression import GatherCompressed, body_encoding
from carpool.frontend.http.exchange import BodyPlan, Collect, More, Receive
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import RequestHead

_NOTHING = bytearray()


class Intake:
    """One per connection, used again for every request. The hot path uses `into`, `got`, `room` and `size`.

    `into` may be a byte longer than the body. A read that leaves room is known to have taken all there was;
    one that fills its buffer is followed by another, most often for nothing.
    """

    __slots__ = ("_gather", "_ledger", "_limits", "_more", "_reader", "got", "into", "room", "size")

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self._limits = limits
        self._ledger = ledger
        self._reader: LengthReader | ChunkedReader | None = None
        self._gather: Gather | None = None
        self.into: memoryview | None = None
        self._more: More | None = None
        self.got = 0
        self.size = 0  # of the body that goes into `into`
        self.room = 0  # how much of it `into` can hold

    def start(self, head: RequestHead, plan: BodyPlan) -> None:
        """Follow the app's plan; raises `Fault` for a body that will not do."""
        self.got = 0
        if isinstance(plan, Receive):
            size = head.content_length
            if size is None or (plan.buffer.nbytes < size and plan.more is None):
                raise ValueError("a body can only be received into a buffer that is long enough for it")
            self._more = plan.more
            self.size = size
            self._use(plan.buffer)
        elif isinstance(plan, Collect):
            self._gather = self._gathering(head, plan)
            self._read_into(self._gather, head)
        else:
            self.skip(head)

    def _use(self, buffer: memoryview) -> None:
        self.into = buffer[: self.size + 1]
        self.room = min(self.size, buffer.nbytes)

    def grow(self) -> None:
        """The room is used up and the body is not complete: go on in a longer buffer, if there is one."""
        more = self._more
        assert more is not None
        longer = more(self.got)
        if longer is not None:
            self._use(longer)

    def skip(self, head: RequestHead) -> None:
        """Read past what is left of the body."""
        discard = Discard(self._limits.drain_bytes)
        if self.into is not None:
            self._reader = LengthReader(self.size - self.got, discard)
            self.into = None
        elif self._reader is not None:
            self._reader.sink = discard
        else:
            self._read_into(discard, head)
        self._gather = None

    def forget(self) -> None:
        """Let go of every buffer: the body ends here, complete or not."""
        self.into = None
        self._more = None
        self._reader = None
        self.got = 0
        self._gather = None

    def finish(self) -> bytearray:
        """As `forget`, for a complete body: returns what was gathered of it."""
        body = _NOTHING if self._gather is None else self._gather.body
        self.forget()
        return body

    @property
    def started(self) -> bool:
        return self.into is not None or self._reader is not None

    @property
    def chunked(self) -> bool:
        return isinstance(self._reader, ChunkedReader)

    @property
    def finished(self) -> bool:
        if self.into is not None:
            return self.got >= self.size
        return self._reader is not None and self._reader.finished

    @property
    def received(self) -> int:
        return self.got if self._reader is None else self._reader.received

    def take(self, data: bytes | bytearray, position: int, end: int) -> int:
        """Use what belongs to the body; returns where the rest begins."""
        if self._reader is not None:
            return position + self._reader.feed(memoryview(data)[position:end])
        into = cast(memoryview, self.into)
        count = min(end - position, self.room - self.got)
        into[self.got : self.got + count] = memoryview(data)[position : position + count]
        self.got += count
        if self.got == self.room < self.size:
            self.grow()
        return position + count

    def beyond(self) -> bytes:
        """What was received behind the body: at most the first byte of the next request."""
        return b"" if self.into is None else bytes(self.into[self.size : self.got])

    def skip_in_kernel(self, connection: socket.socket) -> None:
        """Throw away what the socket already holds of a body that is being skipped, without copying it."""
        if isinstance(self._reader, LengthReader) and isinstance(self._reader.sink, Discard):
            count = skip_received(connection, self._reader.left)
            self._reader.left -= count
            self._reader.received += count

    def _gathering(self, head: RequestHead, plan: Collect) -> Gather:
        encoding = body_encoding(head.headers.get(b"content-encoding")) if plan.inflate else None
        if encoding is not None:
            return GatherCompressed(encoding, self._limits.max_body_bytes, plan.limit, self._ledger)
        if head.content_length is not None and head.content_length > plan.limit:
            raise too_large(plan.limit)
        return Gather(plan.limit, self._ledger)

    def _read_into(self, sink: Sink, head: RequestHead) -> None:
        if head.content_length is None:
            self._reader = ChunkedReader(self._limits, sink)
        else:
            self._reader = LengthReader(head.content_length, sink)
