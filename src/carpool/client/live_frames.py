"""Live sources: of the pictures that come faster than they are answered, the newest. For both clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from carpool.client.connections import Changing
from carpool.errors import DeadlineExceeded, Refused, Replaced
from carpool.vision.python_pictures import Answer, Picture

_END = object()
PASSED_OVER = (Replaced, Refused, DeadlineExceeded)
"""What a live source does not mind: the next frame comes soon."""


class Frame(NamedTuple):
    """Represents a picture of a live source, its number from 0, and what is in it."""

    number: int
    picture: Picture
    answer: Answer


class LiveFrames:
    """One place for the newest frame: `fill` fills it, `empty`, `at_once` times, asks, `next` has answers.

    Each of those runs in a task, or in a thread, of its own. All of it is guarded by `_changed`; no request
    is under way while it is held. No frame is taken while answers wait to be looked at, so that what is taken
    then is new.
    """

    def __init__(
        self, ask: Callable[[Picture], Coroutine[Any, Any, Answer]], at_once: int, changed: Changing
    ) -> None:
        self._ask = ask
        self._at_once = at_once
        self._changed = changed
        self._newest: tuple[int, Picture] | None = None
        self._done: deque[Frame] = deque()
        self._last = -1
        self._reading = True
        self._working = at_once
        self._stopped = False
        self._failure: Exception | None = None

    async def next(self) -> Frame | None:
        """The next answer, never one to an older frame; None is the end."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._done or self._failure or not self._working)
                if self._failure is not None:
                    raise self._failure
                if not self._done:
                    return None
                frame = self._done.popleft()
                self._changed.notify_all()
            if frame.number > self._last:  # of two under way the newer may be answered first
                self._last = frame.number
                return frame

    async def stop(self) -> None:
        async with self._changed:
            self._stopped = True
            self._changed.notify_all()

    async def fill(self, frames: AsyncIterable[Picture]) -> None:
        number, failure = 0, None
        try:
            async for picture in frames:
                async with self._changed:
                    if self._stopped:
                        break
                    self._newest = number, picture
                    self._changed.notify_all()
                number += 1
        except Exception as error:  # the source's own: raised where the answers are read
            failure = error
        async with self._changed:
            self._reading = False
            self._failure = self._failure or failure
            self._changed.notify_all()

    async def empty(self) -> None:
        while (taken := await self._take()) is not None:
            number, picture = taken
            answer, failure = None, None
            try:
                answer = await self._ask(picture)
            except PASSED_OVER:
                pass
            except Exception as error:
                failure = error
            async with self._changed:
                if answer is not None:
                    self._done.append(Frame(number, picture, answer))
                self._failure = self._failure or failure
                self._changed.notify_all()
        async with self._changed:
            self._working -= 1
            self._changed.notify_all()

    async def _take(self) -> tuple[int, Picture] | None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._stopped
                    or self._failure is not None
                    or (self._newest is not None and len(self._done) < self._at_once)
                    or (self._newest is None and not self._reading)
                )
            )
            taken, self._newest = self._newest, None
            return None if self._stopped or self._failure is not None else taken


async def each(
    items: Iterable[Picture] | AsyncIterable[Picture], *, blocking: bool = False
) -> AsyncIterator[Picture]:
    """Yields what comes, from either kind; a `blocking` one is asked in a thread."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    rest = iter(items)
    while True:
        found: Any = await asyncio.to_thread(next, rest, _END) if blocking else next(rest, _END)
        if found is _END:
            return
        yield found
