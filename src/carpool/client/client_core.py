"""Implements what both clients are: the methods that ask one thing, as coroutines over either kind of
connections."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any

from carpool.client import questions
from carpool.client.connections import AsyncRuntime, Connections, Runtime
from carpool.client.questions import Asked, Patience, Question, Value
from carpool.client.text_stream import Pieces
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


class ClientCore:
    runtime: Runtime = AsyncRuntime()

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
        self.connections = Connections(self.runtime, server, timeout_s, connections)
        self._patience_s = patience_s
        self._first_model = ""

    async def close(self) -> None:
        """Closes the connections. A client that is used again opens new ones."""
        await self.connections.close()

    # ---- one picture

    async def predict(
        self,
        /,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Answer:
        """Returns what the model does, or this task; without either, what the first model does that was
        configured. Options are those of the task, such as score and top_k."""
        asked = Asked(task, model if task else model or await self.first(), version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Answer)

    async def detect(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Detections:
        asked = Asked("detect", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Detections)

    async def classify(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Classes:
        asked = Asked("classify", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Classes)

    async def segment(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Masks:
        asked = Asked("segment", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Masks)

    async def pose(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Poses:
        asked = Asked("pose", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Poses)

    async def obb(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> RotatedBoxes:
        asked = Asked("obb", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, RotatedBoxes)

    async def embed(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Embedding:
        asked = Asked("embed", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Embedding)

    async def read(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("read", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Reading)

    async def caption(
        self,
        /,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("caption", model, version, deadline_ms, source)
        return await self.ask_picture(picture, asked, options, Reading)

    async def draw(
        self,
        /,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        file_format: str = "jpeg",
        deadline_ms: float | None = None,
        **options: object,
    ) -> bytes:
        """Returns the picture's file with the answer drawn in: jpeg, png or webp."""
        asked = Asked(task, model if task else model or await self.first(), deadline_ms=deadline_ms)
        apart = self.runtime.apart
        return await self.ask(await apart(questions.ask_drawing, picture, asked, options, file_format))

    # ---- tensors

    async def infer(
        self,
        /,
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
        """Arrays by name, with the batch dimension where the model has one; no `outputs` are all of them."""
        options = RequestOptions(
            priority=priority,
            source=source,
            sequence_id=sequence_id,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
        )
        return await self.ask(questions.ask_infer(model, inputs, version, outputs, options, deadline_ms))

    # ---- asking

    async def ask_picture(
        self, picture: Picture, asked: Asked, options: Mapping[str, object], wanted: type[questions.Wanted]
    ) -> questions.Wanted:
        if isinstance(picture, bytes):  # nothing to read and nothing to encode
            return await self.ask(questions.ask_picture(picture, asked, options, wanted))
        return await self.ask(
            await self.runtime.apart(questions.ask_picture, picture, asked, options, wanted)
        )

    async def ask_frame(self, picture: Picture, asked: Asked, options: Mapping[str, object]) -> Answer:
        """One of a live source: it is not asked again, the next frame comes soon."""
        question = await self.runtime.apart(questions.ask_picture, picture, asked, options, Answer)
        return question.read(await self.connections.ask(question))

    async def begin_text(self, picture: Picture, asked: Asked, options: Mapping[str, object]) -> Pieces:
        question = await self.runtime.apart(questions.ask_events, picture, asked, options)
        return Pieces(self.connections, *await self._patiently(lambda: self.connections.begin(question)))

    async def ask(self, question: Question[Value]) -> Value:
        return question.read(await self._patiently(lambda: self.connections.ask(question)))

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        patience = Patience(self._patience_s, monotonic())
        while True:
            try:
                return await ask()
            except CarpoolError as error:
                wait = patience.wait(error, monotonic())
                if wait is None:
                    raise
            await self.runtime.sleep(wait)

    async def first(self) -> str:
        """Returns the model that answers pictures when none is named."""
        if not self._first_model:
            self._first_model = await self.ask(questions.ask_first_model())
        return self._first_model
