"""Which models an ensemble needs: they load before it, keep its promise, and do not go without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from carpool.config import rules
from carpool.config.model import EnsembleSettings, Mode, ModelConfig
from carpool.config.repository import read_place
from carpool.config.triton_ensemble import circle
from carpool.core.policy import Promise
from carpool.engine.models.ensemble_model import Ensemble
from carpool.errors import CarpoolError, ConfigError

if TYPE_CHECKING:
    from carpool.engine.models.control import ModelControl, ModelState


class EnsembleSteps:
    def __init__(self, control: ModelControl) -> None:
        self._control = control
        self._promised: dict[str, float] = {}  # by step: seconds, of ensembles that have it

    def expect(self, configs: Iterable[ModelConfig]) -> None:
        """Of those that are about to be loaded: what an ensemble promises, its steps have to keep."""
        for config in configs:
            if config.ensemble is not None and isinstance(config.policy, Promise):
                for step in config.ensemble.steps:
                    self._promised[step.model] = max(config.policy.slo, self._promised.get(step.model, 0.0))

    def promised(self, config: ModelConfig) -> float | None:
        """Seconds, for a step that says nothing itself about when its batches leave."""
        return self._promised.get(config.name) if config.mode is Mode.EAGER and not config.ensemble else None

    async def load(self, config: ModelConfig, ensemble: EnsembleSettings) -> None:
        """Before the ensemble itself, and only those that are not there."""
        known = await asyncio.to_thread(self._below, config)
        circular = circle(config.name, known)
        if circular is not None:
            raise circular
        self.expect([config])
        for number, step in enumerate(ensemble.steps):
            at = f"{config.name}: ensemble_scheduling.step[{number}].model_name"
            model = self._control.models.get(step.model)
            if model is None:
                there = rules.nearest(step.model, self._control.models)
                raise ConfigError(f"{at}: there is no model {rules.shown(step.model)}; {there}", field=at)
            under_way = self._control.under_way.get(step.model)
            if not model.serving and under_way is not None:
                await asyncio.wait([under_way])
            elif not model.serving:
                with suppress(CarpoolError):  # the index has it
                    await self._control.load(step.model)
            if not model.serving:
                why = next((line.reason for line in model.lines(()) if line.reason), "")
                raise ConfigError(f"{at}: {step.model} is not loaded{why and ': '}{why}", field=at)

    def _below(self, config: ModelConfig) -> dict[str, EnsembleSettings | None]:
        """Of the ensembles that it needs, and those that they need, as their settings are now."""
        found = {config.name: config.ensemble}
        waiting = [config.ensemble]
        while waiting:
            settings = waiting.pop()
            for step in settings.steps if settings is not None else ():
                model = self._control.models.get(step.model)
                if step.model in found or model is None or not model.places:
                    continue
                try:
                    below = read_place(model.places[0])[0].config.ensemble
                except CarpoolError:
                    below = None  # its own load says what is wrong
                found[step.model] = below
                waiting.append(below)
        return found

    def of(self, name: str) -> list[str]:
        model = self._control.models.get(name)
        serving = () if model is None else model.serving.values()
        steps = [step.model for one in serving if isinstance(one, Ensemble) for step in one.steps]
        return list(dict.fromkeys(steps))

    def needing(self, name: str) -> list[ModelState]:
        """The ensembles that have it as a step, and those that have these, the outermost first."""
        found: list[ModelState] = []
        for model in self._control.models.values():
            if name in self.of(model.name):
                found = [*self.needing(model.name), model, *found]
        return list(dict.fromkeys(found))
