"""Implements the connections to one server, for both clients: one core of coroutines over two kinds of
sockets.

`AsyncClient` awaits these coroutines in its loop. `Client` runs them in the thread that asks (`run`): over a
blocking socket no coroutine ever suspends, because every await returns when the socket's own call has.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from select import POLLIN, poll
from time import monotonic, sleep
from typing import Any, ParamSpec, Protocol

from carpool.client.questions import IDLE_S, MOST_REPLY_BYTES, Question, Server, Value, error_of, trace_fields
from carpool.wire.http_reply import ByteReader, NotHttp, Reply, ReplyBody, TooLong, begin_reply, read_reply

_AT_ONCE = 64 * 1024
Given = ParamSpec("Given")


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """Runs a coroutine whose awaits all return at once, as those over a `BlockingRuntime` do."""
    try:
        work.send(None)
    except StopIteration as done:
        result: Value = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine over blocking sockets has suspended")


class Stream(ByteReader, Protocol):
    """Represents a connection of either kind."""

    async def send(self, head: bytes, body: bytes | bytearray | memoryview) -> None:
        """A server that does not want the whole body may answer and close before its end: no error."""

    def is_quiet(self) -> bool:
        """Returns whether it is open with nothing to read, so that another request can be sent."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Closes as `close` does, but what was written need not arrive."""

    async def closed(self) -> None: ...


class Changing(Protocol):
    """Defines a condition of either kind: the part of `asyncio.Condition` that is used."""

    async def __aenter__(self) -> None: ...
    async def __aexit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...
    async def wait_for(self, predicate: Callable[[], Value], /) -> Value: ...
    def notify_all(self) -> None: ...


class Runtime(Protocol):
    """Defines what the core asks of the loop, or of the thread, that it runs in."""

    async def connect(self, server: Server, timeout_s: float) -> Stream: ...
    def within(self, seconds: float) -> AbstractAsyncContextManager[object]: ...
    async def sleep(self, seconds: float) -> object: ...
    async def apart(self, work: Callable[Given, Value], *given: Given.args, **named: Given.kwargs) -> Value:
        """Calls what takes long where it holds up no other request of this client."""

    def condition(self) -> Changing: ...


# ---- asyncio


class AsyncStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reader = reader
        self.read = reader.read

    async def send(self, head: bytes, body: bytes | bytearray | memoryview) -> None:
        self._writer.write(head)
        self._writer.write(body)
        with suppress(ConnectionError):
            await self._writer.drain()

    def is_quiet(self) -> bool:
        return not self._reader.at_eof() and not self._writer.transport.is_closing()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def closed(self) -> None:
        with suppress(Exception):
            await self._writer.wait_closed()


class AsyncRuntime:
    within = staticmethod(asyncio.timeout)
    sleep = staticmethod(asyncio.sleep)

    async def apart(self, work: Callable[Given, Value], *given: Given.args, **named: Given.kwargs) -> Value:
        return await asyncio.to_thread(work, *given, **named)

    def condition(self) -> asyncio.Condition:
        return asyncio.Condition()

    async def connect(self, server: Server, timeout_s: float) -> Stream:  # noqa: ARG002 - `within` has it
        return AsyncStream(*await asyncio.open_connection(server.host, server.port, ssl=server.tls))


# ---- threads


