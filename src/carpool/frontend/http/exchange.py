"""Defines what an app sees of the server: a request's head, a plan for its body, an exchange to answer
through, and answers as bytes: errors with their status, the error body that every refusal shares,
compression."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote_to_bytes

from carpool.core.job import Reason
from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    Gone,
    InvalidInput,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    WrongState,
    retry_after,
    without_stack,
)
from carpool.link.senders import NOBODY
from carpool.wire.v2 import encode_error

if TYPE_CHECKING:
    from carpool.frontend.access.keys import Principal
    from carpool.frontend.http.long_answer import AnswerReader, LongBody

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_FIELDS: Final = b"content-type: application/json\r\nx-content-type-options: nosniff\r\n"
REASON_FIELD: Final = b"X-Carpool-Reason: %b\r\n"
"""Of every answer that is an error: for balancers, which read no bodies."""

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NO_CONTENT: Final = 204  # of HTTPStatus, whose attributes are looked up by a function
_GIVEN_UP = Reason.GIVEN_UP.value
More = Callable[[int], memoryview | None]


class Fault(CarpoolError):
    """Describes something about a request that the server answers itself, without asking the app."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.status = status

    def fields(self) -> bytes:
        said = JSON_FIELDS + REASON_FIELD % self.reason.encode()
        return said + (b"retry-after: 1\r\n" if self.status == 503 else b"")

    def body(self) -> bytes:
        return json.dumps({"error": self.message, "reason": self.reason}).encode()


def bad_request(message: str) -> Fault:
    return Fault(400, message, "bad-request")


def render_head(status: int, fields: bytes, length: int, date: bytes) -> bytes:
    """Returns the head of one answer, up to and with the empty line."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
    if status == _NO_CONTENT:
        return b"%b%b%b\r\n" % (line, fields, date)
    return b"%b%b%bcontent-length: %d\r\n\r\n" % (line, fields, date, length)


def stream_head(fields: bytes, date: bytes, *, keep: bool, chunked: bool) -> bytes:
    """Returns the head of an answer in pieces."""
    body = b"transfer-encoding: chunked\r\n" if chunked else b""
    end = b"" if keep else b"connection: close\r\n"
    return b"%b%b%b%b%b\r\n" % (_STATUS_LINES[200], fields, date, body, end)


def rest_of(views: Sequence[memoryview], sent: int) -> bytes:
    """Returns what is left of them after so many bytes."""
    left = []
    for view in views:
        left.append(view[sent:])
        sent = max(0, sent - len(view))
    return b"".join(left)


def date_line(now: float) -> bytes:
    """Returns the Date field; made once per sweep, not once per answer."""
    return b"date: %b\r\n" % formatdate(now, usegmt=True).encode()


class Receive:
    """Put a body of known length straight into `buffer`, then call `done` with the time of its last byte.

    A buffer that is too short for the body needs `more`, which is called with the number of bytes that have
    come whenever it is full. It returns a longer one that holds them already, or None if it has answered.

    The buffer is touched no more once the exchange was answered or `on_disconnect` was called.
    """

    __slots__ = ("buffer", "done", "more")

    def __init__(self, buffer: memoryview, done: Callable[[float], None], more: More | None = None) -> None:
        self.buffer = buffer
        self.done = done
        self.more = more


class Collect:
    """Gather a body of up to `limit` bytes, then call `done` with it and the time of its last byte.

    With `inflate`, a gzip or deflate body is decompressed first and `limit` counts what comes out.
    """

    __slots__ = ("done", "inflate", "limit")

    def __init__(
        self, limit: int, done: Callable[[bytes | bytearray, float], None], *, inflate: bool = True
    ) -> None:
        self.limit = limit
        self.done = done
        self.inflate = inflate


BodyPlan = Receive | Collect | None
"""None reads past the body. After `exchange.respond` the plan no longer matters."""


Start = Callable[["Exchange"], BodyPlan]
"""Begins a request: answers it now, or says where its body goes and answers later."""


def hand_over(plan: BodyPlan, body: bytes | bytearray, at: float) -> None:
    """A body that was gathered before its plan was known, as if it had come just now."""
    if isinstance(plan, Collect):
        plan.done(body, at)
    elif plan is not None:
        buffer: memoryview | None = plan.buffer
        filled = 0
        while buffer is not None:
            end = min(len(buffer), len(body))
            buffer[filled:end] = body[filled:end]
            filled = end
            if filled == len(body):
                plan.done(at)
                return
            assert plan.more is not None  # as of every buffer that may be too short
            buffer = plan.more(filled)


class App(Protocol):
    """Defines what is served. Called in the loop's thread, and must not block it."""

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        """A head has arrived that has no `start`: answer now, or say where the body goes and answer later."""
        ...

    def refused(self, exchange: Exchange, error: CarpoolError) -> None:
        """Answer with what `begin` or a `start` raised."""
        ...

    def reworded(self, head: HttpHead, status: int, body: bytes) -> tuple[int, bytes]:
        """Returns status and body of an error that the server answers itself, in the words of clients that
        use such paths."""
        ...


