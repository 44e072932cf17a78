"""Loading, replacing and unloading models while others, and their own older versions, serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carpool.config import rules
from carpool.config.backend_kinds import kind_of
from carpool.config.model import EnsembleSettings, Mode, ModelConfig
from carpool.config.repository import Fingerprint, ModelVersion, find_places, read_place
from carpool.config.triton_ensemble import circle
from carpool.core.policy import Promise
from carpool.engine.models.candidate import (
    Candidate,
    Override,
    as_known,
    fingerprint_of,
    read_candidate,
)
from carpool.engine.models.ensemble_model import Ensemble
from carpool.engine.models.fleet import Fleet
from carpool.engine.models.served import Served, State
from carpool.errors import CarpoolError, ConfigError, InvalidInput, NotFound, Unavailable
from carpool.link.door import UNLOADED, IndexEntry
from carpool.observe.logs import logger

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


class Checks:
    """Of models that are loaded together: what is wrong with any of them is told before anything slow."""

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
        """This one is in order; wait for the others."""
        asyncio.get_running_loop().call_soon(self.passed, name)  # later: who comes last may not go first
        await self._begin[name]


class ModelControl:
    """Models load side by side; what is asked of one model happens in its order."""

    def __init__(
        self, paths: Sequence[Path], fleet: Fleet, with_promise: Callable[[ModelConfig], ModelConfig]
    ) -> None:
        self._paths = paths
        self._fleet = fleet
        self._with_promise = with_promise
        self._models: dict[str, ModelState] = {}
        self._few = asyncio.Semaphore(max(2, len(os.sched_getaffinity(0))))  # more would only share the cores
        self._in_the_runner = asyncio.Lock()  # what captures work on a GPU must be alone with it
        self._last: dict[str, asyncio.Task[None]] = {}  # by model: what was asked last and is not over
        self._unbegun: dict[str, asyncio.Task[None]] = {}  # by model: a plain load that others may share
        self.closed = False
        self._promised: dict[str, float] = {}  # by step: seconds, of ensembles that have it

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
            raise InvalidInput("a model that comes as files needs its settings too", field="config")
        task = self._unbegun.get(name) if override is None else None
        if task is None:
            task = self._follow(name, lambda: self._load_checked(name, override, progress, checks))
            if override is None:
                self._unbegun[name] = task
        await _outcome(task)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Stop offering a model, if it is loaded; it is freed when its last rider has left. So are ensembles
        that need it. With `dependents`, and if it is an ensemble, its steps too, unless others need them."""
        steps = self._steps_of(name) if dependents else ()
        await _outcome(self._follow(name, lambda: self._unload(name)))
        for step in steps:
            if not self._needing(step):
                await self.unload(step, dependents=True)

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

    async def _load_checked(
        self, name: str, override: Override | None, progress: Progress, checks: Checks | None
    ) -> None:
        if self._unbegun.get(name) is asyncio.current_task():
            del self._unbegun[name]
        checks = checks or Checks([name])
        try:
            model = await self._model_to_load(name, override)
            try:
                await self._load(model, override, progress, checks)
            except CarpoolError as error:
                log.error("model-not-loaded", model=name, error=error.message)
                raise
            finally:
                model.loading = ()
                self._fleet.changed()
        finally:
            checks.passed(name)

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

    async def _load(
        self, model: ModelState, override: Override | None, progress: Progress, checks: Checks
    ) -> None:
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
            await self._bring_in(model, found, progress, checks)
        finally:
            await asyncio.to_thread(found.close)
        config = None if override is None or override.files else override.config
        model.kept = None if config is None else KeptConfig(config, files)

    async def _bring_in(
        self, model: ModelState, found: Candidate, progress: Progress, checks: Checks
    ) -> None:
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
        new = await self._load_all(model, found, fresh, progress, checks)
        # Nothing is waited for from here on: between two requests, all of it changes at once.
        going = [served for number, served in model.serving.items() if kept.get(number) is not served]
        for served in kept.values():
            served.config = replace(served.config, versions=found.source.config.versions)
        model.loading = ()
        model.now_serves({**kept, **{int(served.version): served for served in new}})
        self._fleet.swap(new, going)

    async def _load_all(
        self,
        model: ModelState,
        found: Candidate,
        fresh: Sequence[ModelVersion],
        progress: Progress,
        checks: Checks,
    ) -> list[Served]:
        """All of them, or none and the reason."""
        new: list[Served] = []
        at_fault: list[int] = []
        config = found.source.config
        in_the_runner = kind_of(config.backend).process == "runner"
        try:
            for version in fresh:
                at_fault = [version.number]
                new.append(self._fleet.build(config, version, found.identity(version), found.upload))
                async with self._few:
                    await new[-1].check()
            await checks.of_all(model.name)
            if config.ensemble is not None:
                await self._load_steps(config, config.ensemble)
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

    # ---- ensembles --------------------------------------------------------------------------------------

    def expect(self, configs: Iterable[ModelConfig]) -> None:
        """Of those that are about to be loaded: what an ensemble promises, its steps have to keep."""
        for config in configs:
            if config.ensemble is not None and isinstance(config.policy, Promise):
                for step in config.ensemble.steps:
                    self._promised[step.model] = max(config.policy.slo, self._promised.get(step.model, 0.0))

    def promised(self, config: ModelConfig) -> float | None:
        """Seconds, for a step that says nothing itself about when its batches leave."""
        return self._promised.get(config.name) if config.mode is Mode.EAGER and not config.ensemble else None

    async def _load_steps(self, config: ModelConfig, ensemble: EnsembleSettings) -> None:
        """Before the ensemble itself, and only those that are not there."""
        known = await asyncio.to_thread(self._ensembles_below, config)
        circular = circle(config.name, known)
        if circular is not None:
            raise circular
        self.expect([config])
        for number, step in enumerate(ensemble.steps):
            at = f"{config.name}: ensemble_scheduling.step[{number}].model_name"
            model = self._models.get(step.model)
            if model is None:
                there = rules.nearest(step.model, self._models)
                raise ConfigError(f"{at}: there is no model {rules.shown(step.model)}; {there}", field=at)
            under_way = self._last.get(step.model)
            if not model.serving and under_way is not None:
                await asyncio.wait([under_way])
            elif not model.serving:
                with suppress(CarpoolError):  # the index has it
                    await self.load(step.model)
            if not model.serving:
                why = next((line.reason for line in model.lines(()) if line.reason), "")
                raise ConfigError(f"{at}: {step.model} is not loaded{why and ': '}{why}", field=at)

    def _ensembles_below(self, config: ModelConfig) -> dict[str, EnsembleSettings | None]:
        """Of the ensembles that it needs, and those that they need, as their settings are now."""
        found = {config.name: config.ensemble}
        waiting = [config.ensemble]
        while waiting:
            settings = waiting.pop()
            for step in settings.steps if settings is not None else ():
                model = self._models.get(step.model)
                if step.model in found or model is None or not model.places:
                    continue
                try:
                    below = read_place(model.places[0])[0].config.ensemble
                except CarpoolError:
                    below = None  # its own load says what is wrong
                found[step.model] = below
                waiting.append(below)
        return found

    def _steps_of(self, name: str) -> list[str]:
        model = self._models.get(name)
        serving = () if model is None else model.serving.values()
        steps = [step.model for one in serving if isinstance(one, Ensemble) for step in one.steps]
        return list(dict.fromkeys(steps))

    def _needing(self, name: str) -> list[ModelState]:
        """The ensembles that have it as a step, and those that have these, the outermost first."""
        found: list[ModelState] = []
        for model in self._models.values():
            if name in self._steps_of(model.name):
                found = [*self._needing(model.name), model, *found]
        return list(dict.fromkeys(found))

    # ---- unloading --------------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        if name not in self._models:
            await self.find()
        model = self._models.get(name)
        if model is None:
            raise self.unknown(name)
        going: list[Served] = []
        for one in (*self._needing(name), model):  # who needs it first: nobody is offered without its steps
            going += one.serving.values()
            one.now_serves({})
            if one is not model:
                one.failed(f"{name}, which it needs, was unloaded")
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
