"""Text as a model writes it: the pieces one after the other, then the whole answer. For both clients."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import orjson

from carpool.client.connections import Connections, Stream, run
from carpool.client.questions import MOST_REPLY_BYTES, Server, error_of
from carpool.errors import InvalidInput
from carpool.vision.python_pictures import Reading
from carpool.wire.event_lines import EventReader, NoEvents
from carpool.wire.http_reply import NotHttp, ReplyBody, TooLong


class TextEvents:
    """Reads what the bytes of one reply say, from either kind of socket. A reply that is no stream is one
    piece."""

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
        """Returns the pieces that came with this. Raises what the server says has gone wrong."""
        self._size += len(data)
        if self._size > MOST_REPLY_BYTES:
            raise self._server.lost("the response has no end")
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
            raise self._server.lost("the server at this address is not Carpool")
        return document


class Pieces:
    """Reads the pieces of one reply as they come, for either kind of stream."""

    def __init__(self, connections: Connections, stream: Stream, reply: ReplyBody) -> None:
        self.events = TextEvents(connections.server, reply.fields)
        self._connections = connections
        self._stream: Stream | None = stream
        self._reply = reply
        self._waiting: deque[str] = deque()

    async def next(self) -> str | None:
        """The next one; None is the end."""
        while not self._waiting and self._stream is not None:
            await self._read(self._stream)
        return self._waiting.popleft() if self._waiting else None

    async def _read(self, stream: Stream) -> None:
        lost = self._connections.server.lost
        try:
            async with self._connections.runtime.within(self._connections.timeout_s):
                data = await self._reply.next()
            self._waiting += self.events.feed(data) if data else self.events.end()
        except TimeoutError:
            self.close()
            raise lost("nothing more was received within the timeout") from None
        except (OSError, NotHttp, TooLong) as error:  # one that was closed meanwhile, too
            self.close()
            raise lost(f"the text broke off: {error}") from None
        except BaseException:
            self.close()
            raise
        if not data and self._stream is not None:
            self._stream = None
            self._connections.give_back(stream, self._reply.keep)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abort()


class _Said:
    """Holds what both kinds report."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    @property
    def text(self) -> str:
        """All that has come so far."""
        return self._pieces.events.text

    @property
    def answer(self) -> Reading | None:
        """Returns the answer as it is without a stream, with `text` and `finish_reason`; None before the
        end."""
        return self._pieces.events.answer


class TextStream(_Said, Iterator[str]):
    """Yields pieces of text as they come. A caller that stops early closes it, and the server stops writing:

    with client.stream_text("line.png") as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    """

    def __next__(self) -> str:
        piece = run(self._pieces.next())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """No more is wanted."""
        self._pieces.close()


class AsyncTextStream(_Said, AsyncIterator[str]):
    """Does the same for asyncio: `async with` and `async for`."""

    async def __anext__(self) -> str:
        piece = await self._pieces.next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._pieces.close()

    async def close(self) -> None:
        """No more is wanted."""
        self._pieces.close()
