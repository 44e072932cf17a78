"""Defines what an extension does in the engine, and holds the parts of those extensions that a loaded model's
settings name, or that a question was asked of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from carpool.config.server import ServerSettings
from carpool.engine.models.served import Served
from carpool.extension import Extension
from carpool.extensions import installed, started
from carpool.link.door import Catalog

Json: TypeAlias = Mapping[str, Any]
Question: TypeAlias = Callable[[Json], Awaitable[Any]]
"""JSON in and out; errors are `CarpoolError`s."""


class EngineServer(Protocol):
    """Defines what an engine part has of its server. Everything is called in the loop's thread."""

    @property
    def settings(self) -> ServerSettings: ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """Lists what an extension does in the engine, on the loop's thread."""

    entry: Callable[[Served], Json | None] | None = None
    """Returns what front ends need to know of a version: its `ModelEntry.extra[NAME]`."""
    questions: Mapping[str, Question] = field(default_factory=dict)  # front ends ask for them as NAME/what
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # run until the server stops
    close: Callable[[], None] | None = None  # is called when the server stops


class LoadedParts:
    """Loads a part when it is first needed and keeps it until the server stops. `server` makes what the part
    of an extension with this name works with. Used in the loop's thread."""

    def __init__(self, server: Callable[[str], EngineServer]) -> None:
        self._server = server
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
        extension = installed().get(name)
        if extension is None or not extension.engine:
            return None
        if name not in self._parts:
            make = await asyncio.to_thread(extension.part, extension.engine)
            if name not in self._parts:
                self._begin(extension, make)
        return self._parts[name].questions.get(asked)

    def _part(self, name: str) -> EnginePart | None:
        extension = installed().get(name)
        if name not in self._parts and extension is not None and extension.engine:
            self._begin(extension, extension.part(extension.engine))
        return self._parts.get(name)

    def _begin(self, extension: Extension, make: Callable[[EngineServer], EnginePart]) -> None:
        part = self._parts[extension.name] = make(self._server(extension.name))
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(task()) for task in part.tasks]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for part in self._parts.values():
            if part.close is not None:
                part.close()
