"""One answer per request, and how a connection ends."""

from __future__ import annotations

import logging
from abc import abstractmethod
from time import monotonic
from typing import TYPE_CHECKING, cast

from carpool.errors import without_stack
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.intake import Intake
from carpool.frontend.http.outgoing import Outgoing
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import Body, Fault

if TYPE_CHECKING:
    from carpool.frontend.http.shared import Shared

logger = logging.getLogger(__name__)

HEAD, BODY, WAITING, LINGER, CLOSED = range(5)


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
