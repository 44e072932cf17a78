"""A server on loopback that does what a test says with each connection, on the generator's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

Handle = Callable[["Exchange"], Awaitable[None]]
T = TypeVar("T")
PATIENCE = 60.0

METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "test",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}
ANSWER = json.dumps(
    {"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
TIMING = b'Server-Timing: decode;dur=0.1, queue;dur=2.0, infer;dur=4.0, post;dur=0.1, batch;desc="3"\r\n'


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """With a bound: whatever hangs is a failure."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return uvloop.run(bounded())


class Exchange:
    """One request that has come, and ways to answer it."""

    def __init__(
        self, number: int, of_connection: int, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number  # among all
        self.of_connection = of_connection  # among those of its connection
        self.head = head
        self.body = body
        self.writer = writer

    @property
    def path(self) -> str:
        return self.head.split(b" ")[1].decode()

    def say(self, status: int, body: bytes = b"{}", fields: bytes = b"") -> None:
        self.writer.write(
            b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n" % (status, fields, len(body)) + body
        )

    def close(self) -> None:
        self.writer.close()


class Stub:
    """`handle` gets every request for an inference or a picture; documents are answered here."""

    def __init__(
        self, handle: Handle, *, ready: int = 200, metadata: Any = METADATA, models: Any = None
    ) -> None:
        self._handle = handle
        self._ready = ready
        self._metadata = metadata
        self._models = [{"name": "m", "state": "READY"}] if models is None else models
        self.seen: list[Exchange] = []
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Stub]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        count = 0
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                exchange = Exchange(len(self.seen), count, head, await reader.readexactly(length), writer)
                count += 1
                await self._answer(exchange)
        writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == "/v2/health/ready":
            exchange.say(self._ready)
        elif path == "/v2/repository/index":
            exchange.say(200, json.dumps(self._models).encode())
        elif path.startswith("/v2/models/") and not path.endswith("/infer"):
            exchange.say(
                200 if self._metadata else 404,
                json.dumps(self._metadata or {"error": "no such model"}).encode(),
            )
        else:
            self.seen.append(exchange)
            await self._handle(exchange)


async def fine(exchange: Exchange) -> None:
    exchange.say(200, ANSWER, TIMING)
