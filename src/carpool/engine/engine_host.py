"""The engine as front ends know it: a catalogue, inference by key, and answers to questions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from carpool.config.server import ServerSettings
from carpool.config.triton_document import config_document
from carpool.core.job import Reason
from carpool.core.objectives import Promise
from carpool.engine.engine import Engine
from carpool.engine.engine_parts import Json, LoadedParts, Question
from carpool.engine.fleet.fleet import Publisher
from carpool.engine.models.runtime import ModelProcess
from carpool.engine.models.served import Gate, OpensGroups, Served, VersionState
from carpool.engine.run.batch import Route
from carpool.engine.run.step_memory import StepMemory
from carpool.errors import CarpoolError, NotFound, Unsupported
from carpool.link.advice import WriteGate, publish
from carpool.link.catalog import (
    Batching,
    Catalog,
    IndexEntry,
    ModelEntry,
    PublishedModel,
    PublishedServer,
    Traits,
)
from carpool.memory.client_files import OpenRegion, Region
from carpool.observe.statistics import model_statistics, statistics

_PATH = re.compile(r"(?<![\w.:/…])/(?:[^\s/'\"<>|:;,()\[\]{}]+/)*[^\s/'\"<>|:;,()\[\]{}]*")
_VERSION = re.compile(r"[0-9]{1,18}")


def without_paths(sentence: str, folders: tuple[str, ...] = ()) -> str:
    """Absolute paths keep their last part, and a version's number before it. `folders` are known ones, whose
    names may hold anything."""
    for folder in folders:
        sentence = sentence.replace(folder.rstrip("/") + "/", "…/") if folder.strip("/") else sentence
    return _PATH.sub(lambda found: _shortened(found[0]), sentence)


def hide_paths(error: CarpoolError, folders: tuple[str, ...] = ()) -> CarpoolError:
    """Returns the same error, with a sentence for clients."""
    error.message = without_paths(error.message, folders)
    error.args = (error.message, *error.args[1:])
    return error


def _shortened(path: str) -> str:
    parts = path.strip("/").split("/")
    if parts[0] not in _top():  # /v2/models and its like are addresses of this server
        return path
    kept = parts[-2:] if len(parts) > 2 and _VERSION.fullmatch(parts[-2]) else parts[-1:]
    return "…/" + "/".join(kept)


@cache
def _top() -> frozenset[str]:
    return frozenset(found.name for found in Path("/").iterdir())


Seen = Callable[[int], Awaitable[None]]


class EngineHost(Publisher):
    """Offers an engine to the front ends. `make` builds it: the host is its `publisher`, and supplies the
    listeners of its `loads`."""

    def __init__(
        self,
        make: Callable[..., Engine],
        write_gate: WriteGate = lambda *_: None,
        process: ModelProcess | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self._process = process
        if process is not None:
            most = process.max_answer_bytes
            self.memory = StepMemory(process.share, lambda key: self._entries.get(key), most)
        self._write_gate = write_gate
        self._listeners: list[Callable[[Catalog], None]] = []
        self._seen: list[Seen] = []
        self._entries: dict[int, ModelEntry] = {}  # of what is offered or leaving, by key
        self.groups: dict[int, OpensGroups] = {}  # what lets in groups of requests, by key
        self._ends: list[Callable[[], None]] = []
        self._ready = False
        self.needs_one = False  # there should be models, so that none at all is not ready
        self.awaited: frozenset[str] = frozenset()  # models that must have served before it is ready
        self._catalog = Catalog()
        self.published = PublishedServer()  # of the catalogue: what is not about models
        self.regions: dict[int, OpenRegion] = {}  # clients' memory that requests may lie in, by number
        self.region_names: Mapping[str, Region] = {}  # as clients see it
        self.extra: dict[str, Json] = {}  # of the catalogue: what extensions publish, by their names
        self.opened = asyncio.Event()  # the models of the start have been loaded, or have failed
        self.parts = LoadedParts(
            lambda name: ServerOfPart(self, name), lambda: list(self.engine.control.models.values())
        )
        self._questions: dict[str, Question] = {
            "refused": self._count_refused,
            "statistics": self._statistics,
        }
        self.engine = engine = make(publisher=self, loads=lambda: self.parts)
        self.routes: Mapping[int, Route] = engine.fleet.routes  # by key: where requests go
        self.submit_background = engine.submit_background

    def start_parts(self) -> None:
        """Loads what the server's options switch on."""
        self.parts.start(self.settings)

    def share(self, arena: int, file: int) -> None:
        """Shares a front end's memory with models that run in another process."""
        if self._process is not None:
            self._process.share(arena, file)

    def unshare(self, arena: int) -> None:
        if self._process is not None:
            self._process.unshare(arena)

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def listen(self, listener: Callable[[Catalog], None], seen: Seen | None = None) -> None:
        """Call it with every new catalogue. `seen` waits until all behind it have the one of this number."""
        self._listeners.append(listener)
        if seen is not None:
            self._seen.append(seen)

    async def everyone_saw(self) -> None:
        """Every front end has the latest catalogue."""
        await asyncio.gather(*(seen(self._catalog.number) for seen in self._seen))

    def on_stop(self, end: Callable[[], None]) -> None:
        """Call it when it is time to stop."""
        self._ends.append(end)

    def gate(self, key: int) -> Gate:
        return partial(publish, self._write_gate, key)

    def set_ready(self, ready: bool) -> None:
        """Ready when every model is, or has failed; not ready as soon as we mean to stop."""
        self._ready = ready
        self.publish()

    def give_up_loads(self) -> None:
        """Begin no load any more, and end those under way: it is about to stop."""
        self.engine.control.give_up_loads()

    def publish(self) -> None:
        fleet = self.engine.fleet
        self._entries = {
            key: self._entry(key, served) for key, served in (*fleet.offered.items(), *fleet.leaving.items())
        }
        self.groups.clear()
        for key, served in (*fleet.leaving.items(), *fleet.offered.items()):
            opens = served.runtime.groups()
            if opens is not None:
                self.groups[key] = opens
        entries = {(one.name, one.version): self._entries[key] for key, one in fleet.offered.items()}
        chosen = {name: self._entries[key] for name, key in fleet.newest.items()}
        leaving = [self._entries[key] for key in fleet.leaving]
        down = frozenset(key for key, served in fleet.offered.items() if not served.able)
        halted = {(one.name, one.version): one.why_not for one in map(fleet.offered.__getitem__, down)}
        folders = self.engine.folders
        index = [_index_line(*line, halted, folders) for line in self.engine.index()]
        number = self._catalog.number + 1
        self.awaited &= {line.name for line in index} - chosen.keys()
        is_ready = self._ready and (bool(entries) or not self.needs_one) and not self.awaited
        self._catalog = Catalog(
            number,
            is_ready,
            entries,
            chosen,
            index,
            leaving,
            down,
            regions=self.region_names,
            server=self.published,
            extra=dict(self.extra),
        )
        for listener in self._listeners:
            listener(self._catalog)

    def _entry(self, key: int, served: Served) -> ModelEntry:
        """Returns the entry there is, unless its settings changed, or what is said of it: what front ends
        learnt hangs on these objects."""
        config = served.config
        document = config_document(config)
        extra = self.parts.entry(served, config.extra)
        known = self._entries.get(key)
        same = known is not None and (known.published.config, known.extra) == (document, extra)
        if known is not None and same and tuple(known.published.choices) == tuple(served.choices):
            return known
        platform = str(document["platform"] or document["backend"])
        promise = config.policy.slo if isinstance(config.policy, Promise) else None
        return ModelEntry(
            key=key,
            name=served.name,
            version=served.version,
            signature=served.signature,
            batching=Batching(config.mode.value, promise),
            traits=Traits(
                hosted=served.hosted,
                fetches=not served.hosted and not served.runs_nothing,
                decoupled=config.decoupled or served.writes,
                writes=served.writes,
            ),
            published=PublishedModel(platform, document, served.labels, served.choices),
            row=(served.counters.slot.row, served.counters.slot.generation),
            vision=served.pictures,
            extra=extra,
        )

    # ---- inference and questions ------------------------------------------------------------------------

    def on_question(self, what: str, answer: Question) -> None:
        """Answer a question of front ends with this function from now on."""
        self._questions[what] = answer

    def add_extension(self, name: str) -> None:
        """Names an extension of the protocol that clients may use."""
        self.published = replace(self.published, extensions=(*self.published.extensions, name))

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        answer = self._questions.get(what) or await self.parts.question(what)
        if answer is None:
            raise Unsupported(f"the engine knows no question {what!r}")
        return await answer(arguments)

    async def _count_refused(self, arguments: Mapping[str, Any]) -> None:
        """Counts what front ends refused on the gate's advice: [[key, source, reason, how many], …]."""
        for key, source, reason, count in arguments["refused"]:
            served = self.engine.served.get(key)
            if served is not None:
                served.runtime.refused_elsewhere(count, Reason(reason), source)

    async def _statistics(self, arguments: Mapping[str, Any]) -> Any:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        rows = {(cells.model, cells.version): cells for cells in self.engine.table.models()}
        asked = [
            served
            for served in self.engine.served.values()
            if name in ("", served.name) and version in ("", served.version)
        ]
        if name and not asked:
            which = f" version {version}" if version else ""
            raise NotFound(f"Request for unknown model: '{name}'{which} is not found", reason="unknown-model")
        found = [(rows.get((served.name, served.version)), served) for served in asked]
        return statistics(
            model_statistics(cells, served.counters.batches) for cells, served in found if cells
        )

    async def drain(self, timeout: float) -> None:
        """Finish what was accepted, then free the models."""
        for end in self._ends:
            end()
        self.parts.close()
        self.set_ready(False)
        await self.engine.stop(timeout)
        if self._process is not None:
            await self._process.close()


