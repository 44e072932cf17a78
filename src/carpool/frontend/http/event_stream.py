"""Sends server-sent events: an answer in several pieces, in the order in which they come.

The head goes out with the first event, so that an error before that has a status. A client that does not read
is cut off when an event comes and more than a bounded number of bytes wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn

from carpool.errors import Cancelled, CarpoolError
from carpool.frontend.http.exchange import Buffer, Exchange
from carpool.frontend.http.long_answer import LongBody, LongEvents
from carpool.wire.slices import Sliced, SlicedBytes, SlicedJson

MOST_UNREAD = 256 * 1024
"""Bytes that may wait for a client, beyond what its socket takes, when the next event comes: one event may be
larger."""
EVENT_FIELDS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
    b"x-accel-buffering: no\r\nvary: accept\r\n"
)


def as_event(data: bytes) -> bytes:
    """Returns an event of one line."""
    return b"data: %b\n\n" % data


class EventStream:
    """Represents the answer to one exchange. Of the loop's thread. Implements `AnswerReader`, for events that
    are written in pieces: what comes behind one of those waits for it."""

    __slots__ = ("__weakref__", "_chunked", "_ending", "_exchange", "_long")

    def __init__(self, exchange: Exchange, fields: bytes = b"") -> None:
        """Sends the head; `fields` are more of it."""
        self._exchange = exchange
        if exchange.who is not None:
            exchange.who.streams.add(self)
        self._chunked = exchange.begin(EVENT_FIELDS + fields)
        self._long = deque[int]()  # bytes of events that are written in pieces, or wait for that
        self._ending = False

    def send(self, events: Iterable[bytes]) -> None:
        """Sends events, each of them one line of data; else as `write`."""
        self.write(b"".join(map(as_event, events)))

    def write(self, data: bytes) -> None:
        """Sends whole events. Raises `Cancelled` for a client that reads too slowly, who is gone then; one
        that has left is passed over in silence."""
        if self._long:
            self._write_long(SlicedBytes((data,)), _nothing, _not_counted)
        elif data and self._exchange.go_on(self._framed(data)) > MOST_UNREAD:
            self._cut()

    def _cut(self) -> NoReturn:
        self._exchange.cut()
        raise Cancelled(f"the client has left more than {MOST_UNREAD} bytes unread", reason="slow-reader")

    def send_long(self, event: SlicedJson, ended: Callable[[], None], sent: Callable[[int], None]) -> None:
        """Sends one event in pieces, and calls `ended` when nothing of it is needed any more."""
        self._write_long(event.within(b"data: ", b"\n\n"), ended, sent)

    def key_ended(self) -> None:
        """The key that it was asked with is removed: nothing more is sent, or worked on."""
        self.abort()

    def end(self) -> None:
        if self._long:
            self._ending = True
        else:
            self._exchange.end(b"0\r\n\r\n" if self._chunked else b"")

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _write_long(self, content: Sliced, ended: Callable[[], None], sent: Callable[[int], None]) -> None:
        if self._exchange.unsent and sum(self._long) > MOST_UNREAD:
            ended()
            self._cut()
        self._long.append(content.held)
        events = LongEvents(_nothing, self._failed, ended, sent)
        self._exchange.respond_long(LongBody(content, events), self)

    def _failed(self, _error: CarpoolError) -> None:
        self.abort()

    # ── as `AnswerReader` ──

    @property
    def unsent(self) -> int:
        return self._exchange.unsent

    def begin_long(self, _fields: bytes, _length: int | None) -> bool:
        return self._chunked

    def send_view(self, piece: Buffer) -> None:
        self._exchange.go_on(bytes(piece))

    def end_long(self, *, chunked: bool) -> None:
        self._long.popleft()
        if self._ending and not self._long:
            self.end()

    def abort(self) -> None:
        """Cuts its client off, for whom nothing more is worked on."""
        leave = self._exchange.on_disconnect
        self._exchange.cut()
        if leave is not None:
            leave()


def _nothing() -> None:
    """Does nothing, since no caller waits for it."""


def _not_counted(_size: int) -> None:
    """Does nothing, since it was counted before."""
