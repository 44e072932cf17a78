"""Implements `carpool.AsyncClient`: the same as `Client`, for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import partial
from typing import Any, Literal, overload

from carpool.client.client_core import ClientCore
from carpool.client.live_frames import Frame, LiveFrames, each
from carpool.client.questions import Asked
from carpool.client.text_stream import AsyncTextStream
from carpool.errors import CarpoolError
from carpool.vision.python_pictures import Answer, Picture


class AsyncClient(ClientCore):
    """Asks a server, from one asyncio loop: `await client.detect(picture)`.

        async with AsyncClient("http://localhost:8000") as client:
            found = await client.detect("street.jpg", score=0.5)

    Arguments and answers are those of `Client`. A task that is cancelled closes its connection, and the
    server drops what it asked for.
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

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
        return AsyncTextStream(await self.begin_text(picture, asked, options))

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
        """Yields the answers in the order of the pictures, which are taken as they are needed, `at_once`
        under way. With `errors="return"`, what a picture failed with stands in its place, and the others go
        on."""
        asked = Asked(task, model if task else model or await self.first())

        async def ask(picture: Picture) -> Answer | CarpoolError:
            try:
                return await self.ask_picture(picture, asked, options, Answer)
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
        first = model if task else model or await self.first()
        asked = Asked(task, first, "", deadline_ms, source, latest=True)
        ask = partial(self.ask_frame, asked=asked, options=options)
        live = LiveFrames(ask, at_once, self.runtime.condition())
        works = [live.fill(each(frames, blocking=True)), *(live.empty() for _ in range(at_once))]
        running = [asyncio.create_task(work) for work in works]
        try:
            while (frame := await live.next()) is not None:
                yield frame
        finally:
            await _end(running)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
