"""Implements `carpool.Client`: a server asked from a program, over connections that are kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from carpool.client.client_core import ClientCore
from carpool.client.connections import BlockingRuntime, run
from carpool.client.live_frames import Frame, LiveFrames, each
from carpool.client.questions import Asked, Value
from carpool.client.text_stream import TextStream
from carpool.errors import CarpoolError
from carpool.vision.python_pictures import Answer, Picture

Item = TypeVar("Item")
Given = ParamSpec("Given")


class BlockingCore(ClientCore):
    runtime = BlockingRuntime()


def blocking(
    method: Callable[Concatenate[ClientCore, Given], Coroutine[Any, Any, Value]],
) -> Callable[Concatenate[Client, Given], Value]:
    """Returns the same method, which returns when the answer is there."""

    @wraps(method)
    def asks(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Value:
        return run(method(client._core, *given, **named))

    return asks


class Client:
    """Asks a server. Every thread may use it.

        with Client("http://localhost:8000") as client:
            found = client.detect("street.jpg", score=0.5)
            print(found.labels, found.boxes)

    A picture is a file's bytes or path, an image of Pillow, pixels as an array, or the https:// address of
    one that the server may fetch. What the server refuses and wants later is asked again, for up to
    `patience_s`; nothing else is asked twice. `timeout_s` is for each answer.
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
        self._core = BlockingCore(
            url,
            api_key=api_key,
            ca=ca,
            certificate=certificate,
            private_key=private_key,
            insecure=insecure,
            timeout_s=timeout_s,
            patience_s=patience_s,
            connections=connections,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    close = blocking(ClientCore.close)

    predict = blocking(ClientCore.predict)
    detect = blocking(ClientCore.detect)
    classify = blocking(ClientCore.classify)
    segment = blocking(ClientCore.segment)
    pose = blocking(ClientCore.pose)
    obb = blocking(ClientCore.obb)
    embed = blocking(ClientCore.embed)
    read = blocking(ClientCore.read)
    caption = blocking(ClientCore.caption)
    draw = blocking(ClientCore.draw)
    infer = blocking(ClientCore.infer)

    def stream_text(
        self,
        picture: Picture,
        *,
        task: str = "read",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> TextStream:
        """Returns what `read` or `caption` answers, piece by piece while the model writes it. `timeout_s` is
        for each piece. Not all models write: those that answer at once give one piece."""
        asked = Asked(task, model, version, deadline_ms, source)
        return TextStream(run(self._core.begin_text(picture, asked, options)))

    @overload
    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise"] = "raise",
        **options: object,
    ) -> Iterator[Answer]: ...

    @overload
    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["return"],
        **options: object,
    ) -> Iterator[Answer | CarpoolError]: ...

    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise", "return"] = "raise",
        **options: object,
    ) -> Iterator[Answer | CarpoolError]:
        """Yields the answers in the order of the pictures, which are taken as they are needed, `at_once`
        under way.

        With `errors="return"`, what a picture failed with stands in its place, and the others go on.
        """
        core = self._core
        asked = Asked(task, model if task else model or run(core.first()))

        def ask(picture: Picture) -> Answer | CarpoolError:
            try:
                return run(core.ask_picture(picture, asked, options, Answer))
            except CarpoolError as error:
                if errors == "raise":
                    raise
                return error

        return in_order(ask, pictures, at_once)

    def stream(
        self,
        frames: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        source: str = "stream",
        at_once: int = 2,
        deadline_ms: float | None = None,
        **options: object,
    ) -> Iterator[Frame]:
        """Answers to a live source, the newest frame first: what is older when its turn comes is dropped.

        `frames` is read in a thread as fast as it gives them. Frames that the server refuses are dropped.
        """
        core = self._core
        first = model if task else model or run(core.first())
        asked = Asked(task, first, "", deadline_ms, source, latest=True)
        live = LiveFrames(
            partial(core.ask_frame, asked=asked, options=options), at_once, core.runtime.condition()
        )
        return _answers(live, frames, at_once)


def _answers(live: LiveFrames, frames: Iterable[Picture], at_once: int) -> Iterator[Frame]:
    works = [live.fill(each(frames)), *(live.empty() for _ in range(at_once))]
    for work in works:
        threading.Thread(target=run, args=(work,), daemon=True).start()
    try:
        while (frame := run(live.next())) is not None:
            yield frame
    finally:
        run(live.stop())


def in_order(ask: Callable[[Item], Value], items: Iterable[Item], at_once: int) -> Iterator[Value]:
    """What `ask` gives for each, in order, with so many under way; items are taken when there is room."""
    under_way: deque[Future[Value]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(ask, item))
                if len(under_way) >= 2 * at_once or under_way[0].done():
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
