"""What runs a pipeline over pictures: an ensemble whose requests come step by step from the front end
that has the picture (pipeline_run.py says why)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.config.model import Task
from carpool.config.repository import ModelVersion
from carpool.core.remaining import Step
from carpool.engine.models.runtime import EngineParts
from carpool.engine.models.served import OpensGroups, Served
from carpool.engine.models.stepped_runtime import SteppedRuntime
from carpool.engine.profile.model_profile import cannot_keep, grown
from carpool.engine.routes.stepped_route import Binding
from carpool.extensions.pipelines.picture_graph import PictureGraph, StepFacts
from carpool.extensions.pipelines.pipeline_route import PipelineRoute
from carpool.extensions.pipelines.settings import pipeline_settings
from carpool.observe.logs import logger

_log = logger("engine")
_FEW = "an image with a few crops"


class PipelineRuntime(SteppedRuntime[PipelineRoute]):
    _field = "step"

    def __init__(self, served: Served, version: ModelVersion, parts: EngineParts) -> None:
        super().__init__(served, version, parts)
        settings = pipeline_settings(served.config)
        assert settings is not None
        self.graph = PictureGraph(settings)
        self.rows = [step.name for step in settings.steps]
        self._now: Sequence[Served] = ()  # the models of its steps

    # ---- loading ----------------------------------------------------------------------------------------

    def _made_route(self) -> PipelineRoute:
        name, version = self.served.name, self.served.version
        rows = [self._models.step_row(name, version, step.name) for step in self.graph.steps]
        return PipelineRoute(name, self.graph, self._bind, self.served.counters.answered, rows)

    def groups(self) -> OpensGroups | None:
        return self._stepped

    def _bound(self, _binding: Binding, /) -> Iterable[str]:
        tasks = [_facts(served).task for served in self._now]
        base = tasks[self.graph.base]
        assert base is not None  # `check` saw to it
        task = str(Task.READ) if self.graph.reader(tasks) is not None else base
        name = self.served.signature.inputs[0].name
        known = {"task": task, "input": {"name": name}, "encoded": False}
        self.served.pictures = {**known, "pages": task == Task.READ}
        listed = [self.graph.steps[number] for number in self.graph.order]
        words = " → ".join(f"{step.name} ({step.model})" for step in listed)
        return [f"{len(listed)} steps: {words}.", *self._grown()]

    def _grown(self) -> list[str]:
        """What becomes of the promise here, in words: it grows where it may, and is warned of where it cannot
        be kept. That is a forecast, so the pipeline is served all the same."""
        served, alone = self.served, self.stepped.remaining.alone()
        if served.config.slo_may_grow:
            busy = any(step.profile is not None and step.profile.provisional for step in self._now)
            served.config, said = grown(served.config, alone, _FEW, provisional=busy)
            if said:
                _log.debug("choice", model=served.name, why=said)
        else:
            said = cannot_keep(served.name, served.slo, alone, _FEW)
            if said:
                _log.warning("slo-too-short", model=served.name, why=said)
        return [said] if said else []

    def _bind(self) -> Binding:
        """Binds its steps, which stand in an order in which each comes after the one that it waits for."""
        self._now = found = [self._found(step)[1] for step in self.steps]
        self.graph.check([_facts(served) for served in found])
        order, leaves = self.graph.order, []
        for number in order:
            after = self.graph.after[number]
            scheduler, images = found[number].scheduler, self.graph.usual_images(number)
            assert scheduler is not None  # it has a task of its own
            before = () if after is None else (order.index(after),)
            leaves.append(Step(scheduler, before, images, self.graph.optional(number)))
        binding = Binding(tuple(leaves), tuple(found[number] for number in order))
        if self.served.promises:
            self._order_turns(binding)
        return binding


def _facts(served: Served) -> StepFacts:
    """Returns the facts of a model as a step."""
    vision = served.vision
    if vision is None:
        return StepFacts(None, runs_nothing=served.runs_nothing)
    return StepFacts(str(vision.task), vision.sides, labels=vision.labels)
