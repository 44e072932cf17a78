"""The socket of a transport, for what only the kernel can do: it stays the transport's, which closes it."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Sequence
from typing import cast

_nowhere = bytearray(1024 * 1024)
_HUNG_UP = getattr(select, "POLLRDHUP", 0)  # Linux's; elsewhere only an end in both directions is seen


class BorrowedSocket:
    __slots__ = ("_transport", "socket")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.socket: socket.socket | None = None  # once `get` has made it

    def descriptor(self) -> int:
        """Valid until connection_lost: only then does the transport close it."""
        return cast(int, self._transport.get_extra_info("socket").fileno())

    def get(self) -> socket.socket:
        """Returns the socket, which is made once: that is a system call."""
        if self.socket is None:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self.descriptor())
        return self.socket

    def write(self, views: Sequence[memoryview]) -> int:
        """As many bytes as the kernel takes at once, uncopied; returns how many."""
        if self._transport.is_closing():
            return 0
        try:
            return os.writev(self.descriptor(), views)
        except BlockingIOError:
            return 0
        except OSError:
            self._transport.abort()
            return 0

    def give_back(self) -> None:
        """Before the transport closes it: from then on its number may be another's."""
        borrowed, self.socket = self.socket, None
        if borrowed is not None:
            borrowed.detach()


def has_hung_up(descriptor: int) -> bool:
    """Returns whether the other side sends no more: seen also where what it sent before is not read, and so
    the loop does not hear of it."""
    poll = select.poll()
    poll.register(descriptor, _HUNG_UP)
    return bool(poll.poll(0))


def skip_received(connection: socket.socket, count: int) -> int:
    """Throw away up to `count` bytes that a TCP socket has received, without copying; returns how many."""
    skipped = 0
    try:
        while skipped < count:
            wanted = min(count - skipped, len(_nowhere))
            got = connection.recv_into(_nowhere, wanted, socket.MSG_TRUNC)
            skipped += got
            if got < wanted:
                break
    except OSError:
        pass  # nothing there for now, or an error that the transport will find by itself
    return skipped
