"""Implements loading, replacing and unloading models while others, and their own older versions, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import Fingerprint
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion, find_places
from carpool.config.usable_cores import usable_cores
from carpool.engine.fleet.fleet import Fleet
from carpool.engine.fleet.model_state import KeptConfig, ModelState
from carpool.engine.fleet.needed_models import NeededModels
from carpool.engine.loading.loadable import (
    Loadable,
    Override,
    Pin,
    as_known,
    fingerprint_of,
    read_loadable,
)
from carpool.engine.models.served import Served, VersionState
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable
from carpool.link.catalog import ON_DEMAND, UNLOADED, IndexEntry
from carpool.observe.logs import logger

log = logger("engine")

Progress = Callable[[str, str], None]

_MOST_NAMED, _LONGEST_NAME = 20, 80


def silent(_model: str, _step: str) -> None:
    """Does nothing, for those who do not want to know."""


class LoadListener:
    """Hears of every load, and may choose what is loaded. This one lets all happen as the settings say."""

    async def prepare(self, model: ModelState) -> None:
        """It is about to be loaded."""

    def pin(self, model: ModelState, files: Fingerprint) -> Pin | None:
        """Returns which of its versions are loaded, given what its files look like now."""

    def loaded(self, model: ModelState) -> None:
        """It was loaded, and serves."""


class Checks:
    """Collects the checks of models that are loaded together: mistakes in any of them are reported before
    slow work begins."""

    def __init__(self, names: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        self._begin = {name: loop.create_future() for name in names}
        self._unchecked = set(self._begin)

    def passed(self, name: str) -> None:
        """It is in order, or will not be loaded."""
        self._unchecked.discard(name)
        if not self._unchecked:
            for begin in self._begin.values():  # in the order in which they were named
                if not begin.done():
                    begin.set_result(None)

    async def of_all(self, name: str) -> None:
        """Notes that this one is in order, and waits for the others."""
        asyncio.get_running_loop().call_soon(self.passed, name)  # later: the last must not overtake
        await self._begin[name]


class ModelControl:
    """Loads models side by side; what is asked of one model happens in its order."""

    def __init__(
        self,
        paths: Sequence[Path],
        fleet: Fleet,
        with_promise: Callable[[ModelConfig], ModelConfig],
        loads: Callable[[], LoadListener],
        *,
        on_demand: bool,
    ) -> None:
        self._paths = paths
        self._fleet = fleet
        self._with_promise = with_promise
        self._loads = loads
        self.models: dict[str, ModelState] = {}
        self._few = asyncio.Semaphore(max(2, usable_cores()))  # more would only share the cores
        self._in_the_runner = asyncio.Lock()  # what captures work on a GPU must be alone with it
        self.under_way: dict[str, asyncio.Task[None]] = {}  # by model: what was asked last and is not over
        self._unbegun: dict[str, asyncio.Task[None]] = {}  # by model: a plain load that others may share
        self._waits: dict[str, tuple[str, ...]] = {}  # by model: those that it asks, and that load first
        self.closed = False
        self.stops = False
        self._loads_under_way: dict[str, asyncio.Task[None]] = {}  # by model: what loads it now
        self._on_demand = on_demand  # a model that is not loaded will be, on its first request
        self.steps = NeededModels(self)

    # ---- what is there ----------------------------------------------------------------------------------

    def index(self) -> list[IndexEntry]:
        leaving: dict[str, list[int]] = {}
        for served in self._fleet.leaving.values():
            leaving.setdefault(served.name, []).append(int(served.version))
        models = self.models.values()
        lines = [line for model in models for line in model.lines(leaving.get(model.name, ()))]
        if not self._on_demand:
            return lines
        absent = VersionState.UNAVAILABLE.value
        return [
            IndexEntry(*line[:2], absent, ON_DEMAND) if not line.state or line.reason == UNLOADED else line
            for line in lines
        ]

    async def find(self) -> list[str]:
        """Look for models, without reading them; returns the names of those that are there."""
        known = {model.name: model.places for model in self.models.values() if model.places}
        places, warnings = await asyncio.to_thread(find_places, self._paths, known)
        before = self.index()
        for name in places:
            self.models.setdefault(name, ModelState(name))
        for model in list(self.models.values()):
            model.places = places.get(model.name, ())
            if not model.places and not model.serving and model.name not in self.under_way:
                del self.models[model.name]
        if self.index() != before:
            for warning in warnings:
                log.warning("config", message=warning)
            self._fleet.publish()
        return list(places)

    def note_mistakes(self, mistakes: Mapping[str, CarpoolError]) -> Mapping[str, CarpoolError]:
        """Notes mistakes in the settings of models that no request has named yet; by name, and returned
        unchanged."""
        for name, mistake in mistakes.items():
            log.error("model-not-loaded", model=name, error=mistake.message)
            self.models[name].failed(mistake.message)
        self._fleet.publish()
        return mistakes

    def known(self, name: str) -> ModelState | None:
        return self.models.get(name)

    def unknown(self, name: str) -> NotFound:
        there = ", ".join(sorted(self.models)[:_MOST_NAMED]) or "none"
        return NotFound(
            f"there is no model '{name[:_LONGEST_NAME]}'; there are {there}", reason="unknown-model"
        )

    # ---- what can be asked for --------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        override: Override | None = None,
        progress: Progress = silent,
        checks: Checks | None = None,
    ) -> None:
        """Load, or load again. What serves goes on until all that replaces it is warm, or if that fails.

        Who asks for a load that has not begun yet shares it. With `checks`, nothing slow begins before all
        that it was made for have passed theirs.
        """
        if override is not None and override.files and override.config is None:
            raise InvalidInput("a model that is sent as files needs its settings too", field="config")
        task = self._unbegun.get(name) if override is None else None
        if task is None:
            task = self._follow(name, lambda: self._load_checked(name, override, progress, checks))
            if override is None:
                self._unbegun[name] = task
        await self._outcome(task)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Stops offering a model, if it is loaded, and frees it after its last request. The same happens to
        ensembles that need it. With `dependents`, so are an ensemble's steps, unless others need them.

        A load of it that is under way is cancelled: it may have no end."""
        steps = self.steps.of(name) if dependents else ()
        if (loading := self._loads_under_way.get(name)) is not None:
            loading.cancel()
        await self._outcome(self._follow(name, lambda: self._unload(name)))
        for step in steps:
            if not self.steps.needing(step):
                await self.unload(step, dependents=True)

    async def look(self) -> None:
        """Follow the folders: load what is new or changed, unload what is gone.

        A model is gone when it was missing twice in a row, since replacing a folder can take a moment.
        """
        await self.find()
        places = {model.name: model.places for model in self.models.values()}
        seen = await asyncio.to_thread(
            lambda: {name: fingerprint_of(found) for name, found in places.items()}
        )
        for name, fingerprint in seen.items():
            model = self.models.get(name)
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

    def give_up_loads(self) -> None:
        """The server stops soon: a load is of no use any more, and clients that wait for one hold it up."""
        self.stops = True
        for task in self._loads_under_way.values():
            task.cancel()

    async def close(self) -> None:
        """Take no more orders, and give up what is under way."""
        self.closed = self.stops = True
        tasks = list(self.under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.models.values():
            model.now_serves({})

    async def _outcome(self, task: asyncio.Task[None]) -> None:
        """Waits for a task that goes on when its caller does not; also when it was given up."""
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            if self.stops:
                raise _stopping() from None
            why = "the model was unloaded before its load had ended"
            raise Unavailable(why, reason="unloading") from None

    def _follow(self, name: str, operation: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Do this after whatever else was asked of the same model, whether or not the caller waits."""
        if self.stops:
            raise _stopping()
        before = self.under_way.get(name)
        self._unbegun.pop(name, None)

        async def follow() -> None:
            if before is not None:
                await asyncio.wait([before])
            await operation()

        def over(task: asyncio.Task[None]) -> None:
            if self.under_way.get(name) is task:
                del self.under_way[name]
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio logs nothing: the caller may have gone

        task = asyncio.get_running_loop().create_task(follow())
        self.under_way[name] = task
        task.add_done_callback(over)
        return task

    # ---- loading ----------------------------------------------------------------------------------------

    async def _load_checked(
        self, name: str, override: Override | None, progress: Progress, checks: Checks | None
    ) -> None:
        if self._unbegun.get(name) is asyncio.current_task():
            del self._unbegun[name]
        task = asyncio.current_task()
        if task is not None:
            self._loads_under_way[name] = task
        checks = checks or Checks([name])
        try:
            model = await self._model_to_load(name, override)
            try:
                await self._load(model, override, progress, checks)
                self._loads().loaded(model)
            except CarpoolError as error:
                log.error("model-not-loaded", model=name, error=error.message)
                raise
            finally:
                model.loading = ()
                self._fleet.publish()
        finally:
            self._loads_under_way.pop(name, None)
            checks.passed(name)

    async def _model_to_load(self, name: str, override: Override | None) -> ModelState:
        if override is not None and override.files:
            return self.models.setdefault(name, ModelState(name))
        try:
            await self.find()
        except CarpoolError:
            if name not in self.models:  # else it is another path that cannot be read
                raise
        if name not in self.models:
            raise self.unknown(name)
        return self.models[name]

    async def _load(
        self, model: ModelState, override: Override | None, progress: Progress, checks: Checks
    ) -> None:
        await self._loads().prepare(model)
        model.tried = files = await asyncio.to_thread(fingerprint_of, model.places)
        if override is None and model.kept is not None and model.kept.files == files:
            override = Override(model.kept.config)
        try:
            found = await asyncio.to_thread(
                read_loadable,
                model.name,
                model.places,
                override,
                self._with_promise,
                self._loads().pin(model, files),
            )
        except Exception as cause:
            error = as_known(model.name, cause)
            model.failed(error.message)
            raise error from cause
        try:
            await self._bring_in(model, found, progress, checks)
        finally:
            await asyncio.to_thread(found.close)
        config = None if override is None or override.files else override.config
        model.kept = None if config is None else KeptConfig(config, files)

    async def _bring_in(self, model: ModelState, found: Loadable, progress: Progress, checks: Checks) -> None:
        kept: dict[int, Served] = {}
        fresh: list[ModelVersion] = []
        for version in found.source.versions:
            old = model.serving.get(version.number)
            if old is not None and old.identity == found.identity(version):
                kept[version.number] = old
            else:
                fresh.append(version)
        model.loading = [version.number for version in fresh]
        self._fleet.publish()
        new = await self._load_all(model, found, fresh, progress, checks)
        # Nothing is waited for from here on: between two requests, all of it changes at once.
        going = [served for number, served in model.serving.items() if kept.get(number) is not served]
        for served in kept.values():
            config = found.source.config
            served.config = replace(served.config, versions=config.versions, extra=config.extra)
        model.loading = ()
        model.now_serves({**kept, **{int(served.version): served for served in new}})
        self._fleet.swap(new, going)

    async def _load_all(
        self,
        model: ModelState,
        found: Loadable,
        fresh: Sequence[ModelVersion],
        progress: Progress,
        checks: Checks,
    ) -> list[Served]:
        """Returns all of them, or none and the reason."""
        new: list[Served] = []
        at_fault: list[int] = []
        config = found.source.config
        in_the_runner = kind_of(config.backend).process == "runner"
        try:
            for version in fresh:
                at_fault = [version.number]
                own = found.source.config_of(version)
                new.append(self._fleet.build(own, version, found.identity(version), found.upload))
                async with self._few:
                    await new[-1].runtime.check()
            await checks.of_all(model.name)
            for version in fresh:
                await self._load_first(model.name, *_callees(config, version.file))
            if config.needs:
                await self.steps.load(config)
            async with self._in_the_runner if in_the_runner else self._few:
                for served in new:
                    at_fault = [int(served.version)]
                    await served.load(lambda step: progress(model.name, step))
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

    async def _load_first(self, name: str, asked: Sequence[str], why: str) -> None:
        """Waits for models that this one calls, and that load now: without them, its measurement would fail.
        Does not wait for those that wait for this one in turn."""
        under_way = {
            other: self.under_way[other]
            for other in asked
            if other in self.under_way and other != name and name not in self._behind(other)
        }
        if under_way:
            log.info("loads-after", model=name, others=", ".join(under_way), why=why)
            self._waits[name] = tuple(under_way)
            try:
                await asyncio.wait(under_way.values())
            finally:
                del self._waits[name]

    def _behind(self, name: str) -> set[str]:
        """Returns all that this one waits for."""
        found: set[str] = set()
        left = [name]
        while left:
            new = set(self._waits.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    # ---- unloading --------------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        if name not in self.models:
            await self.find()
        model = self.models.get(name)
        if model is None:
            log.warning("model-not-unloaded", model=name[:_LONGEST_NAME], message="there is no such model")
            return  # as in Triton: what is not there need not go
        going: list[Served] = []
        for one in (
            *self.steps.needing(name),
            model,
        ):  # those that need it come first: no ensemble is offered without its steps
            going += one.serving.values()
            one.now_serves({})
            if one is not model:
                one.failed(f"{name}, which it needs, was unloaded")
        model.kept = None
        self._fleet.swap((), going)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping", reason="stopping")


def _callees(config: ModelConfig, file: Path | None) -> tuple[Sequence[str], str]:
    """Returns the models that this one asks, and who says so: code in Python, or a parameter."""
    if config.backend != "python" and not config.parameters.get("calls"):
        return (), ""
    from carpool.backends.python.declarations import callees

    return callees(config, file)
