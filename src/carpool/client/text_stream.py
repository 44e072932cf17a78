"""Text as a model writes it: the pieces one after the other, then the whole answer. For both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import TracebackType
from typing import Any

import orjson

from carpool.client.questions import MOST_REPLY_BYTES, Server, error_of
from carpool.errors import InvalidInput
from carpool.vision.python_pictures import Reading
from carpool.wire.event_lines import EventReader, NoEvents
from carpool.wire.http_reply import NotHttp, ReplyBody, TooLong

_AT_ONCE = 64 * 1024


class TextEvents:
    """What the bytes of one reply say, from either kind of socket. A reply that is no stream is one piece."""

    def __init__(self, server: Server, fields: Mapping[str, str]) -> None:
        self._server = server
        self._events: EventReader | None = None
        if fields.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream":
            self._events = EventReader()
        self._whole = bytearray()  # of a reply that is no stream
        self._size = 0
        self.answer: Reading | None = None
        self.text = ""

    def feed(self, data: bytes) -> list[str]:
        """The pieces that came with this. Raises what the server says has gone wrong."""
        self._size += len(data)
        if self._size > MOST_REPLY_BYTES:
            raise self._server.lost("the answer has no end")
        if self._events is None:
            self._whole += data
            return []
        try:
            pieces = [self._piece(event) for event in self._events.feed(data)]
        except NoEvents as error:
            raise self._server.lost(error) from None
        return self._add([piece for piece in pieces if piece])

    def end(self) -> list[str]:
        """The reply is over: what is left of it."""
        if self._events is None:
            document = self._document(bytes(self._whole))
            if not isinstance(document.get("text"), str):
                raise InvalidInput(f"the server answered no text: {', '.join(map(str, document))}")
            self.answer = Reading(document)
            return self._add([document["text"]])
        if self.answer is None:
            raise self._server.lost("the text broke off before its end")
        return []

    def _add(self, pieces: list[str]) -> list[str]:
        self.text += "".join(pieces)
        return pieces

    def _piece(self, event: bytes) -> str:
        document = self._document(event)
        if "error" in document:
            status = document.get("status")
            raise error_of(status if isinstance(status, int) else 500, {}, event)
        if document.pop("done", False):
            self.answer = Reading(document)
            return ""
        return str(document.get("text", ""))

    def _document(self, data: bytes) -> dict[str, Any]:
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            raise self._server.lost("what answers there is no Carpool server")
        return document


class _Said:
    """What both kinds tell."""

    _events: TextEvents

    @property
    def text(self) -> str:
        """All that has come so far."""
        return self._events.text

    @property
    def answer(self) -> Reading | None:
        """As it is without a stream, with `text` and `finish_reason`; None before the end."""
        return self._events.answer


class TextStream(_Said, Iterator[str]):
    """Pieces of text as they come. Whoever stops before the end closes it, and the server stops writing:

    with client.stream_text("line.png") as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    """

    def __init__(
        self,
        server: Server,
        connection: HTTPConnection,
        response: HTTPResponse,
        give_back: Callable[[HTTPConnection, bool], None],
    ) -> None:
        fields = {name.lower(): value for name, value in response.getheaders()}
        self._events = TextEvents(server, fields)
        self._server = server
        self._connection: HTTPConnection | None = connection
        self._response = response
        self._give_back = give_back
        self._pieces = self._read()

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """No more is wanted."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._response.close()
            connection.close()

    def _read(self) -> Iterator[str]:
        try:
            while data := self._response.read1(_AT_ONCE):
                yield from self._events.feed(data)
            yield from self._events.end()
            connection, self._connection = self._connection, None
            if connection is not None:
                self._give_back(connection, not self._response.will_close)
        except TimeoutError:
            raise self._server.lost("nothing more came in time") from None
        except (OSError, HTTPException, ValueError) as error:  # one that was closed meanwhile, too
            raise self._server.lost(f"the text broke off: {error}") from None
        finally:
            self.close()


class AsyncTextStream(_Said, AsyncIterator[str]):
    """The same for asyncio: `async with` and `async for`."""

    def __init__(
        self,
        server: Server,
        reply: ReplyBody,
        writer: asyncio.StreamWriter,
        timeout_s: float,
        give_back: Callable[[ReplyBody, asyncio.StreamWriter], None],
    ) -> None:
        self._events = TextEvents(server, reply.fields)
        self._server = server
        self._reply = reply
        self._writer: asyncio.StreamWriter | None = writer
        self._timeout_s = timeout_s
        self._give_back = give_back
        self._pieces = self._read()

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """No more is wanted."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()

    async def _read(self) -> AsyncIterator[str]:
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    data = await self._reply.next(MOST_REPLY_BYTES)
                if not data:
                    break
                for piece in self._events.feed(data):
                    yield piece
            for piece in self._events.end():
                yield piece
            writer, self._writer = self._writer, None
            if writer is not None:
                self._give_back(self._reply, writer)
        except TimeoutError:
            raise self._server.lost("nothing more came in time") from None
        except (OSError, NotHttp, TooLong) as error:
            raise self._server.lost(f"the text broke off: {error}") from None
        finally:
            await self.close()
