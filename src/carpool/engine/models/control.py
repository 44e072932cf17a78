"""Loading, replacing and unloading models while others, and their own older versions, serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.config.model import Mode, ModelConfig
from carpool.config.repository import Fingerprint, ModelVersion, find_places
from carpool.engine.batch import Route
from carpool.engine.models.candidate import (
    Candidate,
    Override,
    Upload,
    as_known,
    fingerprint_of,
    read_candidate,
)
from carpool.engine.models.served import Callers, Served, State
from carpool.engine.profile.instance_layout import Devices
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.route import Direct
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable
from carpool.link.door import UNLOADED, IndexEntry
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.engine.runner_client import Runner


log = logger("engine")

_SEEN_WITHIN_S = 60.0  # a front end that takes longer is stuck, and memory is not kept for it for ever


async def _at_once() -> None:
    """Who sends requests sees every change when it happens."""


class Fleet:
    """Changes go by `swap`, which happens between two requests: there is never less on offer than needed.

    `changed` is told of every change. `seen` waits until everybody who sends requests knows the latest one;
    until then what was withdrawn is kept, for requests that are on their way.
    """

    def __init__(
        self,
        table: Table,
        block: Block,
        profiles: ProfileStore | None = None,
        host: Runner | None = None,
    ) -> None:
        self._table = table
        self._block = block
        self._profiles = profiles
        self._devices = Devices()
        self._host = host
        self.offered: dict[int, Served] = {}  # by key, a number that is never used again
        self.leaving: dict[int, Served] = {}
        self.routes: dict[int, Route] = {}  # of both
        self.changed: Callable[[], None] = lambda: None
        self.seen: Callable[[], Awaitable[None]] = _at_once
        self.callers: Callers | None = None  # how instances of a model ask other models
        self._loading: set[Served] = set()
        self._keys = 0
        self._retiring: set[asyncio.Task[None]] = set()

    def build(
        self, config: ModelConfig, version: ModelVersion, identity: object, upload: Upload | None
    ) -> Served:
        """A version that is to be loaded, then swapped in or dropped. It counts where its like counted."""
        slot = self._table.directory.assign(config.name, str(version.number))
        row, server_row = self._block.row(slot), self._block.server
        served = Served(
            config,
            version,
            slot,
            row,
            server_row,
            identity=identity,
            upload=upload,
            profiles=self._profiles,
            devices=self._devices,
            host=self._host,
            callers=self.callers,
        )
        served.changed = lambda: self.changed()
        if upload is not None:
            upload.join()
        self._loading.add(served)
        return served

    async def drop(self, served: Served) -> None:
        """It was not needed after all, or did not load."""
        self._loading.discard(served)
        await served.unload(0.0)
        self._forget(served)

    def swap(self, new: Iterable[Served], old: Iterable[Served]) -> None:
        """From here on these are offered, and those are not."""
        going = set(old)
        for key, served in [item for item in self.offered.items() if item[1] in going]:
            del self.offered[key]
            served.withdraw()
            self.leaving[key] = served
            task = asyncio.get_running_loop().create_task(self._retire(key, served))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        for served in new:
            self._loading.discard(served)
            for before in going:
                if before.version == served.version and before.name == served.name:
                    served.batches = before.batches
            served.offer()
            self._keys += 1
            self.offered[self._keys] = served
            self.routes[self._keys] = Direct(served.driver, eager=served.config.mode is Mode.EAGER)
        self.changed()

    async def _retire(self, key: int, served: Served) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.seen(), _SEEN_WITHIN_S)
        await served.retire()
        del self.leaving[key], self.routes[key]
        self._forget(served)
        log.info("model-unloaded", model=served.name, version=served.version)
        self.changed()

    def _forget(self, served: Served) -> None:
        """Its counters stay as long as anything of its name and version is there."""
        others = (*self.offered.values(), *self.leaving.values(), *self._loading)
        if not any(o.name == served.name and o.version == served.version for o in others):
            self._table.directory.retire(served.name, served.version)

    async def stop(self, timeout: float) -> None:
        """Finish what was accepted, within this time, and free everything."""
        retiring = list(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        self.leaving |= self.offered
        self.offered.clear()
        everything = list(self.leaving.values())
        await asyncio.gather(*(served.unload(timeout) for served in everything))
        self.leaving.clear()
        self.routes.clear()
        for served in everything:
            self._forget(served)
        self.changed()


_MOST_UNLOADED = 16
_WHOLE = 0  # among the versions: the model as such


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """Settings that a request to load brought. As in Triton they hold for later loads that bring none, until
    the files in the model's folder change."""

    config: str
    files: Fingerprint


