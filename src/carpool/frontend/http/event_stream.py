"""Server-sent events: the one writer of answers that come piece by piece over HTTP."""

from __future__ import annotations

from time import time

from carpool.errors import Unavailable
from carpool.frontend.call import TOO_SLOW
from carpool.frontend.http.exchange import STREAMED, Exchange, date_line

MOST_UNREAD = 4 << 20
"""Bytes of events that a client has not taken: with more of them it is cut off."""

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n"
)
_END = b"0\r\n\r\n"


class EventStream:
    """One answer. Its head is sent with the first event: until then an error can have a status of its own."""

    __slots__ = ("_exchange", "_fields", "started")

    def __init__(self, exchange: Exchange, fields: bytes = b"") -> None:
        self._exchange = exchange
        self._fields = fields
        self.started = False

    def event(self, data: bytes) -> None:
        """One line of JSON. Raises `Unavailable` for a client that does not read."""
        piece = b"data: %b\n\n" % data
        unread = self._exchange.stream(self._head() + b"%x\r\n%b\r\n" % (len(piece), piece))
        if unread > MOST_UNREAD:
            raise Unavailable(TOO_SLOW, reason="slow-reader")

    def end(self) -> None:
        """Also of one without events."""
        self._exchange.respond(STREAMED, b"", self._head() + _END)

    def _head(self) -> bytes:
        if self.started:
            return b""
        self.started = True
        return b"%b%b%b\r\n" % (_HEAD, self._fields, date_line(time()))