class Answerer(Protocol):
    """The connection, as far as an exchange needs it."""

    @property
    def unsent(self) -> int: ...

    def answer(self, status: int, fields: bytes, body: Body) -> None: ...

    def answer_long(self, exchange: Exchange, body: LongBody, reader: AnswerReader | None = None) -> None:
        """Writes a 200 in pieces, or what a `reader` makes of them."""
        ...

    def make_room(self) -> bool: ...

    def begin_answer(self, fields: bytes) -> bool:
        """One in pieces, once the body has come; whether it is chunked."""
        ...

    def send(self, data: bytes) -> None: ...

    def end_answer(self) -> None: ...

    def abort(self) -> None: ...


class Before:
    """Stands before the connection of one exchange, and passes on what is answered."""

    __slots__ = ("_connection", "abort", "begin_answer", "end_answer", "make_room", "send")

    def __init__(self, connection: Answerer) -> None:
        self._connection = connection
        self.make_room = connection.make_room
        self.begin_answer = connection.begin_answer
        self.send = connection.send
        self.end_answer = connection.end_answer
        self.abort = connection.abort

    @property
    def unsent(self) -> int:
        return self._connection.unsent

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        self._connection.answer(status, fields, body)

    def answer_long(self, exchange: Exchange, body: LongBody, reader: AnswerReader | None = None) -> None:
        self._connection.answer_long(exchange, body, reader)


class HttpHead:
    """Represents one request's head. Byte-identical requests of a connection share one: don't change it.

    `start` is what the app worked out from a head: it begins the requests that have it. Requests whose heads
    differ only in the length of their bodies or in `traceparent` share it. `who` holds the key that came with
    it.
    """

    __slots__ = (
        *("chunked", "content_length", "expects_continue", "has_body", "headers", "http_minor"),
        *("keep_alive", "method", "path", "query", "start", "target", "who"),
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        parts: tuple[str, str],
        http_minor: int,
        headers: dict[bytes, bytes],
        framing: tuple[int | None, bool],
    ) -> None:
        """Takes `parts`, the path and query of the target, and `framing`: how long the body is, or that it is
        chunked."""
        self.method = method
        self.target = target
        self.path, self.query = parts
        self.http_minor = http_minor
        self.headers = headers
        self.content_length, self.chunked = framing
        self.has_body = self.chunked or bool(self.content_length)
        self.keep_alive = _keeps_alive(headers, http_minor)
        self.expects_continue = _expects_continue(headers, http_minor)
        self.start: Start | None = None
        self.who: Principal | None = None

    def with_length(self, digits: bytes) -> HttpHead:
        """Returns the same head for a body of another length, which is not 0 either."""
        headers, framing = {**self.headers, b"content-length": digits}, (int(digits), False)
        parts = (self.path, self.query)
        head = HttpHead(self.method, self.target, parts, self.http_minor, headers, framing)
        head.start = self.start
        head.who = self.who
        return head

    def copy(self) -> HttpHead:
        """Returns the same head for one request alone."""
        framing, parts = (self.content_length, self.chunked), (self.path, self.query)
        return HttpHead(self.method, self.target, parts, self.http_minor, self.headers, framing)

    def segments(self) -> list[str]:
        """The path between its slashes, each part decoded by itself: an escaped slash stays in its part."""
        return [_unescape(part) for part in self.path[1:].split("/")]