@dataclass(slots=True, eq=False)
class ModelState:
    name: str
    places: tuple[Path, ...] = ()  # where it was found; none for one that came with a request, or is gone
    serving: dict[int, Served] = field(default_factory=dict)  # by version
    loading: Collection[int] = ()
    tried: Fingerprint | None = None  # what the last load, good or bad, began with
    kept: KeptConfig | None = None  # settings that came with a request
    missed: int = 0  # looks in a row at which it was not found
    _failed: dict[int, str] = field(default_factory=dict)
    _unloaded: set[int] = field(default_factory=set)

    def failed(self, reason: str, versions: Collection[int] = ()) -> None:
        """The last load; what served before goes on."""
        self._failed = dict.fromkeys(versions or (_WHOLE,), reason)

    def now_serves(self, serving: dict[int, Served]) -> None:
        self._failed = {}
        self._unloaded |= self.serving.keys() - serving.keys()
        self._unloaded -= serving.keys()
        self._unloaded = set(sorted(self._unloaded)[-_MOST_UNLOADED:])
        self.serving = serving

    def lines(self, leaving: Collection[int]) -> list[IndexEntry]:
        """One for each version; `leaving` are those that still have riders."""
        versions = {*self.serving, *self.loading, *leaving, *self._failed, *self._unloaded} - {_WHOLE}
        lines = [self._line(version, version in leaving) for version in sorted(versions)]
        if lines:
            return lines
        whole = self._failed.get(_WHOLE)
        return [IndexEntry(self.name, "", State.UNAVAILABLE.value, whole) if whole else IndexEntry(self.name)]

    def _line(self, version: int, leaving: bool) -> IndexEntry:
        reason = self._failed.get(version) or self._failed.get(_WHOLE) or ""
        if version in self.serving:
            state = State.READY
        elif version in self.loading:
            state, reason = State.LOADING, ""
        elif leaving:
            state, reason = State.UNLOADING, ""
        else:
            state, reason = State.UNAVAILABLE, reason or UNLOADED
        return IndexEntry(self.name, str(version), state.value, reason)


log = logger("engine")

Progress = Callable[[str, str], None]

_MOST_NAMED = 20


def silent(_model: str, _step: str) -> None:
    """For those who do not want to know."""


