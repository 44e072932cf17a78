"""Server-sent events: an answer that comes in pieces, in the order in which they are written.

The head goes out with the first event, so that whoever is refused before that gets a status. A client that
does not read is cut off when an event comes and more than a bounded number of bytes wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from carpool.errors import Cancelled
from carpool.frontend.http.exchange import Exchange

MOST_UNREAD = 256 * 1024
"""Bytes that may wait for a client, beyond what its socket takes, when the next event comes: one event may be
larger."""
EVENT_FIELDS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
    b"x-accel-buffering: no\r\nvary: accept\r\n"
)


def as_event(data: bytes) -> bytes:
    """Of one line."""
    return b"data: %b\n\n" % data


class EventStream:
    """The answer to one exchange. Of the loop's thread."""

    __slots__ = ("_chunked", "_exchange")

    def __init__(self, exchange: Exchange, fields: bytes = b"") -> None:
        """Sends the head; `fields` are more of it."""
        self._exchange = exchange
        self._chunked = exchange.begin(EVENT_FIELDS + fields)

    def send(self, events: Iterable[bytes]) -> None:
        """Each of them one line of data. Raises `Cancelled` for a client that reads too slowly, who is gone
        then; one that has left is passed over in silence."""
        data = b"".join(map(as_event, events))
        if data and self._exchange.go_on(self._framed(data)) > MOST_UNREAD:
            self._exchange.cut()
            raise Cancelled(f"the client has left more than {MOST_UNREAD} bytes unread", reason="slow-reader")

    def end(self) -> None:
        self._exchange.end(b"0\r\n\r\n" if self._chunked else b"")

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