def _keeps_alive(headers: dict[bytes, bytes], minor: int) -> bool:
    options = headers.get(b"connection")
    if options is None:
        return minor > 0
    listed = [option.strip(b" \t") for option in options.lower().split(b",")]
    return b"close" not in listed and (minor > 0 or b"keep-alive" in listed)


def _expects_continue(headers: dict[bytes, bytes], minor: int) -> bool:
    expectation = headers.get(b"expect")
    if expectation is None or minor == 0:
        return False
    if expectation.lower() != b"100-continue":
        raise Fault(417, "the only expectation supported is 100-continue", "bad-expectation")
    return True


def _unescape(part: str) -> str:
    if _BAD_ESCAPE.search(part):
        raise bad_request("the path has a malformed percent escape")
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise bad_request("the path is not UTF-8") from None
    if not text.isprintable():
        raise bad_request("the path holds control characters")
    return text


class Exchange:
    """Represents one request and its one answer.

    `on_disconnect` is called at most once, when no answer is wanted any more: the client left, or its body
    was cut off, too slow or broken, and the server has dealt with it. Setting it also decides what the end of
    the client's stream means while the answer is pending. With it, the client has left, because that is how
    almost every client leaves. Without it, the answer is still sent, for clients that shut down their sending
    side early.
    """

    __slots__ = (
        *("_connection", "first", "head", "head_at", "on_disconnect", "payer", "peer", "sender", "unread"),
        "work",
    )

    def __init__(
        self, connection: Answerer, head: HttpHead, head_at: float, peer: str = "", *, first: bool = True
    ) -> None:
        self._connection: Answerer | None = connection
        self.head = head
        self.head_at = head_at  # `time.monotonic()` when the head was complete
        self.on_disconnect: Callable[[], None] | None = None
        self.unread = 0.0  # seconds for which requests lately lay in their sockets before they were read
        self.first = first  # whether nothing was answered on this connection before
        self.peer = peer  # the client's address
        self.work: asyncio.Future[None] | None = None  # on its body, which ends when no answer is wanted
        self.payer = peer  # who is held to account for this front end's time: the key's holder, once known
        self.sender = NOBODY  # who asks a model, once that is known

    @property
    def who(self) -> Principal | None:
        """Returns whose key came with the request; None where keys are not asked for."""
        return self.head.who

    @property
    def pending(self) -> bool:
        return self._connection is not None

    def respond(self, status: int, fields: bytes = b"", body: Body = b"") -> bool:
        """Writes the answer, from the loop's thread. False, and nothing done, if no answer is wanted any
        more.

        Content-Length, Date and Connection are the server's. When this returns, the body's buffers are sent
        or copied: they can be reused at once.
        """
        connection = self._connection
        if connection is None:
            return False
        self._connection = None
        self.on_disconnect = None
        connection.answer(status, fields, body)
        return True

    def respond_long(self, body: LongBody, reader: AnswerReader | None = None) -> None:
        """Answers 200 with a body in pieces, each in its turn: see `LongAnswer`."""
        if self._connection is None:
            body.events.ended()
        else:
            self._connection.answer_long(self, body, reader)

    # ── an answer in pieces: see `EventStream` ──

    def begin(self, fields: bytes) -> bool:
        """Answers 200; returns whether the body, which `go_on` sends, is chunked. The client may still leave,
        which `on_disconnect` reports."""
        return self._connection is not None and self._connection.begin_answer(fields)

    def go_on(self, data: bytes) -> int:
        """Returns how many bytes the client had still to take, before these."""
        connection = self._connection
        if connection is None:
            return 0
        unread = connection.unsent
        connection.send(data)
        return unread

    @property
    def unsent(self) -> int:
        """Returns how many bytes the client has still to take."""
        return 0 if self._connection is None else self._connection.unsent

    def end(self, data: bytes) -> None:
        connection, self._connection, self.on_disconnect = self._connection, None, None
        if connection is not None:
            connection.send(data)
            connection.end_answer()

    def cut(self) -> None:
        """The client reads too slowly: the rest is not for it."""
        connection, self._connection, self.on_disconnect = self._connection, None, None
        if connection is not None:
            connection.abort()

    def answer_through(self, wrap: Callable[[Answerer], Answerer]) -> None:
        """What is answered goes through this on its way to the connection."""
        if self._connection is not None:
            self._connection = wrap(self._connection)

    def answers_through(self, kind: type[Before]) -> bool:
        """Returns whether an object of this class was the last that was put before the connection."""
        return isinstance(self._connection, kind)

    def make_room(self) -> bool:
        """Memory for bodies is short: cut off another that comes too slowly; False if none does."""
        return self._connection is not None and self._connection.make_room()

    def forsake(self) -> Callable[[], None] | None:
        """Is called by the connection: nothing will be answered; returns the app's callback, the first
        time."""
        callback, self.on_disconnect = self.on_disconnect, None
        self._connection = None
        work, self.work = self.work, None
        if work is not None:
            work.cancel()
        return callback


