"""How long requests lie in their sockets before the loop reads them."""

from __future__ import annotations

import socket
import struct

_EVERY_S = 0.005
_LAST_DATA_RECEIVED = struct.Struct("52xI")  # of Linux's struct tcp_info: milliseconds since data came last
_KEPT_S = 0.25  # what was seen, while nobody comes who can be asked
_LONGEST_S = 10.0  # what would be more is no wait: it is a field that means something else here


class Unread:
    """Asked of the kernel, which alone knows: it notes when data comes, to the tick (4 ms or less).

    The loop's own turns would say less. uvloop does not tell when it polled, a poll that returns late cannot
    be told from one that had nothing to return, and on a busy machine it is just the waking up that takes
    long. A question to the kernel costs some microseconds, so the answer is good for all requests of the next
    few milliseconds: of the same turn, mostly.
    """

    __slots__ = ("look_at", "seconds")

    def __init__(self) -> None:
        self.look_at = 0.0
        self.seconds = 0.0

    def look(self, connection: socket.socket, now: float) -> None:
        """A request has just been read from this socket, to its end."""
        self.look_at = now + _EVERY_S
        self.seconds = waited(connection)

    def cannot_look(self, now: float) -> None:
        """A request has been read whose wait says nothing. What was seen long ago says nothing, either."""
        if now >= self.look_at + _KEPT_S:
            self.seconds = 0.0


def waited(connection: socket.socket) -> float:
    """Seconds since data came on a TCP socket; 0 where that cannot be told."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
        seconds: float = _LAST_DATA_RECEIVED.unpack(told)[0] / 1e3
    except (AttributeError, OSError, struct.error):  # no Linux, no TCP, or gone already
        return 0.0
    return seconds if seconds <= _LONGEST_S else 0.0
