"""What an app sees of the server: a request's head, a plan for its body, an exchange to answer through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from carpool.frontend.access.keys import Principal
from carpool.frontend.http.parsing import RequestHead
from carpool.frontend.http.responses import Body, Fields, render_fields

More = Callable[[int], memoryview | None]


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


class App(Protocol):
    """What is served. Called in the loop's thread, and must not block it."""

    def begin(self, head: RequestHead, exchange: Exchange) -> BodyPlan:
        """A head has arrived: answer now, or say where the body goes and answer later."""
        ...


class Answerer(Protocol):
    """The connection, as far as an exchange needs it."""

    def answer(self, status: int, fields: bytes, body: Body) -> None: ...

    def make_room(self) -> bool: ...


class Exchange:
    """One request and its one answer.

    `on_disconnect` is called at most once, when no answer is wanted any more: the client left, or its body
    was cut off, too slow or broken, and the server has dealt with it. Setting it also decides what the end of
    the client's stream means while the answer is pending. With it, the client has left, because that is how
    almost every client leaves. Without it, the answer is still sent, for clients that shut down their sending
    side early.
    """

    __slots__ = ("_connection", "first", "head", "head_at", "on_disconnect", "peer", "unread")

    def __init__(
        self, connection: Answerer, head: RequestHead, head_at: float, peer: str = "", *, first: bool = True
    ) -> None:
        self._connection: Answerer | None = connection
        self.head = head
        self.head_at = head_at
        """`time.monotonic()` when the head was complete."""
        self.on_disconnect: Callable[[], None] | None = None
        self.unread = 0.0
        """Seconds for which requests lately lay in their sockets before they were read."""
        self.first = first
        """Whether nothing was answered on this connection before."""
        self.peer = peer
        """The client's address."""

    @property
    def who(self) -> Principal | None:
        """Whose key came with the request; None where keys are not asked for."""
        return self.head.who

    @property
    def payer(self) -> str:
        """Who is held to account for this front end's time: the key's holder, or else the address."""
        return self.peer if self.head.who is None else self.head.who.name

    @property
    def pending(self) -> bool:
        """Whether an answer is still wanted."""
        return self._connection is not None

    def respond(self, status: int, fields: Fields = b"", body: Body = b"") -> bool:
        """Answer, from the loop's thread. False, and nothing done, if no answer is wanted any more.

        Content-Length, Date and Connection are the server's. When this returns, the body's buffers are sent
        or copied: they can be reused at once.
        """
        connection = self._connection
        if connection is None:
            return False
        rendered = fields if isinstance(fields, bytes) else render_fields(fields)
        self._connection = None
        self.on_disconnect = None
        connection.answer(status, rendered, body)
        return True

    def make_room(self) -> bool:
        """Memory for bodies is short: cut off another that comes too slowly; False if none does."""
        return self._connection is not None and self._connection.make_room()

    def forsake(self) -> Callable[[], None] | None:
        """For the connection: nothing will be answered; returns the app's callback, the first time."""
        callback, self.on_disconnect = self.on_disconnect, None
        self._connection = None
        return callback