# ── answers ──


class WrongMethod(CarpoolError):
    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        message = f"{method} is not allowed here; allowed is {self.allowed}"
        super().__init__(message, reason="method-not-allowed")


STATUSES: dict[type[CarpoolError], int] = {
    InvalidInput: 400,
    ConfigError: 400,
    Cancelled: 499,  # the client is gone: only spans and logs read it
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    WrongMethod: 405,
    Replaced: 409,
    WrongState: 409,
    Gone: 410,
    TooLarge: 413,
    Refused: 429,
    Unsupported: 501,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
"""Everything else is the server's or the model's fault: 500."""


def status_of(error: CarpoolError, gate_status: int = 429) -> int:
    """`gate_status` is for who was refused at the gate: another replica may take it at once. Who was given
    up after a wait has no time left for that."""
    if isinstance(error, Refused) and error.reason != _GIVEN_UP:
        return gate_status
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return 500


def fields_of(error: CarpoolError) -> bytes:
    """Retry-After is in whole seconds; the body's `retry_after_s` is what a patient program reads."""
    fields = JSON_FIELDS + REASON_FIELD % error.reason.encode()
    wait = retry_after(error)
    if wait is not None:
        return b"%bRetry-After: %d\r\n" % (fields, wait)
    if isinstance(error, Unauthenticated):
        return fields + b"WWW-Authenticate: Bearer\r\n"
    if isinstance(error, WrongMethod):
        return b"%bAllow: %b\r\n" % (fields, error.allowed.encode())
    return fields


def answer_error(
    exchange: Exchange, error: CarpoolError, more_fields: bytes = b"", gate_status: int = 429
) -> None:
    """Answers with an error, and drops its stack: where it came from is not needed any more."""
    without_stack(error)
    status, fields, body = rendered(error, gate_status)
    exchange.respond(status, fields + more_fields, body)


def rendered(error: CarpoolError, gate_status: int = 429) -> tuple[int, bytes, bytes]:
    """Returns status, fields and body: all that is needed of an error, which may hold much more than that."""
    kept = error.rendered if isinstance(error, Refused) else None
    found: tuple[int, bytes, bytes] | None = None if kept is None else kept.get("http")
    if found is None:
        found = status_of(error, gate_status), fields_of(error), encode_error(error)
        if kept is not None:
            kept["http"] = found
    return found


def choose_encoding(accepted: bytes | None) -> bytes | None:
    """Returns the best answer to an Accept-Encoding field: gzip, deflate, or None for the plain body."""
    if not accepted:
        return None
    quality: dict[bytes, float] = {}
    for part in accepted.lower().split(b","):
        name, _, parameter = part.partition(b";")
        quality[name.strip()] = _quality(parameter)
    anything = quality.get(b"*", 0.0)
    gzip = quality.get(b"gzip", quality.get(b"x-gzip", anything))
    deflate = quality.get(b"deflate", anything)
    if max(gzip, deflate, quality.get(b"identity", 0.0)) <= 0 or quality.get(b"identity", 0.0) > max(
        gzip, deflate
    ):
        return None
    return b"gzip" if gzip >= deflate else b"deflate"


def _quality(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(body: bytes, encoding: bytes, level: int = 6) -> bytes:
    """Returns `body` in one of the encodings that `choose_encoding` names."""
    compressor = zlib.compressobj(
        level, zlib.DEFLATED, 16 + zlib.MAX_WBITS if encoding == b"gzip" else zlib.MAX_WBITS
    )
    return compressor.compress(body) + compressor.flush()
