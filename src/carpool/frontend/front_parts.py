"""Holds the front parts of extensions: those that the server's options start, and those of which the
catalogue says something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from carpool.config.server import ServerSettings
from carpool.extension import Extension
from carpool.extensions import choice_fields, installed, picture_options, started
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.front_part import FrontPart, SeesRefused, StartedWith
from carpool.frontend.calls.own_request import send
from carpool.frontend.calls.request import Request
from carpool.frontend.calls.request_facts import Observer, RequestReply, SeesPictures
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.link.senders import NOBODY, Sender
from carpool.observe.counters import Cells, Row
from carpool.observe.exemplars import Exemplars
from carpool.types import Array

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService
    from carpool.frontend.pictures.workers import Workers


class ServerOfParts:
    """Implements `FrontServer`."""

    def __init__(self, service: CallService, row: Row, start: StartedWith) -> None:
        self._service = service  # of which nothing is ready yet while options start parts
        self.server_row = row
        self._start = start

    @property
    def pictures(self) -> PictureService:
        return self._service.with_pictures()

    @property
    def settings(self) -> ServerSettings:
        return self._start.settings

    @property
    def exemplars(self) -> Exemplars:
        return self._start.exemplars

    @property
    def began(self) -> float:
        return self._start.began

    @property
    def threads(self) -> Workers:
        return self._service.with_pictures().workers

    def row(self, entry: ModelEntry) -> Row:
        return self._service.row(entry)

    def send(
        self,
        entry: ModelEntry,
        inputs: Mapping[str, Array],
        reply: RequestReply,
        sender: Sender = NOBODY,
        deadline: float = inf,
    ) -> Request:
        return send(self._service, entry, inputs, reply, sender, deadline)

    async def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        return await self._service.engine.ask(question, arguments)


class FrontParts:
    """Loads a part when the front end starts or a catalogue first names its extension, and keeps it until the
    front end stops. Used in the loop's thread."""

    def __init__(self, service: CallService, row: Row, start: StartedWith) -> None:
        self.server = ServerOfParts(service, row, start)
        self._parts: dict[str, FrontPart] = {}
        self._seen: set[str] = set()  # extensions that were looked for
        self._by_field = dict(choice_fields())  # those that a field of a request's head still loads
        self._by_option = dict(picture_options())  # and those that an option of a picture route does
        self.observers: tuple[Observer, ...] = ()
        self.see_pictures: tuple[SeesPictures, ...] = ()
        self.see_refused: tuple[SeesRefused, ...] = ()

    def start(self, engine: EngineClient) -> EngineClient:
        """Loads the parts that the server's options switch on; returns the client that they have wrapped."""
        for extension in started(self.server.settings):
            part = self._load(extension)
            if part is not None and part.engine is not None:
                engine = part.engine(engine)
        return engine

    def load(self, catalog: Catalog) -> None:
        """Loads what is new in this catalogue."""
        named = {name for entry in catalog.entries.values() for name in entry.extra}.union(catalog.extra)
        if not named <= self._seen:
            for extension in installed().values():
                if extension.name in named - self._seen:
                    self._load(extension)
            self._seen |= named

    def follow(self, catalog: Catalog) -> None:
        """Lets all parts follow this catalogue, for which they are loaded."""
        for part in self._parts.values():
            if part.follow is not None:
                part.follow(catalog)
        asked = [(part, part.observe()) for part in self._parts.values() if part.observe is not None]
        active = [part for part, observer in asked if observer is not None]
        self.observers = tuple(observer for _, observer in asked if observer is not None)
        self.see_pictures = tuple(part.picture for part in active if part.picture is not None)
        self.see_refused = tuple(part.refused for part in active if part.refused is not None)

    def loads_for(self, fields: Mapping[bytes, bytes], catalog: Catalog) -> bool:
        """Returns whether a part had to be loaded, as these fields of a request's head ask for."""
        return self._loads(catalog, (one for field, one in self._by_field.items() if field in fields))

    def loads_for_options(self, options: Mapping[str, str], catalog: Catalog) -> bool:
        """Does the same for the options of a request on a picture route."""
        return self._loads(catalog, (one for name, one in self._by_option.items() if name in options))

    def _loads(self, catalog: Catalog, extensions: Iterable[Extension]) -> bool:
        asked = {one.name: one for one in extensions}
        parts = [self._load(extension) for extension in asked.values()]
        for part in parts:
            if part is not None and part.follow is not None:
                part.follow(catalog)
        return bool(parts)

    def _load(self, extension: Extension) -> FrontPart | None:
        self._seen.add(extension.name)
        self._by_field = {field: one for field, one in self._by_field.items() if one is not extension}
        self._by_option = {name: one for name, one in self._by_option.items() if one is not extension}
        if not extension.front:
            return None
        part: FrontPart = extension.part(extension.front)(self.server)
        self.add(extension.name, part)
        return part

    def in_order(self) -> list[FrontPart]:
        """Returns the parts in the order of wrapping, from the client to the engine: that of the one list."""
        order = {name: place for place, name in enumerate(installed())}
        return [self._parts[name] for name in sorted(self._parts, key=lambda name: order.get(name, 0))]

    def state_of(self, name: str) -> object:
        """Returns the state of an extension's part; None while it is not loaded."""
        part = self._parts.get(name)
        return None if part is None else part.state

    def shown(self, entry: ModelEntry, cells: Cells | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what the console's page says of a version, and of its counters, by extension."""
        said, counts = {}, {}
        for name, part in self._parts.items():
            if part.shows is not None and (shown := part.shows(entry)) is not None:
                said[name] = shown
            if part.counts is not None and cells is not None and name in entry.extra:
                counts[name] = part.counts(cells)
        return said, counts

    def add(self, name: str, part: FrontPart) -> None:
        """Adds a part that is made already."""
        self._parts[name] = part

    def close(self) -> None:
        for part in self._parts.values():
            if part.close is not None:
                part.close()
