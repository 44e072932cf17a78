"""One answer per request: how it is sent, whether one is due, what follows it, and how a connection ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, cast

from carpool.errors import without_stack
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.intake import Intake
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import Body, Fault, render_head

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

logger = logging.getLogger(__name__)

HEAD, BODY, WAITING, LINGER, CLOSED = range(5)

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


class Answering(Outgoing):
    """The part of a connection that knows whether an answer is due and what follows it; see `connection`."""

    __slots__ = (
        "_ahead",
        "_busy",
        "_ended",
        "_exchange",
        "_head",
        "_intake",
        "_keep",
        "_phase",
        "_queued",
        "_served",
        "_since",
    )

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._phase = HEAD
        self._since = monotonic()  # when the phase, or its current window, began
        self._ahead = b""  # read, but not used yet
        self._queued = False  # behind an earlier request of this connection: it lies unread for that reason
        self._busy = False  # requests are being taken out of what was read, further up the stack
        self._ended = False  # the client has sent all it will send
        self._served = False  # it had an answer before
        self._intake = Intake(shared.limits, shared.ledger)
        self._head: RequestHead | None = None
        self._exchange: Exchange | None = None  # None again as soon as there is nothing left to answer
        self._keep = True  # the connection outlives the current request

    @abstractmethod
    def _continue(self) -> None:
        """Go on with what was read ahead."""

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        """Send the one answer of the current request, and go on."""
        self._exchange = None
        head = self._head
        if self._phase == BODY and self._keep:
            self._keep = self._worth_skipping(cast(RequestHead, head))
        if not self._keep:
            fields += b"connection: close\r\n"
        elif head is not None and head.http_minor == 0:
            fields += b"connection: keep-alive\r\n"
        self._send_answer(status, fields, body, head is not None and head.method == "HEAD")
        if self._phase == WAITING:
            self._next_request()
        elif self._keep:
            self._intake.skip(cast(RequestHead, head))
            self._since = monotonic()
        else:
            self._linger()

    def make_room(self) -> bool:
        """For an app that has no memory for this body."""
        return self._shared.cut_off_slowest(self)

    def _worth_skipping(self, head: RequestHead) -> bool:
        """Whether the connection outlives an answer that comes before the end of the body."""
        if head.expects_continue and not self._intake.started:
            return (
                False  # some clients send the body now and others don't: there is no telling what comes next
            )
        left = 0 if head.content_length is None else head.content_length - self._intake.received
        return left <= self._shared.limits.drain_bytes

    def _next_request(self) -> None:
        if not self._keep:
            if self._ahead:
                self._linger()
            else:
                self._close()
            return
        self._phase = HEAD
        self._since = monotonic()
        self._served = True
        if (self._ahead or self._ended) and not self._busy:
            self._continue()

    def _reject(self, fault: Fault) -> None:
        """Answer in the app's place."""
        self._abandon()
        self._shared.answered_here[fault.reason] += 1
        self.answer(fault.status, fault.fields(), fault.body())

    def _fail(self, fault: Fault) -> None:
        """Answer in the app's place and end the connection: what follows on it could be anything."""
        self._keep = False
        self._reject(fault)

    def _linger(self) -> None:
        """Everything is said; wait for the client to read it."""
        if self._ended or self._transport.is_closing() or not self._shared.may_linger():
            self._close()
            return
        self._phase = LINGER
        self._since = monotonic()
        self._ahead = b""
        self._intake.forget()
        self._shared.lingering += 1
        self._transport.resume_reading()
        if not self._secure:  # TLS cannot close one direction alone
            self._transport.write_eof()

    def _close(self) -> None:
        """Close as soon as what was sent is out."""
        if self._phase == LINGER:
            self._shared.lingering -= 1
        self._phase = CLOSED
        self._intake.forget()
        self._abandon()
        self._transport.close()

    def _look_how_long_unread(self, now: float) -> None:
        unread = self._shared.unread
        if now < unread.look_at:
            return
        if self._queued:
            unread.cannot_look(now)
        else:
            unread.look(self._borrow(), now)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Fault):
            fault = error
        else:
            logger.error("the app failed on a request", exc_info=error)
            without_stack(error)
            fault = Fault(500, "the server failed on this request", "internal")
        if self._exchange is not None:
            self._reject(fault)

    def _abandon(self) -> None:
        """Whatever the app does for the current request is no longer wanted."""
        exchange, self._exchange = self._exchange, None
        callback = None if exchange is None else exchange.forsake()
        if callback is not None:
            try:
                callback()
            except Exception:
                logger.exception("the app failed when its client left")


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
