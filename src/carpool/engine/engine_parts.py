"""Defines what an extension does in the engine, and holds the parts of those extensions that a loaded model's
settings name, or that a question was asked of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from carpool.config.asked_folders import asked_in_folders
from carpool.config.fingerprint import Fingerprint
from carpool.config.model import ModelConfig
from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine
from carpool.engine.fleet.control import LoadListener
from carpool.engine.fleet.model_state import ModelState
from carpool.engine.loading.loadable import Pin
from carpool.engine.models.served import Served
from carpool.extension import Extension
from carpool.extensions import installed, started
from carpool.link.catalog import Catalog

Json: TypeAlias = Mapping[str, Any]
Question: TypeAlias = Callable[[Json], Awaitable[Any]]
"""JSON in and out; errors are `CarpoolError`s."""


class EngineServer(Protocol):
    """Defines what an engine part has of its server. Everything is called in the loop's thread."""

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def engine(self) -> Engine:
        """Returns the engine, with all models that it knows, and how they are loaded."""

    @property
    def served(self) -> Mapping[int, Served]:
        """Returns each loaded version by its key."""

    @property
    def catalog(self) -> Catalog:
        """Returns what all front ends know of, or will soon."""

    def offer(self, name: str) -> None:
        """Adds a name to the extensions of the v2 protocol that clients are answered with."""

    def find(self, model: str, version: str) -> Served:
        """Returns a loaded version, or raises `NotFound`."""

    def publish(self, extra: Json) -> None:
        """Puts this into `Catalog.extra` of all front ends under the extension's name."""

    def say(self, extra: Json) -> None:
        """Does the same with the next catalogue, whenever that is published."""

    async def everyone_saw(self) -> None:
        """Returns when every front end has the latest catalogue."""

    async def opened(self) -> None:
        """Returns when the models of the start have been loaded, or have failed."""

    def needed(self, name: str) -> Any:
        """Returns the state of another extension's part, which is loaded now if it is not. It is one that
        the manifest names as needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """Lists what an extension does in the engine, on the loop's thread."""

    entry: Callable[[Served], Json | None] | None = None
    """Returns what front ends need to know of a version: its `ModelEntry.extra[NAME]`."""
    questions: Mapping[str, Question] = field(default_factory=dict)  # front ends ask for them as NAME/what
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # run until the server stops
    loads: LoadListener | None = None
    """Hears of every load, and may choose which versions are loaded. It also hears of each model that was
    loaded before the part was."""
    refresh: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Is called before each look at the models' folders, in a server that follows them."""
    state: object = None  # what extensions use that need this one (`EngineServer.needed`)
    close: Callable[[], None] | None = None  # is called when the server stops


class LoadedParts(LoadListener):
    """Loads a part when it is first needed and keeps it until the server stops. `server` makes what the part
    of an extension with this name works with, and `models` returns all that the engine knows. Used in the
    loop's thread."""

    def __init__(
        self,
        server: Callable[[str], EngineServer],
        models: Callable[[], Iterable[ModelState]] = lambda: (),
    ) -> None:
        self._server = server
        self._models = models
        self._parts: dict[str, EnginePart] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, settings: ServerSettings) -> None:
        """Loads the parts that the server's options switch on; raises what they find wrong with those."""
        for extension in started(settings):
            self._part(extension.name)

    def entry(self, served: Served, names: Iterable[str]) -> dict[str, Any]:
        """Returns what the extensions with these names say about a version, by their names."""
        found: dict[str, Any] = {}
        for name in names:
            part = self._part(name)
            said = None if part is None or part.entry is None else part.entry(served)
            if said is not None:
                found[name] = said
        return found

    async def question(self, what: str) -> Question | None:
        """Returns what answers NAME/what. A part that no model needs yet is imported in a thread, since other
        models may be serving."""
        name, _, asked = what.partition("/")
        await self._bring(name)
        return self._parts[name].questions.get(asked) if name in self._parts else None

    async def _bring(self, name: str) -> None:
        extension = installed().get(name)
        if name not in self._parts and extension is not None and extension.engine:
            make = await asyncio.to_thread(extension.part, extension.engine)
            if name not in self._parts:
                self._begin(extension, make)

    async def refresh(self) -> None:
        """Has each part bring what the models' folders are to hold."""
        for refresh in [part.refresh for part in self._parts.values() if part.refresh is not None]:
            await refresh()

    # ---- as a `LoadListener`

    async def prepare(self, model: ModelState) -> None:
        """Loads the parts that the model's folder asks for: they may say which of its versions are loaded,
        or bring what it lacks."""
        await self.look_at(model.places)
        for listener in self._listeners():
            await listener.prepare(model)

    async def look_at(self, folders: Iterable[Path]) -> None:
        """Loads the parts of extensions that the settings in these folders ask for, also where the model
        cannot be loaded."""
        for name in sorted(await asyncio.to_thread(asked_in_folders, folders)):
            await self._bring(name)

    def pin(self, model: ModelState, files: Fingerprint) -> Pin | None:
        pins = [pin for listener in self._listeners() if (pin := listener.pin(model, files)) is not None]

        def pinned(config: ModelConfig, folder: Path) -> ModelConfig:
            for pin in pins:
                config = pin(config, folder)
            return config

        return pinned if pins else None

    def loaded(self, model: ModelState) -> None:
        for listener in self._listeners():
            listener.loaded(model)

    def _listeners(self) -> list[LoadListener]:
        return [part.loads for part in self._parts.values() if part.loads is not None]

    # ---- loading

    def needed(self, name: str) -> object:
        """Returns the state of an extension's part, which is loaded now if it is not."""
        part = self._part(name)
        return None if part is None else part.state

    def _part(self, name: str) -> EnginePart | None:
        extension = installed().get(name)
        if name not in self._parts and extension is not None and extension.engine:
            self._begin(extension, extension.part(extension.engine))
        return self._parts.get(name)

    def _begin(self, extension: Extension, make: Callable[[EngineServer], EnginePart]) -> None:
        part = self._parts[extension.name] = make(self._server(extension.name))
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(task()) for task in part.tasks]
        if part.loads is not None:
            for model in [one for one in self._models() if one.serving]:
                part.loads.loaded(model)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for part in self._parts.values():
            if part.close is not None:
                part.close()
