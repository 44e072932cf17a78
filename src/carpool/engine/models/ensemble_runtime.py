"""Runs an ensemble: no instances and no queue, but the models that are its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from carpool.config.model import EnsembleStep
from carpool.config.triton_ensemble import step_at
from carpool.core.job import INFINITY
from carpool.core.remaining import Step
from carpool.engine.models.runtime import Runtime
from carpool.engine.models.served import Served
from carpool.engine.routes.ensemble_route import EnsembleRoute
from carpool.engine.routes.pipeline_route import PipelineRoute
from carpool.engine.routes.stepped_route import Binding, BoundStep, ServedStep
from carpool.engine.run.batch import Route
from carpool.engine.run.model_inputs import signature_of
from carpool.engine.run.step_memory import StepMemory
from carpool.errors import ConfigError, Unavailable
from carpool.observe.counters import Row
from carpool.pipelines.ensemble_graph import EnsembleGraph, check_models

if TYPE_CHECKING:
    from carpool.core.instance import DeviceTurn

Stepped: TypeAlias = EnsembleRoute | PipelineRoute
"""The route of what is made of several models."""


class Models(Protocol):
    """Finds all that is served, by name and version (-1: the newest): the key, the model and its route."""

    memory: StepMemory | None

    def step_row(self, name: str, version: str, step: str) -> Row:
        """Returns where a step of a pipeline is counted."""

    def find(self, name: str, version: int = -1) -> tuple[int, Served, Route] | None: ...


class EnsembleRuntime(Runtime):
    """The steps are models of the same engine, which others may ask as well."""

    _field = "ensemble_scheduling.step"  # where its settings list its steps

    def __init__(self, served: Served, models: Models) -> None:
        super().__init__(served)
        self._models = models
        self._stepped: Stepped | None = None
        self._turns: list[DeviceTurn] = []
        self.steps = self._listed()

    def _listed(self) -> Sequence[EnsembleStep]:
        return () if self.served.config.ensemble is None else self.served.config.ensemble.steps

    @property
    def stepped(self) -> Stepped:
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

    def _made_route(self) -> Stepped:
        served, config = self.served, self.served.config
        served.signature = replace(served.signature, told=True)  # its steps are, if they want to know
        assert config.ensemble is not None
        return EnsembleRoute(
            served.name,
            EnsembleGraph(config),
            served.signature,
            self._bind,
            served.counters.answered,
            most=config.ensemble.max_inflight,
            memory=self._models.memory,
        )

    def _bound(self, binding: Binding, /) -> Iterable[str]:
        """Returns what is known with its models, in words."""
        self.served.labels = self._labels_of(binding)
        return _words(self.steps, binding, self.served.slo)

    def _bind(self) -> Binding:
        """Returns the models of its steps as they are now. Raises what is missing, or does not fit any
        more."""
        found = [self._found(number, step) for number, step in enumerate(self.steps)]
        check_models(self.served.config, [served.signature for _, served, _ in found])
        steps: list[BoundStep] = []
        leaves: list[Step] = []
        ends: dict[int, list[int]] = {}  # by step: the leaves that it ends with
        models: list[ServedStep] = []
        for step in EnsembleGraph(self.served.config).steps:
            key, served, route = found[step.number]
            before = tuple(sorted(leaf for other in step.after for leaf in ends[other]))
            inner = self._leaves_of(served, route, before, len(leaves))
            steps.append(BoundStep(step, key, served, route, len(leaves)))
            follows = {number for leaf in inner for number in leaf.after}
            ends[step.number] = [n for n in range(len(leaves), len(leaves) + len(inner)) if n not in follows]
            leaves += inner
            models += [served, *(route.binding.models if isinstance(route, EnsembleRoute) else ())]
        binding = Binding(tuple(leaves), tuple(models), tuple(steps))
        if self.served.promises:
            self._order_turns(binding)
        return binding

    def _order_turns(self, binding: Binding | None) -> None:
        """Where steps share a device, the later one goes first, for as long as this is loaded."""
        own = {self.served.name}
        for turn in self._turns:
            turn.pipelines -= own
            turn.cheap_of, turn.big_of = turn.cheap_of - own, turn.big_of - own
        self._turns = []
        depths: list[int] = []
        for leaf in binding.leaves if binding is not None else ():
            depths.append(max((depths[before] + 1 for before in leaf.after), default=0))
            for instance in leaf.scheduler.instances:
                if instance.turn is not None and instance.turn not in self._turns:
                    instance.turn.pipelines |= own
                    instance.turn.step = max(instance.turn.step, depths[-1])
                    self._turns.append(instance.turn)
            if leaf.optional and binding is not None:
                _mark_cascade(own, leaf, binding.leaves)

    @staticmethod
    def _leaves_of(served: Served, route: Route, before: tuple[int, ...], first: int) -> list[Step]:
        if not isinstance(route, EnsembleRoute):
            assert served.scheduler is not None  # only ensembles and what writes have none
            return [Step(served.scheduler, before)]
        return [
            leaf._replace(after=tuple(first + number for number in leaf.after) or before)
            for leaf in route.binding.leaves
        ]

    def _found(self, number: int, step: EnsembleStep) -> tuple[int, Served, Route]:
        at = step_at(self.served.config, number)
        found = self._models.find(step.model, step.version)
        if found is None and step.version != -1:
            at = at.replace("model_name", "model_version")
            raise Unavailable(
                f"{at}: version {step.version} of {step.model} is not loaded", reason="not-ready"
            )
        if found is None:
            raise Unavailable(f"{at}: {step.model} is not loaded", reason="not-ready")
        config, hosted = found[1].config, found[1].hosted
        unfit = {
            "writes token by token, and no step does that": found[1].writes,
            "is decoupled, and a step needs exactly one response": config.decoupled,
            "takes sequences, and requests of a step belong to none": config.sequences,
            "is a pipeline, which only front ends run: no step can be one": config.pipeline,
            "runs in a process that only a server reaches": hosted and self._models.memory is None,
        }
        for why, given in unfit.items():
            if given:
                raise ConfigError(f"{at}: {step.model} {why}")
        return found

    def _labels_of(self, binding: Binding) -> Mapping[str, Sequence[str]]:
        """Returns the labels of an output: those of the model that writes it."""
        written: dict[str, tuple[ServedStep, str]] = {
            tensor: (bound.served, name) for bound in binding.steps for name, tensor in bound.step.outputs
        }
        found = {tensor: served.labels.get(name, ()) for tensor, (served, name) in written.items()}
        named = self.served.signature.output_named
        return {name: labels for name, labels in found.items() if labels and name in named}

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
        """Its steps, as they are now: whoever keeps its answers has others when one of them is replaced."""
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


def _words(steps: Sequence[EnsembleStep], binding: Binding, slo: float) -> Iterator[str]:
    names = " → ".join(bound.step.model for bound in binding.steps)
    yield f"{len(steps)} steps, in an order that works: {names}."
    if slo < float("inf"):
        yield (
            f"One SLO of {slo * 1e3:g} ms for all steps: each step plans with what the later ones leave of "
            "it, which is learned."
        )


def _mark_cascade(name: set[str], big: Step, leaves: Sequence[Step]) -> None:
    """Where they share a device, the cheap model goes first when it has to: what waits for the other can do
    without it."""
    for instance in big.scheduler.instances:
        if instance.turn is not None:
            instance.turn.big_of |= name
    for before in big.after:
        for instance in leaves[before].scheduler.instances:
            if instance.turn is not None:
                instance.turn.cheap_of |= name
