"""Which models an ensemble needs: they load before it, keep its promise, and do not go without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from carpool.config import rules
from carpool.config.model import Mode, ModelConfig
from carpool.config.repository import read_place
from carpool.core.objectives import Promise
from carpool.engine.fleet.model_state import ModelState
from carpool.errors import CarpoolError, ConfigError


class StepPromise(NamedTuple):
    """Describes what an ensemble or a pipeline promises, in seconds."""

    slo: float
    may_grow: bool


class LoadsModels(Protocol):
    """Defines what loads the models of a repository, by name."""

    @property
    def models(self) -> Mapping[str, ModelState]: ...

    @property
    def under_way(self) -> Mapping[str, asyncio.Task[Any]]:
        """Returns the loads that have not ended."""

    async def load(self, name: str, /) -> object: ...


class NeededModels:
    def __init__(self, control: LoadsModels) -> None:
        self._control = control
        self._promised: dict[str, dict[str, StepPromise]] = {}  # by step, and by the ensemble that has it

    def expect(self, configs: Iterable[ModelConfig]) -> None:
        """Notes what an ensemble that is about to be loaded promises, which its steps have to keep."""
        for config in configs:
            if isinstance(config.policy, Promise):
                promise = StepPromise(config.policy.slo, config.slo_may_grow)
                for step in config.needs:
                    self._promised.setdefault(step, {})[config.name] = promise

    def promised(self, config: ModelConfig) -> StepPromise | None:
        """Returns the longest promise, for a step whose settings do not say when its batches leave. It may
        grow if the promise of every model with this step may."""
        if config.mode is not Mode.EAGER or config.needs or config.name not in self._promised:
            return None
        promises = self._promised[config.name].values()
        return StepPromise(max(one.slo for one in promises), all(one.may_grow for one in promises))

    async def load(self, config: ModelConfig) -> None:
        """Loads the steps before the ensemble or the pipeline itself, and only those that are not there."""
        known = await asyncio.to_thread(self._below, config)
        circular = _circle(config.name, known)
        if circular is not None:
            raise circular
        self.expect([config])
        for needed in config.steps:
            step, at = needed.model, needed.at
            model = self._control.models.get(step)
            if model is None:
                there = rules.nearest(step, self._control.models)
                raise ConfigError(f"{at}: there is no model {rules.shown(step)}; {there}", field=_field(at))
            under_way = self._control.under_way.get(step)
            if not model.serving and under_way is not None:
                await asyncio.wait([under_way])
            elif not model.serving:
                with suppress(CarpoolError):  # the index has it
                    await self._control.load(step)
            if not model.serving:
                why = next((line.reason for line in model.lines(()) if line.reason), "")
                raise ConfigError(f"{at}: {step} is not loaded{why and ': '}{why}", field=_field(at))

    def _below(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Returns what the models that it needs need, and so on, as their settings are now."""
        found = {config.name: config.needs}
        waiting = list(config.needs)
        while waiting:
            model = self._control.models.get(name := waiting.pop())
            if name in found or model is None or not model.places:
                continue
            try:
                found[name] = read_place(model.places[0])[0].config.needs
            except CarpoolError:
                found[name] = ()  # its own load says what is wrong
            waiting += found[name]
        return found

    def of(self, name: str) -> list[str]:
        model = self._control.models.get(name)
        serving = () if model is None else model.serving.values()
        return list(dict.fromkeys(step for one in serving for step in one.config.needs))

    def needing(self, name: str) -> list[ModelState]:
        """Returns the ensembles that have it as a step, and those that have these, the outermost first."""
        found: list[ModelState] = []
        for model in self._control.models.values():
            if name in self.of(model.name):
                found = [*self.needing(model.name), model, *found]
        return list(dict.fromkeys(found))


def _circle(name: str, steps_of: Mapping[str, Sequence[str]]) -> ConfigError | None:
    """Returns what is wrong with an ensemble that needs itself, by way of the others that are known."""
    chain: list[str] = [name]
    seen: set[str] = set()

    def look(at: str) -> bool:
        for step in steps_of.get(at, ()):
            if step == name:
                return True
            if step not in seen:
                seen.add(step)
                chain.append(step)
                if look(step):
                    return True
                chain.pop()
        return False

    if not look(name):
        return None
    way = " → ".join((*chain, name))
    why = f"ensembles cannot need each other: {way}"
    return ConfigError(f"{name}: ensemble_scheduling.step.model_name: {why}", field="ensemble_scheduling")


def _field(at: str) -> str:
    """Returns the field without the file."""
    return at.rpartition(": ")[2]
