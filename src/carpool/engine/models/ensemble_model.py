"""One version of an ensemble: it has no instances and no queue, and is there when its steps are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol

from carpool.config.model import EnsembleStep
from carpool.config.triton_ensemble import step_at
from carpool.core.job import Reason
from carpool.core.objectives import Promise
from carpool.core.remaining import Step
from carpool.engine.models.journey import Binding, BoundStep, Journeys
from carpool.engine.models.served import Served
from carpool.engine.routes.direct_route import Spare
from carpool.engine.run.batch import Route
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import ConfigError, Unavailable
from carpool.link.step_memory import StepMemory
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.pipelines.ensemble_graph import EnsembleGraph, check_models
from carpool.types import Timing

if TYPE_CHECKING:
    from carpool.core.instance import DeviceTurn
    from carpool.engine.run.driver import Driver

_log = logger("engine")


class Models(Protocol):
    """All that is served, by name and version (-1: the newest): the key, the model and its route."""

    memory: StepMemory | None

    def step_row(self, name: str, version: str, step: str) -> Row:
        """Where a step of a pipeline is counted."""

    def find(self, name: str, version: int = -1) -> tuple[int, Served, Route] | None: ...


class Ensemble(Served):
    """Its steps are models of the same engine, which others may ask as well."""

    is_ensemble = True

    def __init__(self, *arguments: Any, fleet: Models, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._models = fleet
        self._journeys: Journeys | None = None
        self._turns: list[DeviceTurn] = []
        ensemble = self.config.ensemble
        self._listed: Sequence[EnsembleStep] = () if ensemble is None else ensemble.steps

    @property
    def driver(self) -> Driver:
        raise AssertionError(f"{self.name} runs nothing itself")

    @property
    def steps(self) -> Sequence[EnsembleStep]:
        return self._listed

    @property
    def journeys(self) -> Journeys:
        assert self._journeys is not None
        return self._journeys

    def route(self) -> Route:
        return self.journeys

    def spare_route(self) -> Spare:
        raise Unavailable(
            f"{self.name} is an ensemble: work that nobody waits for goes to models", reason="spare"
        )

    # ---- loading ----------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Its settings were checked when they were read; the rest can be told when its steps are there."""

    async def load(self, progress: Callable[[str], None] = lambda _: None) -> None:
        began = monotonic()
        progress("looking at its steps")
        self._loop = asyncio.get_running_loop()
        config = self.config
        self.signature = replace(signature_of(config), told=True)  # its steps are, if they want to know
        self.promises = isinstance(config.policy, Promise)
        assert config.ensemble is not None
        self._journeys = Journeys(
            self.name,
            EnsembleGraph(config),
            self.signature,
            self._bind,
            slo=self.slo,
            most=config.ensemble.max_inflight,
            memory=self._models.memory,
            answered=self._answered,
        )
        try:
            binding = self.journeys.binding
        except Unavailable as error:
            raise ConfigError(error.message, field="ensemble_scheduling.step") from None
        self.labels = self._labels_of(binding)
        self.choices = tuple(_words(config.ensemble.steps, binding, self.slo))
        self.row.set(columns.LOAD_SECONDS, monotonic() - began)
        _log.info("model-ready", model=self.name, version=self.version, seconds=round(monotonic() - began, 3))

    def _bind(self) -> Binding:
        """The models of its steps as they are now. Raises what is missing, or does not fit any more."""
        found = [self._found(number, step) for number, step in enumerate(self._listed)]
        check_models(self.config, [served.signature for _, served, _ in found])
        steps: list[BoundStep] = []
        leaves: list[Step] = []
        ends: dict[int, list[int]] = {}  # by step: the leaves that it ends with
        models: list[Served] = []
        for step in EnsembleGraph(self.config).steps:
            key, served, route = found[step.number]
            before = tuple(sorted(leaf for other in step.after for leaf in ends[other]))
            inner = self._leaves_of(served, route, before, len(leaves))
            steps.append(BoundStep(step, key, served, route, len(leaves)))
            follows = {number for leaf in inner for number in leaf.after}
            ends[step.number] = [n for n in range(len(leaves), len(leaves) + len(inner)) if n not in follows]
            leaves += inner
            models += [served, *(route.binding.models if isinstance(route, Journeys) else ())]
        binding = Binding(tuple(steps), tuple(leaves), tuple(models))
        if self.promises:
            self._order_turns(binding)
        return binding

    def _order_turns(self, binding: Binding | None) -> None:
        """Where steps share a device, the later one goes first, for as long as this is loaded."""
        own = {self.name}
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
        if not isinstance(route, Journeys):
            return [Step(served.driver.scheduler, before)]
        return [
            leaf._replace(after=tuple(first + number for number in leaf.after) or before)
            for leaf in route.binding.leaves
        ]

    def _found(self, number: int, step: EnsembleStep) -> tuple[int, Served, Route]:
        at = step_at(self.config, number)
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
            "is decoupled, and a step needs exactly one answer": config.decoupled,
            "takes sequences, and requests of a step belong to none": config.sequences,
            "is a pipeline, which only front ends run: no step can be one": config.pipeline,
            "runs in a process that only a server reaches": hosted and self._models.memory is None,
        }
        for why, given in unfit.items():
            if given:
                raise ConfigError(f"{at}: {step.model} {why}")
        return found

    def _labels_of(self, binding: Binding) -> Mapping[str, Sequence[str]]:
        """Of an output, those of the model that writes it."""
        written: dict[str, tuple[Served, str]] = {
            tensor: (bound.served, name) for bound in binding.steps for name, tensor in bound.step.outputs
        }
        found = {tensor: served.labels.get(name, ()) for tensor, (served, name) in written.items()}
        return {
            name: labels for name, labels in found.items() if labels and name in self.signature.output_named
        }

    # ---- while it serves --------------------------------------------------------------------------------

    def rebind(self) -> None:
        if self._journeys is not None:
            self._journeys.rebind()

    def holds(self, served: Served) -> bool:
        """One of its requests is on its way to this model."""
        return any(served in binding.models for binding in self._under_way())

    def _under_way(self) -> Iterable[Binding]:
        """The models of each request that it has."""
        return () if self._journeys is None else (one.binding for one in self._journeys.open.values())

    def _current(self) -> Binding | None:
        """None before it was loaded. Raises what is missing."""
        return None if self._journeys is None else self._journeys.binding

    @property
    def able(self) -> bool:
        """All of its steps are, and fit together."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        try:
            binding = self._current()
        except (Unavailable, ConfigError) as error:
            return error.message
        if binding is None:
            return "it is not loaded"
        found = (f"{one.name}, which it needs: {one.why_not}" for one in binding.models if not one.able)
        return next(found, "")

    def _made_of(self) -> Sequence[str]:
        """Its steps, as they are now: whoever keeps its answers has others when one of them is replaced."""
        try:
            binding = self._current()
        except (Unavailable, ConfigError):
            binding = None
        return [] if binding is None else [one.answers_digest() for one in binding.models]

    def look_at_instances(self) -> None:
        """It has none."""

    def refused_elsewhere(self, requests: int, reason: Reason, source: str) -> None:
        """It gives no advice that front ends could follow."""

    def _answered(self, images: int, timing: Timing) -> None:
        self.row.add_batch(
            images,
            [timing.queue],
            input_s=timing.input,
            infer_s=timing.infer,
            output_s=timing.output,
            ended_ms=time() * 1e3,
        )
        parts = (timing.input, timing.infer, timing.output)
        self.batches.add(images, *(round(seconds * 1e9) for seconds in parts))
        self.recent.add(images, sum(parts), monotonic())

    # ---- coming and going -------------------------------------------------------------------------------

    async def retire(self) -> None:
        await self._drained(None)
        self._order_turns(None)
        await self._close()

    async def unload(self, timeout: float) -> None:
        self.withdraw()
        self._close_gate(f"{self.name} is being unloaded")
        if not await self._drained(timeout):
            _log.warning("drain-timeout", model=self.name, waiting=len(list(self._under_way())))
        self._order_turns(None)
        await self._close()

    def _close_gate(self, why: str) -> None:
        if self._journeys is not None:
            self._journeys.closed = why

    async def _drained(self, timeout: float | None) -> bool:
        """Its requests are its steps' as well, which have alarms: looking now and then will do."""
        end = None if timeout is None else monotonic() + timeout
        while any(True for _ in self._under_way()):
            if end is not None and monotonic() >= end:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


_LOOK_S = 0.01


def _words(steps: Sequence[EnsembleStep], binding: Binding, slo: float) -> Iterator[str]:
    names = " → ".join(bound.step.model for bound in binding.steps)
    yield f"{len(steps)} steps, in an order that works: {names}."
    if slo < float("inf"):
        yield (
            f"One promise of {slo * 1e3:g} ms for all of them: each step plans with what is left of it after "
            "the later ones, which is learned."
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
