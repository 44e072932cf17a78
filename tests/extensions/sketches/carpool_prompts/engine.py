"""Serves a version of two sessions. Each has a queue of its own, so that no prompt waits behind a picture."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Generic, TypeVar

import numpy as np

from carpool.config.repository import ModelVersion
from carpool.core.job import GONE, READY
from carpool.engine.engine_parts import EnginePart, EngineServer, Json
from carpool.engine.models.runtime import EngineParts
from carpool.engine.models.served import Runtime, Served
from carpool.engine.models.serving_part import ServingPart
from carpool.engine.run.batch import Outcome, Route, Work
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import Cancelled, CarpoolError, Gone, ModelError, NotFound
from carpool.observe.columns import by_word
from carpool.types import Array, Timing
from carpool_prompts.settings import prompt_settings

_EMBEDDINGS = by_word("prompts_sketch", "embeddings")
_GONE = "the picture is not stored any more: send it again"
Task = TypeVar("Task")
Made = TypeVar("Made")


class Session(Generic[Task, Made]):
    """Stands for a driver: runs what waits as one batch, in a thread of its own."""

    def __init__(self, run: Callable[[Sequence[Task]], Sequence[Made]]) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[Task, asyncio.Future[Made]]] = []
        self._busy = False

    def ask(self, task: Task) -> asyncio.Future[Made]:
        made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self._waiting.append((task, made))
        if not self._busy:
            self._begin()
        return made

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        self._busy = bool(batch)
        if batch:
            loop = asyncio.get_running_loop()
            ran = loop.run_in_executor(self._thread, self._run, [task for task, _ in batch])
            ran.add_done_callback(lambda done: self._ended(batch, done))

    def _ended(
        self, batch: Sequence[tuple[Task, asyncio.Future[Made]]], done: asyncio.Future[Sequence[Made]]
    ) -> None:
        error = done.exception()
        for number, (_, made) in enumerate(batch):
            if made.done():
                continue
            if error is None:
                made.set_result(done.result()[number])
            else:
                made.set_exception(ModelError(str(error)))
        self._begin()

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def encode(pictures: Sequence[Array]) -> Sequence[Array]:
    return [picture - picture.mean() for picture in pictures]


def decode(prompts: Sequence[tuple[Array, Array]]) -> Sequence[Array]:
    return [embedding * np.float32(points.sum()) for embedding, points in prompts]


class PromptRoute:
    """Implements `Route`. A prompt for a picture that is being encoded joins that."""

    def __init__(self, served: Served, most_stored: int) -> None:
        self._served = served
        self._most = most_stored
        self.store: OrderedDict[bytes, asyncio.Future[Array]] = OrderedDict()
        self.encoder = Session(encode)
        self.decoder = Session(decode)
        self.under_way: dict[Work, asyncio.Task[None]] = {}

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route, work.state = self, READY
            self.under_way[work] = asyncio.get_running_loop().create_task(self._answer(work))

    def ready(self, work: Work) -> None:
        """Inputs are there when a work is submitted: front ends decode nothing for such models."""

    def cancel(self, work: Work) -> None:
        if work in self.under_way:
            self.under_way[work].cancel()

    async def _answer(self, work: Work) -> None:
        began = monotonic()
        try:
            embedding = await asyncio.shield(self._found(work))
            mask = await self.decoder.ask((embedding, np.array(work.inputs["points"])))
            outputs = {"mask": mask}
            outcome = Outcome(outputs if work.place is None else work.place(outputs))
            outcome.timing = Timing(infer=monotonic() - began, batch=1)
        except CarpoolError as error:
            outcome = Outcome(error=error)
        except asyncio.CancelledError:
            outcome = Outcome(error=Cancelled("the client left"))
        del self.under_way[work]
        work.state = GONE
        work.done(work, outcome)

    def _found(self, work: Work) -> asyncio.Future[Array]:
        """Returns the stored picture, also one that is being encoded. Raises `Gone`."""
        key, row = work.inputs["key"].tobytes(), self._served.counters.row
        found = self.store.get(key)
        if found is None and "picture" not in work.inputs:
            row.add(_EMBEDDINGS["gone"])
            raise Gone(_GONE)
        row.add(_EMBEDDINGS["stored" if found is None else "found"])
        if found is None:
            found = self.store[key] = self.encoder.ask(np.array(work.inputs["picture"]))
            while len(self.store) > self._most:
                self.store.popitem(last=False)
        self.store.move_to_end(key)
        return found

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()


class PromptRuntime(Runtime):
    def __init__(self, served: Served, _version: ModelVersion, _parts: EngineParts) -> None:
        super().__init__(served)
        self.prompts: PromptRoute | None = None

    @property
    def why_not(self) -> str:
        return "" if self.prompts is not None else "it is not loaded"

    @property
    def idle(self) -> bool:
        return self.prompts is None or not (self.prompts.under_way or self.prompts.store)

    def route(self) -> Route:
        assert self.prompts is not None
        return self.prompts

    def made_of(self) -> Sequence[str]:
        settings = prompt_settings(self.served.config)
        assert settings is not None
        return [part.file for part in settings.parts.values()]

    async def load(self, progress: Callable[[str], None]) -> None:
        settings = prompt_settings(self.served.config)
        assert settings is not None
        progress("loading its parts")
        self.served.signature = signature_of(self.served.config)
        self.prompts = PromptRoute(self.served, settings.most_stored)

    async def finish(self, timeout: float | None) -> int | None:
        waiting = list(self.prompts.under_way.values()) if self.prompts is not None else []
        _, left = await asyncio.wait(waiting, timeout=timeout) if waiting else (waiting, ())
        return len(left) or None

    async def close(self) -> None:
        if self.prompts is not None:
            self.prompts.close()


def engine(server: EngineServer) -> EnginePart:
    async def forget(arguments: Json) -> Json:
        key = bytes.fromhex(str(arguments["key"]))
        routes = [
            one.runtime.prompts for one in server.served.values() if isinstance(one.runtime, PromptRuntime)
        ]
        if not any(route is not None and route.store.pop(key, None) is not None for route in routes):
            raise NotFound("there is no such picture", field="handle")
        return {}

    return EnginePart(questions={"forget": forget})


SERVING = ServingPart(runtime=lambda _: PromptRuntime)
