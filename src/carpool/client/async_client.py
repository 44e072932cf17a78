"""`carpool.AsyncClient`: the same as `Client`, for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Literal, overload

from carpool.client import questions
from carpool.client.live_frames import AsyncLiveFrames, Frame, each
from carpool.client.questions import Asked, Patience, Question, Server, Value
from carpool.client.text_stream import AsyncTextStream
from carpool.errors import CarpoolError
from carpool.types import Array, RequestOptions
from carpool.vision.python_pictures import (
    Answer,
    Classes,
    Detections,
    Embedding,
    Masks,
    Picture,
    Poses,
    Reading,
    RotatedBoxes,
)
from carpool.wire.http_reply import NotHttp, Reply, ReplyBody, TooLong, begin_reply, read_reply


class AsyncClient:
    """Asks a server, from one asyncio loop: `await client.detect(picture)`.

        async with AsyncClient("http://localhost:8000") as client:
            found = await client.detect("street.jpg", score=0.5)

    Arguments and answers are those of `Client`. A task that is cancelled closes its connection, and the
    server drops what it asked for.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str = "",
        ca: str = "",
        certificate: str = "",
        private_key: str = "",
        insecure: bool = False,
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        connections: int = 16,
    ) -> None:
        server = questions.find_server(
            url, api_key=api_key, ca=ca, certificate=certificate, private_key=private_key, insecure=insecure
        )
        self._connections = AsyncConnections(server, timeout_s, connections)
        self._patience_s = patience_s
        self._first_model = ""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connections.close()

    # ---- one picture

    async def predict(
        self,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Answer:
        asked = Asked(task, model if task else model or await self._first(), version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Answer)

    async def detect(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Detections:
        asked = Asked("detect", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Detections)

    async def classify(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Classes:
        asked = Asked("classify", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Classes)

    async def segment(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Masks:
        asked = Asked("segment", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Masks)

    async def pose(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Poses:
        asked = Asked("pose", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Poses)

    async def obb(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> RotatedBoxes:
        asked = Asked("obb", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, RotatedBoxes)

    async def embed(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Embedding:
        asked = Asked("embed", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Embedding)

    async def read(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("read", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Reading)

    async def caption(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("caption", model, version, deadline_ms, source)
        return await self._ask_of(picture, asked, options, Reading)

    async def stream_text(
        self,
        picture: Picture,
        *,
        task: str = "read",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> AsyncTextStream:
        asked = Asked(task, model, version, deadline_ms, source)
        question = await asyncio.to_thread(questions.ask_events, picture, asked, options)
        return await self._patiently(lambda: self._connections.begin(question))

    async def draw(
        self,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        file_format: str = "jpeg",
        **options: object,
    ) -> bytes:
        asked = Asked(task, model if task else model or await self._first())
        question = await asyncio.to_thread(questions.ask_drawing, picture, asked, options, file_format)
        return await self._ask(question)

    # ---- tensors

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        deadline_ms: float | None = None,
        priority: int = 0,
        source: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> dict[str, Array]:
        options = RequestOptions(
            priority=priority,
            source=source,
            sequence_id=sequence_id,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
        )
        return await self._ask(questions.ask_infer(model, inputs, version, outputs, options, deadline_ms))

    # ---- many pictures

    @overload
    def map(
        self,
        pictures: Iterable[Picture] | AsyncIterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise"] = "raise",
        **options: object,
    ) -> AsyncIterator[Answer]: ...

    @overload
    def map(
        self,
        pictures: Iterable[Picture] | AsyncIterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["return"],
        **options: object,
    ) -> AsyncIterator[Answer | CarpoolError]: ...

    async def map(
        self,
        pictures: Iterable[Picture] | AsyncIterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise", "return"] = "raise",
        **options: object,
    ) -> AsyncIterator[Answer | CarpoolError]:
        """The answers in the order of the pictures, which are taken as they are needed, `at_once` under way.
        With `errors="return"`, what a picture failed with stands in its place, and the others go on."""
        asked = Asked(task, model if task else model or await self._first())

        async def ask(picture: Picture) -> Answer | CarpoolError:
            try:
                return await self._ask_of(picture, asked, options, Answer)
            except CarpoolError as error:
                if errors == "raise":
                    raise
                return error

        under_way: deque[asyncio.Task[Answer | CarpoolError]] = deque()
        try:
            async for picture in each(pictures):
                if len(under_way) >= at_once:
                    yield await under_way[0]
                    under_way.popleft()
                under_way.append(asyncio.create_task(ask(picture)))
            while under_way:
                yield await under_way[0]
                under_way.popleft()
        finally:
            await _end(under_way)

    async def stream(
        self,
        frames: Iterable[Picture] | AsyncIterable[Picture],
        *,
        task: str = "",
        model: str = "",
        source: str = "stream",
        at_once: int = 2,
        deadline_ms: float | None = None,
        **options: object,
    ) -> AsyncIterator[Frame]:
        """Answers to a live source, the newest frame first: what is older when its turn comes is dropped, and
        so is what the server refuses. An iterable that blocks is read in a thread."""
        first = model if task else model or await self._first()
        asked = Asked(task, first, "", deadline_ms, source, latest=True)

        async def ask(picture: Picture) -> Answer:
            question = await asyncio.to_thread(questions.ask_picture, picture, asked, options, Answer)
            return question.read(await self._connections.ask(question))

        live = AsyncLiveFrames(ask, at_once)
        running = [asyncio.create_task(work) for work in live.works(frames)]
        last = -1
        try:
            while (frame := await live.next()) is not None:
                if frame.number > last:  # of two under way the newer may be answered first
                    last = frame.number
                    yield frame
        finally:
            await _end(running)

    # ---- asking

    async def _ask_of(
        self, picture: Picture, asked: Asked, options: Mapping[str, object], wanted: type[questions.Wanted]
    ) -> questions.Wanted:
        if isinstance(picture, bytes):  # nothing to read and nothing to encode
            return await self._ask(questions.ask_picture(picture, asked, options, wanted))
        question = await asyncio.to_thread(questions.ask_picture, picture, asked, options, wanted)
        return await self._ask(question)

    async def _ask(self, question: Question[Value]) -> Value:
        return question.read(await self._patiently(lambda: self._connections.ask(question)))

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        patience = Patience(self._patience_s, monotonic())
        while True:
            try:
                return await ask()
            except CarpoolError as error:
                wait = patience.wait(error, monotonic())
                if wait is None:
                    raise
            await asyncio.sleep(wait)

    async def _first(self) -> str:
        if not self._first_model:
            self._first_model = await self._ask(questions.ask_first_model())
        return self._first_model


class AsyncConnections:
    """Those to one server: as many as are needed at once, and `most` of them are kept for the next time."""

    def __init__(self, server: Server, timeout_s: float, most: int) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._most = most
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, question: Question[Any]) -> Reply:
        reply = await self._in_time(self._exchange(question))
        return self._server.read(reply.status, reply.fields, reply.body)

    async def begin(self, question: Question[Any]) -> AsyncTextStream:
        """The reply's body is still to come."""
        reply, writer = await self._in_time(self._begin(question))
        return AsyncTextStream(self._server, reply, writer, self._timeout_s, self._give_back)

    async def _in_time(self, work: Coroutine[Any, Any, Value]) -> Value:
        server = self._server
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            raise server.too_slow(self._timeout_s) from None
        except OSError as error:
            raise server.lost(f"no answer: {error.strerror or error}") from None
        except (NotHttp, TooLong) as error:
            raise server.lost(f"what answers there cannot be read: {error}") from None

    async def _begin(self, question: Question[Any]) -> tuple[ReplyBody, asyncio.StreamWriter]:
        reader, writer = await self._send(question)
        try:
            reply = await begin_reply(reader)
            if reply.status != 200:
                body = bytearray()
                while piece := await reply.next(questions.MOST_REPLY_BYTES - len(body)):
                    body += piece
                raise questions.error_of(reply.status, reply.fields, bytes(body))
        except BaseException:
            writer.transport.abort()
            raise
        return reply, writer

    async def _exchange(self, question: Question[Any]) -> Reply:
        reader, writer = await self._send(question)
        try:
            reply = await read_reply(reader, questions.MOST_REPLY_BYTES)
        except BaseException:
            writer.transport.abort()
            raise
        self._put_back(reader, writer, reply.keep)
        return reply

    def _give_back(self, reply: ReplyBody, writer: asyncio.StreamWriter) -> None:
        self._put_back(reply.reader, writer, reply.keep)

    def _put_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
        if keep and len(self._idle) < self._most:
            self._idle.append((monotonic(), reader, writer))
        else:
            writer.close()

    async def _send(self, question: Question[Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        server = self._server
        reader, writer = self._take() or await asyncio.open_connection(
            server.host, server.port, ssl=server.tls
        )
        try:
            lines = [f"{question.method} {server.prefix}{question.path} HTTP/1.1", f"Host: {server.where}"]
            fields = {**server.fields, **question.fields, **questions.trace_fields()}
            lines += [f"{name}: {value}" for name, value in fields.items()]
            lines += [f"Content-Length: {len(question.body)}", "", ""]
            writer.write("\r\n".join(lines).encode("latin-1"))
            writer.write(question.body)
            with suppress(ConnectionError):  # who does not want all of it may have answered: read that
                await writer.drain()
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """One that the server has not closed meanwhile: a request that is lost cannot be sent again."""
        while self._idle:
            since, reader, writer = self._idle.pop()
            alive = not reader.at_eof() and not writer.transport.is_closing()
            if alive and monotonic() - since < questions.IDLE_S:
                return reader, writer
            writer.close()
        return None

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for _, _, writer in idle:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, _, writer in idle), return_exceptions=True)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
