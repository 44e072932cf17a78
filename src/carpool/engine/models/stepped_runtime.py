"""Runs what is made of several models: no instances and no queue, but the models that are its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from carpool.config.asked_extensions import asked_extensions
from carpool.config.model import ModelStep
from carpool.config.repository import ModelVersion
from carpool.core.job import INFINITY
from carpool.core.remaining import Step
from carpool.engine.models.runtime import EngineParts
from carpool.engine.models.served import Runtime, Served
from carpool.engine.routes.stepped_route import Binding, Stepped
from carpool.engine.run.batch import Route
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from carpool.core.instance import DeviceTurn

SteppedT = TypeVar("SteppedT", bound=Stepped)


class SteppedRuntime(Runtime, Generic[SteppedT]):
    """The steps are models of the same engine, which others may ask as well."""

    _field: str  # where its settings list its steps

    def __init__(self, served: Served, _version: ModelVersion, parts: EngineParts) -> None:
        super().__init__(served)
        self._models = parts.models
        self._stepped: SteppedT | None = None
        self._turns: list[DeviceTurn] = []
        self.steps = served.config.steps

    @property
    def stepped(self) -> SteppedT:
        assert self._stepped is not None
        return self._stepped

    def route(self) -> Route:
        return self.stepped

    # ---- loading ----------------------------------------------------------------------------------------

    async def load(self, progress: Callable[[str], None]) -> None:
        progress("looking at its steps")
        served = self.served
        served.signature = signature_of(served.config)
        self._stepped = route = self._made_route()
        try:
            binding = route.binding
        except Unavailable as error:
            raise ConfigError(error.message, field=self._field) from None
        served.choices = tuple(self._bound(binding))
        route.slo = served.slo

    def _made_route(self) -> SteppedT:
        raise NotImplementedError

    def _bound(self, binding: Binding, /) -> Iterable[str]:
        """Returns what is known with its models, in words."""
        raise NotImplementedError

    def _order_turns(self, binding: Binding | None) -> None:
        """Where steps share a device, the later one goes first, for as long as this is loaded."""
        own = {self.served.name}
        for turn in self._turns:
            turn.step_of -= own
            turn.cheap_of, turn.big_of = turn.cheap_of - own, turn.big_of - own
        self._turns = []
        depths: list[int] = []
        for leaf in binding.leaves if binding is not None else ():
            depths.append(max((depths[before] + 1 for before in leaf.after), default=0))
            for instance in leaf.scheduler.instances:
                if instance.turn is not None and instance.turn not in self._turns:
                    instance.turn.step_of |= own
                    instance.turn.step = max(instance.turn.step, depths[-1])
                    self._turns.append(instance.turn)
            if leaf.optional and binding is not None:
                _mark_optional(own, leaf, binding.leaves)

    def _found(self, step: ModelStep) -> tuple[int, Served, Route]:
        at = step.at
        found = self._models.find(step.model, step.version)
        if found is None and step.version != -1:
            at = at.replace("model_name", "model_version")
            raise Unavailable(
                f"{at}: version {step.version} of {step.model} is not loaded", reason="not-ready"
            )
        if found is None:
            raise Unavailable(f"{at}: {step.model} is not loaded", reason="not-ready")
        config, hosted = found[1].config, found[1].hosted
        unfit = [one.no_step for one in asked_extensions(config) if one.no_step]
        if hosted and self._models.memory is None:
            unfit.insert(0, "runs in a process that only a server reaches")
        if unfit:
            raise ConfigError(f"{at}: {step.model} {unfit[-1]}")
        return found

    # ---- while it serves --------------------------------------------------------------------------------

    def rebind(self) -> None:
        if self._stepped is not None:
            self._stepped.rebind()

    def holds(self, served: Served) -> bool:
        """One of its requests is on its way to this model."""
        return self._stepped is not None and any(
            served in run.binding.models for run in self._stepped.under_way
        )

    def _current(self) -> Binding | None:
        """Returns the binding, or None before it was loaded. Raises what is missing."""
        return None if self._stepped is None else self._stepped.binding

    @property
    def why_not(self) -> str:
        """Its steps have to be there, able, and fit together."""
        try:
            binding = self._current()
        except (Unavailable, ConfigError) as error:
            return error.message
        if binding is None:
            return "it is not loaded"
        found = (f"{one.name}, which it needs: {one.why_not}" for one in binding.models if not one.able)
        return next(found, "")

    def made_of(self) -> Sequence[str]:
        """Returns the digests of its current steps: cached answers are stale when a step is replaced."""
        try:
            binding = self._current()
        except (Unavailable, ConfigError):
            binding = None
        return [] if binding is None else [one.answers_digest() for one in binding.models]

    # ---- the end ----------------------------------------------------------------------------------------

    async def finish(self, timeout: float | None) -> int | None:
        """Its requests are its steps' as well, which have alarms: looking now and then will do."""
        if self._stepped is None:
            return None
        if timeout is not None:
            self._stepped.closed = f"{self.served.name} is being unloaded"
        end = INFINITY if timeout is None else monotonic() + timeout
        while self._stepped.under_way:
            if monotonic() >= end:
                return len(self._stepped.under_way)
            await asyncio.sleep(_LOOK_S)
        return None

    async def close(self) -> None:
        self._order_turns(None)


_LOOK_S = 0.01


def _mark_optional(name: set[str], big: Step, leaves: Sequence[Step]) -> None:
    """Marks a step that requests may be answered without. Where it shares a device with the step before it,
    that one goes first when it has to."""
    for instance in big.scheduler.instances:
        if instance.turn is not None:
            instance.turn.big_of |= name
    for before in big.after:
        for instance in leaves[before].scheduler.instances:
            if instance.turn is not None:
                instance.turn.cheap_of |= name