class ServerOfPart:
    """Implements `EngineServer` for the part of one extension."""

    def __init__(self, host: EngineHost, name: str) -> None:
        self._host = host
        self._name = name

    @property
    def settings(self) -> ServerSettings:
        return self._host.settings

    @property
    def engine(self) -> Engine:
        return self._host.engine

    @property
    def served(self) -> Mapping[int, Served]:
        return self._host.engine.served

    @property
    def catalog(self) -> Catalog:
        return self._host.catalog

    def offer(self, name: str) -> None:
        self._host.add_extension(name)

    def find(self, model: str, version: str) -> Served:
        return self._host.engine.find(model, version)

    def publish(self, extra: Json) -> None:
        self.say(extra)
        self._host.publish()

    def say(self, extra: Json) -> None:
        self._host.extra[self._name] = extra

    async def everyone_saw(self) -> None:
        await self._host.everyone_saw()

    async def opened(self) -> None:
        await self._host.opened.wait()

    def needed(self, name: str) -> Any:
        return self._host.parts.needed(name)


def _index_line(
    name: str,
    version: str,
    state: str,
    reason: str,
    halted: Mapping[tuple[str, str], str],
    folders: tuple[str, ...],
) -> IndexEntry:
    if (name, version) in halted:
        state, reason = VersionState.UNAVAILABLE.value, halted[name, version]
    return IndexEntry(name, version, state, without_paths(reason, folders))
