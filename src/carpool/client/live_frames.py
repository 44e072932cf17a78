"""Live sources: of the pictures that come faster than they are answered, the newest. For both clients."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

from carpool.errors import DeadlineExceeded, Refused, Replaced
from carpool.vision.python_pictures import Answer, Picture

_END = object()
PASSED_OVER = (Replaced, Refused, DeadlineExceeded)
"""What a live source does not mind: the next frame comes soon."""


class Frame(NamedTuple):
    """A picture of a live source, its number from 0, and what is in it."""

    number: int
    picture: Picture
    answer: Answer


class LiveFrames:
    """One place for the newest frame. A thread fills it, `at_once` threads empty it, the caller gets answers.

    All of it is guarded by `_changed`; nobody asks anything while holding it. Workers take no frame while the
    caller has answers left to look at, so that what they take then is new.
    """

    def __init__(self, ask: Callable[[Picture], Answer], at_once: int) -> None:
        self._ask = ask
        self._at_once = at_once
        self._changed = threading.Condition()
        self._newest: tuple[int, Picture] | None = None
        self._done: deque[Frame] = deque()
        self._reading = True
        self._working = at_once
        self._stopped = False
        self._failure: BaseException | None = None

    def answers(self, frames: Iterable[Picture]) -> Iterator[Frame]:
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()
        for _ in range(self._at_once):
            threading.Thread(target=self._work, daemon=True).start()
        last = -1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._done or self._failure or not self._working)
                    if self._failure is not None:
                        raise self._failure
                    if not self._done:
                        return
                    frame = self._done.popleft()
                    self._changed.notify_all()
                if frame.number > last:  # of two under way the newer may be answered first
                    last = frame.number
                    yield frame
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _read(self, frames: Iterable[Picture]) -> None:
        failure: BaseException | None = None
        try:
            for number, picture in enumerate(frames):
                with self._changed:
                    if self._stopped:
                        break
                    self._newest = number, picture
                    self._changed.notify_all()
        except Exception as error:  # the source's own: told to whoever reads the answers
            failure = error
        with self._changed:
            self._reading = False
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            number, picture = taken
            answer: Answer | None = None
            failure: BaseException | None = None
            try:
                answer = self._ask(picture)
            except PASSED_OVER:
                pass
            except Exception as error:
                failure = error
            with self._changed:
                if answer is not None:
                    self._done.append(Frame(number, picture, answer))
                self._failure = self._failure or failure
                self._changed.notify_all()
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def _take(self) -> tuple[int, Picture] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopped
                    or self._failure is not None
                    or (self._newest is not None and len(self._done) < self._at_once)
                    or (self._newest is None and not self._reading)
                )
            )
            taken, self._newest = self._newest, None
            return None if self._stopped or self._failure is not None else taken


class AsyncLiveFrames:
    """One place for the newest frame: a task fills it, `at_once` tasks empty it."""

    def __init__(self, ask: Callable[[Picture], Coroutine[Any, Any, Answer]], at_once: int) -> None:
        self._ask = ask
        self._at_once = at_once
        self._changed = asyncio.Condition()
        self._newest: tuple[int, Picture] | None = None
        self._done: deque[Frame] = deque()
        self._reading = True
        self._working = at_once
        self._failure: Exception | None = None

    def works(self, frames: Iterable[Picture] | AsyncIterable[Picture]) -> list[Coroutine[Any, Any, None]]:
        return [self._read(frames), *(self._work() for _ in range(self._at_once))]

    async def next(self) -> Frame | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._done or self._failure or not self._working)
            if self._failure is not None:
                raise self._failure
            self._changed.notify_all()
            return self._done.popleft() if self._done else None

    async def _read(self, frames: Iterable[Picture] | AsyncIterable[Picture]) -> None:
        number, failure = 0, None
        try:
            async for picture in each(frames, blocking=True):
                async with self._changed:
                    self._newest = number, picture
                    self._changed.notify_all()
                number += 1
        except Exception as error:  # the source's own: told to whoever reads the answers
            failure = error
        async with self._changed:
            self._reading = False
            self._failure = self._failure or failure
            self._changed.notify_all()

    async def _work(self) -> None:
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
        """While answers wait to be looked at, no frame is taken: what is taken then is new."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or (self._newest is not None and len(self._done) < self._at_once)
                    or (self._newest is None and not self._reading)
                )
            )
            taken, self._newest = self._newest, None
            return None if self._failure is not None else taken


async def each(
    items: Iterable[Picture] | AsyncIterable[Picture], *, blocking: bool = False
) -> AsyncIterator[Picture]:
    """What comes, from either kind; a `blocking` one is asked in a thread."""
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