class ModelControl:
    """One load at a time, since each model is measured; what is asked of one model happens in its order."""

    def __init__(
        self, paths: Sequence[Path], fleet: Fleet, with_promise: Callable[[ModelConfig], ModelConfig]
    ) -> None:
        self._paths = paths
        self._fleet = fleet
        self._with_promise = with_promise
        self._models: dict[str, ModelState] = {}
        self._one_at_a_time = asyncio.Lock()
        self._last: dict[str, asyncio.Task[None]] = {}  # by model: what was asked last and is not over
        self._unbegun: dict[str, asyncio.Task[None]] = {}  # by model: a plain load that others may share
        self.closed = False

    # ---- what is there ----------------------------------------------------------------------------------

    def index(self) -> list[IndexEntry]:
        leaving: dict[str, list[int]] = {}
        for served in self._fleet.leaving.values():
            leaving.setdefault(served.name, []).append(int(served.version))
        models = self._models.values()
        return [line for model in models for line in model.lines(leaving.get(model.name, ()))]

    async def find(self) -> list[str]:
        """Look for models, without reading them; returns the names of those that are there."""
        known = {model.name: model.places for model in self._models.values() if model.places}
        places, warnings = await asyncio.to_thread(find_places, self._paths, known)
        before = self.index()
        for name in places:
            self._models.setdefault(name, ModelState(name))
        for model in list(self._models.values()):
            model.places = places.get(model.name, ())
            if not model.places and not model.serving and model.name not in self._last:
                del self._models[model.name]
        if self.index() != before:
            for warning in warnings:
                log.warning("config", message=warning)
            self._fleet.changed()
        return list(places)

    def unknown(self, name: str) -> NotFound:
        there = ", ".join(sorted(self._models)[:_MOST_NAMED]) or "none"
        return NotFound(f"there is no model '{name[:80]}'; there are {there}", reason="unknown-model")

    # ---- what can be asked for --------------------------------------------------------------------------

    async def load(self, name: str, override: Override | None = None, progress: Progress = silent) -> None:
        """Load, or load again. What serves goes on until all that replaces it is warm, or if that fails.

        Who asks for a load that has not begun yet shares it.
        """
        if override is not None and override.files and override.config is None:
            raise InvalidInput("a model that comes as files needs its settings too", field="config")
        task = self._unbegun.get(name) if override is None else None
        if task is None:
            task = self._follow(name, lambda: self._load_in_turn(name, override, progress))
            if override is None:
                self._unbegun[name] = task
        await _outcome(task)

    async def unload(self, name: str) -> None:
        """Stop offering a model, if it is loaded; it is freed when its last rider has left."""
        await _outcome(self._follow(name, lambda: self._unload(name)))

    async def look(self) -> None:
        """Follow the folders: load what is new or changed, unload what is gone.

        A model is gone when it was missing twice in a row, since replacing a folder can take a moment.
        """
        await self.find()
        places = {model.name: model.places for model in self._models.values()}
        seen = await asyncio.to_thread(
            lambda: {name: fingerprint_of(found) for name, found in places.items()}
        )
        for name, fingerprint in seen.items():
            model = self._models.get(name)
            if model is None:
                continue  # forgotten while others were loaded
            model.missed = 0 if model.places else model.missed + 1
            try:
                if model.missed > 1:
                    await self.unload(name)
                elif model.places and fingerprint != model.tried:
                    await self.load(name)
            except CarpoolError as error:
                log.debug("not-followed", model=name, error=error.message)  # the index has it too

    async def close(self) -> None:
        """Take no more orders, and give up what is under way."""
        self.closed = True
        tasks = list(self._last.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self._models.values():
            model.now_serves({})

    def _follow(self, name: str, operation: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Do this after whatever else was asked of the same model, whether or not the caller waits."""
        if self.closed:
            raise Unavailable("the server is stopping", reason="stopping")
        before = self._last.get(name)
        self._unbegun.pop(name, None)

        async def follow() -> None:
            if before is not None:
                await asyncio.wait([before])
            await operation()

        def over(task: asyncio.Task[None]) -> None:
            if self._last.get(name) is task:
                del self._last[name]
            if not task.cancelled():
                task.exception()  # whoever asked may have gone: nobody else need hear of it

        task = asyncio.get_running_loop().create_task(follow())
        self._last[name] = task
        task.add_done_callback(over)
        return task

    # ---- loading ----------------------------------------------------------------------------------------

    async def _load_in_turn(self, name: str, override: Override | None, progress: Progress) -> None:
        async with self._one_at_a_time:
            if self._unbegun.get(name) is asyncio.current_task():
                del self._unbegun[name]
            model = await self._model_to_load(name, override)
            try:
                await self._load(model, override, progress)
            except CarpoolError as error:
                log.error("model-not-loaded", model=name, error=error.message)
                raise
            finally:
                model.loading = ()
                self._fleet.changed()

    async def _model_to_load(self, name: str, override: Override | None) -> ModelState:
        if override is not None and override.files:
            return self._models.setdefault(name, ModelState(name))
        try:
            await self.find()
        except CarpoolError:
            if name not in self._models:  # else it is another path that cannot be read
                raise
        if name not in self._models:
            raise self.unknown(name)
        return self._models[name]

    async def _load(self, model: ModelState, override: Override | None, progress: Progress) -> None:
        model.tried = files = await asyncio.to_thread(fingerprint_of, model.places)
        if override is None and model.kept is not None and model.kept.files == files:
            override = Override(model.kept.config)
        try:
            found = await asyncio.to_thread(
                read_candidate, model.name, model.places, override, self._with_promise
            )
        except Exception as cause:
            error = as_known(model.name, cause)
            model.failed(error.message)
            raise error from cause
        try:
            await self._bring_in(model, found, progress)
        finally:
            await asyncio.to_thread(found.close)
        config = None if override is None or override.files else override.config
        model.kept = None if config is None else KeptConfig(config, files)

    async def _bring_in(self, model: ModelState, found: Candidate, progress: Progress) -> None:
        kept: dict[int, Served] = {}
        fresh: list[ModelVersion] = []
        for version in found.source.versions:
            old = model.serving.get(version.number)
            if old is not None and old.identity == found.identity(version):
                kept[version.number] = old
            else:
                fresh.append(version)
        model.loading = [version.number for version in fresh]
        self._fleet.changed()
        new = await self._load_all(model, found, fresh, progress)
        # Nothing is waited for from here on: between two requests, all of it changes at once.
        going = [served for number, served in model.serving.items() if kept.get(number) is not served]
        for served in kept.values():
            served.config = replace(served.config, versions=found.source.config.versions)
        model.loading = ()
        model.now_serves({**kept, **{int(served.version): served for served in new}})
        self._fleet.swap(new, going)

    async def _load_all(
        self, model: ModelState, found: Candidate, fresh: Sequence[ModelVersion], progress: Progress
    ) -> list[Served]:
        """All of them, or none and the reason."""
        new: list[Served] = []
        at_fault: list[int] = []
        try:
            for version in fresh:
                at_fault = [version.number]
                new.append(
                    self._fleet.build(found.source.config, version, found.identity(version), found.upload)
                )
                await new[-1].load(lambda step: progress(model.name, step))
            at_fault = [version.number for version in fresh]
            await asyncio.to_thread(found.check_unchanged)
        except BaseException as cause:
            if not isinstance(cause, CarpoolError | asyncio.CancelledError):
                log.exception("load-failed", model=model.name)
            for served in new:
                await self._fleet.drop(served)
            if not isinstance(cause, Exception):
                raise
            error = await asyncio.to_thread(found.explained, cause)
            error.while_loading = True
            model.failed(error.message, at_fault)
            raise error from cause
        return new

    # ---- unloading --------------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        if name not in self._models:
            await self.find()
        model = self._models.get(name)
        if model is None:
            raise self.unknown(name)
        going = list(model.serving.values())
        model.now_serves({})
        model.kept = None
        self._fleet.swap((), going)


async def _outcome(task: asyncio.Task[None]) -> None:
    """Of a task that goes on when its caller does not; also when it was given up."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise Unavailable("the server is stopping", reason="stopping") from None
        raise