class BlockingStream:
    """Wraps a socket whose timeout is for each of its calls."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    async def read(self, most: int) -> bytes:
        return self._socket.recv(most)

    async def send(self, head: bytes, body: bytes | bytearray | memoryview) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            if len(body) < _AT_ONCE:
                self._socket.sendall(b"".join((head, body)))
            else:
                self._socket.sendall(head)
                self._socket.sendall(body)

    def is_quiet(self) -> bool:
        look = poll()
        look.register(self._socket, POLLIN)
        return not look.poll(0)

    def close(self) -> None:
        self._socket.close()

    abort = close

    async def closed(self) -> None:
        pass


class BlockingCondition:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.notify_all = self._condition.notify_all

    async def __aenter__(self) -> None:
        self._condition.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._condition.release()

    async def wait_for(self, predicate: Callable[[], Value]) -> Value:
        return self._condition.wait_for(predicate)


class BlockingRuntime:
    condition = BlockingCondition

    async def connect(self, server: Server, timeout_s: float) -> Stream:
        connected = socket.create_connection((server.host, server.port), timeout_s)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if server.tls is not None:
                connected = server.tls.wrap_socket(connected, server_hostname=server.host)
        except BaseException:
            connected.close()
            raise
        return BlockingStream(connected)

    def within(self, seconds: float) -> AbstractAsyncContextManager[object]:  # noqa: ARG002 - streams do
        return nullcontext()

    async def sleep(self, seconds: float) -> None:
        sleep(seconds)

    async def apart(self, work: Callable[Given, Value], *given: Given.args, **named: Given.kwargs) -> Value:
        return work(*given, **named)


# ---- the core


class Connections:
    """Those to one server: as many as are needed at once, and `most` of them are kept for the next time.

    Threads share it: the list of idle ones is changed by single operations only.
    """

    def __init__(self, runtime: Runtime, server: Server, timeout_s: float, most: int) -> None:
        self.runtime = runtime
        self.server = server
        self.timeout_s = timeout_s
        self._most = most
        self._idle: list[tuple[float, Stream]] = []

    async def ask(self, question: Question[Any]) -> Reply:
        """Sends a request and returns its reply, or raises the error that the reply reports."""
        reply = await self.reply(question)
        if reply.status != 200:
            raise error_of(reply.status, reply.fields, reply.body)
        return reply

    async def reply(self, question: Question[Any]) -> Reply:
        """Whatever its status is."""
        stream, reply = await self._exchange(question, lambda stream: read_reply(stream, MOST_REPLY_BYTES))
        self.give_back(stream, reply.keep)
        return reply

    async def begin(self, question: Question[Any]) -> tuple[Stream, ReplyBody]:
        """The reply's body is still to be read, and the stream to be given back."""
        return await self._exchange(question, _begin)

    async def _exchange(
        self, question: Question[Any], read: Callable[[Stream], Coroutine[Any, Any, Value]]
    ) -> tuple[Stream, Value]:
        server = self.server
        lines = [f"{question.method} {server.prefix}{question.path} HTTP/1.1", f"Host: {server.where}"]
        fields = {**server.fields, **question.fields, **trace_fields()}
        lines += [f"{name}: {value}" for name, value in fields.items()]
        lines += [f"Content-Length: {len(question.body)}", "", ""]
        async with self._in_time():
            stream = self._take() or await self.runtime.connect(server, self.timeout_s)
            try:
                await stream.send("\r\n".join(lines).encode("latin-1"), question.body)
                return stream, await read(stream)
            except BaseException:
                stream.abort()
                raise

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        server = self.server
        try:
            async with self.runtime.within(self.timeout_s):
                yield
        except TimeoutError:
            raise server.too_slow(self.timeout_s) from None
        except OSError as error:
            raise server.lost(f"no response: {error.strerror or error}") from None
        except (NotHttp, TooLong) as error:
            raise server.lost(f"the response cannot be read: {error}") from None

    def _take(self) -> Stream | None:
        """One that the server has not closed meanwhile: a request that is lost cannot be sent again."""
        while self._idle:
            try:
                since, stream = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if monotonic() - since < IDLE_S and stream.is_quiet():
                return stream
            stream.close()
        return None

    def give_back(self, stream: Stream, keep: bool) -> None:
        if keep and len(self._idle) < self._most:
            self._idle.append((monotonic(), stream))
        else:
            stream.close()

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for _, stream in idle:
            stream.close()
        for _, stream in idle:
            await stream.closed()


async def _begin(stream: Stream) -> ReplyBody:
    reply = await begin_reply(stream, MOST_REPLY_BYTES)
    if reply.status != 200:
        raise error_of(reply.status, reply.fields, await reply.whole())
    return reply
