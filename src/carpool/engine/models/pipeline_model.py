"""One version of a pipeline over pictures: the engine's part of it.

Its requests come step by step from the front end that has the picture (frontend/pictures/pipeline_run.py
says why). Here is what only the engine can know: whether all steps together can be in time, how much of the
promise each has to leave to the later ones, and what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from carpool.config.model import EnsembleStep, Task
from carpool.config.pipeline_settings import WITHOUT
from carpool.core.job import GONE, INFINITY, Job
from carpool.core.objectives import Promise
from carpool.core.refusal_words import turned_away
from carpool.core.remaining import Remaining, Step, Trip
from carpool.engine.models.ensemble_model import Ensemble
from carpool.engine.models.journey import Binding
from carpool.engine.models.served import Served
from carpool.engine.profile.model_profile import cannot_keep, grown
from carpool.engine.run.batch import Outcome, Route, Work
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import ConfigError, Unavailable, Unsupported
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.pipelines.picture_graph import PictureGraph, StepFacts
from carpool.types import StepTiming

if TYPE_CHECKING:
    from carpool.engine.models.pipeline_trips import OpenTrip

_log = logger("engine")
_FEW = "a picture with a few crops"


class _NoTensors:
    """The route of what only front ends can take apart."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, works: Sequence[Work]) -> None:
        why = f"{self._name} is a pipeline over pictures: only the front ends of a server can run it"
        for work in works:
            work.state = GONE
            work.done(work, Outcome(error=Unsupported(why)))

    def ready(self, work: Work) -> None:
        """Nothing is ever taken."""

    def cancel(self, work: Work) -> None:
        """Nothing is ever taken."""


class Pipeline(Ensemble):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        assert self.config.pipeline is not None
        self.settings = self.config.pipeline
        self.graph = PictureGraph(self.settings)
        self._listed = [EnsembleStep(step.model, step.version, (), ()) for step in self.settings.steps]
        self.place = {number: place for place, number in enumerate(self.graph.order)}
        self.open: set[OpenTrip] = set()
        self.closed = ""  # why nobody is let in any more
        self.waiting: dict[tuple[int, str], OpenTrip] = {}  # by step and live source: who came there last
        self.rows: list[Row] = []  # by step
        self._task = ""
        self._binding: Binding | None = None
        self._remaining: Remaining | None = None

    def route(self) -> Route:
        return _NoTensors(self.name)

    def picture_document(self) -> Mapping[str, Any]:
        known = {"task": self._task, "input": {"name": self.signature.inputs[0].name}, "encoded": False}
        return {**known, "pipeline": {**asdict(self.settings), "file": ""}}

    # ---- loading ----------------------------------------------------------------------------------------

    async def load(self, progress: Callable[[str], None] = lambda _: None) -> None:
        began = monotonic()
        progress("looking at its steps")
        self._loop = asyncio.get_running_loop()
        self.signature = signature_of(self.config)
        self.promises = isinstance(self.config.policy, Promise)
        self.rows = [
            self._models.step_row(self.name, self.version, step.name) for step in self.settings.steps
        ]
        try:
            binding = self.binding
        except Unavailable as error:
            raise ConfigError(error.message, field="step") from None
        vision = binding.models[self.place[self.graph.base]].vision
        assert vision is not None  # `check` saw to it
        placed = [binding.models[self.place[number]] for number in range(len(self.place))]
        reads = self.graph.reader([_facts(served).task for served in placed]) is not None
        self._task = str(Task.READ if reads else vision.task)
        listed = [self.settings.steps[number] for number in self.graph.order]
        words = " → ".join(f"{step.name} ({step.model})" for step in listed)
        self.choices = (f"{len(listed)} steps: {words}.", *self._grown())
        self.row.set(columns.LOAD_SECONDS, monotonic() - began)
        _log.info("model-ready", model=self.name, version=self.version, seconds=round(monotonic() - began, 3))

    def _grown(self) -> list[str]:
        """What becomes of the promise here, in words: it grows where it may, and is warned of where it cannot
        be kept. That is a forecast, so the pipeline is served all the same."""
        assert self._remaining is not None
        alone = self._remaining.alone()
        if self.config.slo_may_grow:
            busy = any(step.profile is not None and step.profile.provisional for step in self.binding.models)
            self.config, said = grown(self.config, alone, _FEW, provisional=busy)
            if said:
                _log.debug("choice", model=self.name, why=said)
        else:
            said = cannot_keep(self.name, self.slo, alone, _FEW)
            if said:
                _log.warning("slo-too-short", model=self.name, why=said)
        return [said] if said else []

    @property
    def binding(self) -> Binding:
        """The models as they are now; what is missing is raised."""
        if self._binding is None:
            self._binding = binding = self._bind()
            known = self._remaining
            schedulers = [leaf.scheduler for leaf in binding.leaves]
            if known is None or [step.scheduler for step in known.steps] != schedulers:
                self._remaining = Remaining(binding.leaves)
        return self._binding

    def _bind(self) -> Binding:
        """Its steps stand in an order in which each comes after the one that it waits for."""
        found = [self._found(number, step)[1] for number, step in enumerate(self._listed)]
        self.graph.check([_facts(served) for served in found])
        leaves: list[Step] = []
        for number in self.graph.order:
            after = self.graph.after[number]
            scheduler, images = found[number].driver.scheduler, self.graph.usual_images(number)
            before = () if after is None else (self.place[after],)
            leaves.append(Step(scheduler, before, images, self.graph.optional(number)))
        binding = Binding((), tuple(leaves), tuple(found[number] for number in self.graph.order))
        if self.promises:
            self._order_turns(binding)
        return binding

    # ---- while it serves --------------------------------------------------------------------------------

    def rebind(self) -> None:
        self._binding = None

    def _current(self) -> Binding | None:
        return self.binding if self._task else None

    def _under_way(self) -> Iterable[Binding]:
        return [trip.binding for trip in self.open]

    def _close_gate(self, why: str) -> None:
        self.closed = why

    def lets_in(self, work: Work, now: float) -> Trip:
        """Raises what the gate says to a request whose first step this is; from here on its deadline is that
        of the whole. With `if_late = "without"` the first step alone has to be in time."""
        if self.closed:
            raise Unavailable(self.closed, reason="unloading")
        binding, remaining = self.binding, self._remaining
        assert remaining is not None
        work.deadline = min(work.deadline, work.arrived + self.slo)
        if self.slo == INFINITY:
            return remaining.enters()
        probe, alone = False, self.settings.if_late == WITHOUT
        for number, leaf in enumerate(binding.leaves):
            if leaf.after:
                continue
            job = Job(work.arrived, work.deadline, 1, None, work.priority, work.source, outside=work.outside)
            refusal = remaining.refuses(number, job, self.slo, now, alone=alone)
            if refusal is not None:
                raise turned_away(self.name, work, refusal, knobs=False)
            probe = probe or job.probe
        return remaining.enters(self.slo, work.deadline, probe=probe)

    def answered(self, timing: StepTiming) -> None:
        self._answered(1, timing)

    def show_later(self, step: int, seconds: float) -> None:
        """What a request in this step left to the later ones, just now."""
        self.rows[step].set(columns.STEP_LATER, seconds)


def _facts(served: Served) -> StepFacts:
    """Of a model as a step."""
    vision = served.vision
    if vision is None:
        return StepFacts(None, runs_nothing=served.is_ensemble)
    return StepFacts(str(vision.task), vision.sides, labels=vision.labels)
