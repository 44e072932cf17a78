"""A server on a uvloop thread, an app that does what its path says, and a client that speaks bytes."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from carpool.errors import CarpoolError
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Receive,
    answer_error,
)
from carpool.frontend.http.fairness import Unread
from carpool.frontend.http.http_server import HttpServer, listen
from carpool.frontend.http.limits import Limits
from waiting import until

PATIENCE = 30.0  # far more than anything takes, also where most of the machine is stolen
T = TypeVar("T")

QUICK: dict[str, Any] = {
    "sweep_s": 0.02,
    "header_timeout_s": 0.15,
    "body_timeout_s": 0.15,
    "write_timeout_s": 0.15,
    "idle_timeout_s": 0.15,
    "drain_timeout_s": 0.15,
    "linger_timeout_s": 0.15,
}
SPOKEN = QUICK | {"header_timeout_s": 2 * PATIENCE}  # who is slow to begin is not the matter


class PathApp:
    """Each path names a way to treat a request."""

    def __init__(self) -> None:
        self.held: queue.Queue[Exchange] = queue.Queue()
        self.left: queue.Queue[str] = queue.Queue()
        self.heads: list[HttpHead] = []
        self.slot = bytearray(1 << 20)
        self.large = bytearray(8 << 20)
        self.limit = 1 << 20

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        self.heads.append(head)
        name = head.path[1:] or "root"
        way: Callable[[HttpHead, Exchange], BodyPlan] | None = getattr(self, name, None)
        if way is None:
            exchange.respond(404, b"", b"no such path")
            return None
        return way(head, exchange)

    def refused(self, exchange: Exchange, error: CarpoolError) -> None:
        answer_error(exchange, error)

    def reworded(self, _head: HttpHead, status: int, body: bytes) -> tuple[int, bytes]:
        return status, body

    def root(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        exchange.respond(200, b"content-type: text/plain\r\n", b"hello")
        return None

    def echo(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        return Collect(self.limit, lambda body, _at: ignore(exchange.respond(200, b"", bytes(body))))

    def raw(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        def done(body: bytes | bytearray, _at: float) -> None:
            exchange.respond(200, b"", bytes(body))

        return Collect(self.limit, done, inflate=False)

    def place(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        if head.content_length is None:
            exchange.respond(411, b"", b"length needed")
            return None
        size = head.content_length

        def done(at: float) -> None:
            assert at >= exchange.head_at
            exchange.respond(200, b"", bytes(self.slot[:size]))

        return Receive(memoryview(self.slot), done)

    def place_hold(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        exchange.on_disconnect = lambda: self.left.put("place")
        self.held.put(exchange)
        return Receive(memoryview(self.slot), lambda _at: None)

    def hold(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        exchange.on_disconnect = lambda: self.left.put("hold")
        self.held.put(exchange)
        return Collect(self.limit, lambda _body, _at: None)

    def wait(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        """As hold, but the app does not care whether the client leaves."""
        self.held.put(exchange)
        return None

    def refuse(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        exchange.respond(429, b"retry-after: 1\r\n", b"no")
        return None

    def nothing(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        exchange.respond(204)
        return None

    def big(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        """Answers from a buffer that it overwrites at once, as the next user of a slot would."""
        self.large[:] = b"a" * len(self.large)
        exchange.respond(200, b"", [b"<", memoryview(self.large), b">"])
        self.large[:] = b"b" * len(self.large)
        return None

    def crash(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        raise KeyError("a bug in the app")

    def crash_late(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        def done(_body: bytes | bytearray, _at: float) -> None:
            raise KeyError("a bug in the app")

        return Collect(self.limit, done)

    def short(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        return Receive(memoryview(bytearray(1)), lambda _at: None)


def ignore(_value: object) -> None:
    return None


@dataclass
class Serving:
    """A running server, seen from the test's thread."""

    app: Any
    limits: Limits
    host: str = "127.0.0.1"
    port: int = 0
    stopped: bool = False
    unread: Unread | None = None
    tls: ssl.SSLContext | None = None
    thread: threading.Thread = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    server: HttpServer = field(init=False)

    def __post_init__(self) -> None:
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(PATIENCE)

    def _run(self, ready: threading.Event) -> None:
        self.loop = uvloop.new_event_loop()
        self.server = HttpServer(self.app, self.limits, self.unread)
        sockets = listen(self.host, self.port)
        self.port = sockets[0].getsockname()[1]
        self.loop.run_until_complete(self.server.start(sockets, self.tls))
        ready.set()
        self.loop.run_forever()
        self.loop.close()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run it in the loop's thread."""

        async def inside() -> T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(inside(), self.loop).result(PATIENCE)

    def stop(self, within_s: float = 1.0) -> int:
        self.stopped = True
        future = asyncio.run_coroutine_threadsafe(self.server.stop(within_s), self.loop)
        return future.result(PATIENCE)

    def end(self) -> None:
        if not self.stopped:
            self.stop(0.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def connect(self, **options: Any) -> Client:
        return Client(self.host, self.port, **options)

    def serves(self) -> bool:
        """Whether a newcomer is answered. It may be held up itself, and then be closed for that."""
        try:
            with self.connect() as client:
                return client.get().status == 200
        except (OSError, AssertionError):
            return False

    def until_connections(self, count: int) -> None:
        until(lambda: self.server.connections == count)


@contextlib.contextmanager
def serving(
    app: Any = None,
    host: str = "127.0.0.1",
    unread: Unread | None = None,
    tls: ssl.SSLContext | None = None,
    **limits: Any,
) -> Iterator[Serving]:
    server = Serving(app or PathApp(), Limits(**limits), host, unread=unread, tls=tls)
    try:
        yield server
    finally:
        server.end()


@dataclass
class Response:
    status: int
    fields: dict[str, str]
    body: bytes


class Client:
    """One connection; everything is bounded in time."""

    def __init__(
        self, host: str, port: int, *, receive_buffer: int | None = None, source: str | None = None
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source is not None:
            self.socket.bind((source, 0))
        self.socket.settimeout(PATIENCE)
        self._buffer = b""
        try:
            self.socket.connect((host, port))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def get(self, path: str = "/", extra: bytes = b"") -> Response:
        self.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path.encode(), extra))
        return self.response()

    def ask(self, method: str, path: str, extra: bytes = b"") -> Response:
        """Without a body, whatever the method."""
        head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n%b\r\n"
        self.send(head % (method.encode(), path.encode(), extra))
        return self.response()

    def post(self, path: str, body: bytes, extra: bytes = b"") -> Response:
        self.send(post(path, body, extra))
        return self.response()

    def response(self, *, head_only: bool = False) -> Response:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        status, fields = parse_response_head(head)
        if fields.get("transfer-encoding") == "chunked":
            return Response(status, fields, self._chunks())
        size = 0 if head_only or status == 204 or status < 200 else int(fields["content-length"])
        body = bytearray(self._buffer)
        while len(body) < size:
            data = self.socket.recv(1 << 18)
            assert data, f"closed after {len(body)} of {size} bytes"
            body += data
        self._buffer = bytes(body[size:])
        return Response(status, fields, bytes(body[:size]))

    def _chunks(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self._buffer:
                self._more()
            line, _, self._buffer = self._buffer.partition(b"\r\n")
            size = int(line, 16)
            while len(self._buffer) < size + 2:
                self._more()
            body += self._buffer[:size]
            assert self._buffer[size : size + 2] == b"\r\n"
            self._buffer = self._buffer[size + 2 :]
            if not size:
                return body

    def until(self, word: bytes) -> None:
        """It has come, somewhere."""
        while word not in self._buffer:
            self._more()

    def rest(self) -> bytes:
        """All until the server closes."""
        while data := self.socket.recv(1 << 16):
            self._buffer += data
        return self._buffer

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"closed after {self._buffer[:200]!r}"
        self._buffer += data

    def is_closed(self) -> bool:
        """Waits for the end of the stream; False if something else comes."""
        if self._buffer:
            return False
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def finish_sending(self) -> Client:
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Leave without a word."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n" % (
        path.encode(),
        len(body),
        extra,
    )
    return head + body


def chunked(path: str, chunks: bytes, extra: bytes = b"") -> bytes:
    start = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%b\r\n"
    return start % (path.encode(), extra) + chunks


def parse_response_head(head: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = head.decode("ascii").split("\r\n")
    version, status, _reason = line.split(" ", 2)
    assert version == "HTTP/1.1"
    fields = {}
    for text in lines:
        name, separator, value = text.partition(": ")
        assert separator
        assert name.lower() not in fields
        fields[name.lower()] = value
    return int(status), fields
