"""The sending half of a connection, and its end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, cast

from carpool.frontend.http.responses import Body, render_head

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

_COPIED_TOGETHER = 64 * 1024
_WITHOUT_BODY = (204, 304)
_MOST_PIECES = 512  # the kernel takes 1024 per call


class Outgoing(asyncio.BufferedProtocol):
    """Sends bytes that may belong to a slot: they are out or copied when a send returns."""

    __slots__ = ("_borrowed", "_secure", "_shared", "_stalled", "_stalled_at", "_transport", "_unsent")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._stalled = False
        self._stalled_at = 0.0
        self._unsent = 0
        self._borrowed: socket.socket | None = None
        self._secure = False  # over TLS: what the socket holds is not what is sent and received
        self._transport: asyncio.Transport

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to read."""
        return self._transport.get_write_buffer_size()

    def _send(self, data: bytes) -> None:
        try:
            self._transport.write(data)
        except RuntimeError:
            self._transport.abort()  # uvloop raises when the handle is closed already

    def _send_answer(self, status: int, fields: bytes, body: Body, head_only: bool) -> None:
        head_only = head_only or status in _WITHOUT_BODY
        date = self._shared.date
        if isinstance(body, bytes):
            start = render_head(status, fields, len(body), date)
            if head_only:
                self._send(start)
            elif len(body) <= _COPIED_TOGETHER:
                self._send(start + body)
            else:
                self._send_pieces([memoryview(start), memoryview(body)])
            return
        pieces = (body,) if isinstance(body, bytearray | memoryview) else body
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        start = render_head(status, fields, sum(map(len, views)), date)
        self._send_pieces([memoryview(start)] if head_only else [memoryview(start), *views])

    def _send_pieces(self, views: Sequence[memoryview]) -> None:
        size = sum(map(len, views))
        if size <= _COPIED_TOGETHER or self._stalled or self._secure or len(views) > _MOST_PIECES:
            self._send(b"".join(views))
            return
        sent = self._write_now(views)
        if sent < size:
            # Copied: the transport would hold the buffers, and so the slot, until the client has read.
            self._send(_rest(views, sent))

    def _write_now(self, views: Sequence[memoryview]) -> int:
        if self._transport.is_closing():
            return 0
        try:
            return os.writev(self._descriptor(), views)
        except BlockingIOError:
            return 0
        except OSError:
            self._transport.abort()
            return 0

    def _descriptor(self) -> int:
        """Valid until connection_lost: only then does the transport close it."""
        return cast(int, self._transport.get_extra_info("socket").fileno())

    def _borrow(self) -> socket.socket:
        """The transport's own socket, for what only the kernel can do. Made once: that is a system call."""
        if self._borrowed is None:
            self._borrowed = borrow(self._descriptor())
        return self._borrowed

    def _give_back(self) -> None:
        """Before the transport closes it: from then on its number may be another's."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            borrowed.detach()

    def pause_writing(self) -> None:
        """The client does not read as fast as we answer."""
        self._stalled = True
        self._stalled_at = monotonic()
        self._unsent = self.unsent
        stalled = self._shared.stalled
        stalled.add(self)
        if sum(connection.unsent for connection in stalled) > self._shared.limits.max_unsent_bytes:
            self._transport.abort()

    def resume_writing(self) -> None:
        self._stalled = False
        self._shared.stalled.discard(self)

    def _reads_too_slowly(self, now: float) -> bool:
        limits = self._shared.limits
        if now - self._stalled_at < limits.write_timeout_s:
            return False
        unsent = self.unsent
        if self._unsent - unsent < limits.min_progress_bytes:
            return True
        self._stalled_at = now
        self._unsent = unsent
        return False


def borrow(descriptor: int) -> socket.socket:
    """A socket over a descriptor that is another's to close: `detach` it in time."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The client's address; nothing for a socket that has none."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else ""


def _rest(views: Sequence[memoryview], sent: int) -> bytes:
    left = []
    for view in views:
        left.append(view[sent:])
        sent = max(0, sent - len(view))
    return b"".join(left)
