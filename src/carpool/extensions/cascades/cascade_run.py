"""Leads one picture through a cascade: as through a pipeline of two steps, of which the second is asked only
where the first is not certain enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from carpool.errors import CarpoolError
from carpool.extensions.cascades.cascade_audit import CascadeAudit
from carpool.extensions.cascades.cascade_steps import STEP, Cascade
from carpool.extensions.pipelines.picture_graph import Document, Item
from carpool.extensions.pipelines.pipeline_pictures import PipelineModel, StepModel
from carpool.extensions.pipelines.pipeline_run import PipelineRun
from carpool.extensions.pipelines.run_steps import StepState
from carpool.frontend.pictures.picture_service import PictureService
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ask, Hears
from carpool.types import Timing
from carpool.vision.decode import Decoded
from carpool.vision.picture_answers import Options


class CascadeModel(PipelineModel):
    may_stay_on_device = False  # an audit looks at the picture once more

    def __init__(self, entry: ModelEntry, steps: Sequence[StepModel], service: PictureService) -> None:
        super().__init__(entry, steps, service)
        counts = getattr(self.first.settings.table, "score", None) if str(self.task) == "detect" else None
        self.cascade = Cascade(entry.name, self.graph, partial(service.row, entry), counts)
        own = {STEP: self.cascade.option}
        self.own_options, self.options = {**self.own_options, **own}, {**self.options, **own}


class CascadeRun(PipelineRun):
    def __init__(self, model: PipelineModel, ask: Ask, hears: Hears) -> None:
        super().__init__(model, ask, hears)
        assert isinstance(model, CascadeModel)
        self._at = model
        self._cascade = model.cascade
        self._certainty = 0.0  # of the cheap model's answer
        self._insists = self.pictures.options.extra.get(STEP)

    def options_of(self, number: int) -> Options:
        """Either of the two models answers for the whole picture."""
        return self.pictures.options

    def said(self, number: int, answer: Callable[[Options], Document], options: Options) -> Document:
        if number != self._cascade.cheap:
            return answer(options)
        found, self._certainty = self._cascade.read(answer, options)
        return found

    def items_of(self, number: int, answers: Sequence[Document]) -> list[Item]:
        return [Item()] if self._cascade.escalates(self._certainty, self._insists) else []

    def goes_without(self, number: int, error: CarpoolError) -> bool:
        if number == self._cascade.big:
            self.degraded = self._cascade.degraded(error, self._insists)
        return bool(self.degraded)

    def marks(self) -> Mapping[str, Any]:
        by_big = bool(self.steps[self._cascade.big].answers)
        return self._cascade.marks(by_big=by_big, degraded=self.degraded)

    def was_answered(self, picture: Decoded) -> None:
        """Counts the answer. The large model is asked for some of those that the cheap one gave all the
        same."""
        cascade, kept = self._cascade, self.steps[self._cascade.cheap]
        cheap, big = _took(kept), _took(self.steps[cascade.big])
        assert cheap is not None
        if cascade.answered(cheap, big, degraded=bool(self.degraded), asked=self._insists):
            assert kept.answers
            model = self._at
            audit = CascadeAudit(
                cascade, model.steps[cascade.big], model.service, kept.answers[0], self.pictures.options
            )
            audit.begin(picture)


def _took(step: StepState) -> Timing | None:
    """Returns the time of a step that answered something."""
    given = step.requests[0].answer if step.requests and step.answers else None
    return None if given is None else given.timing
