"""Would the big model have said the same? Some pictures that the cheap model kept go to it all the same,
after the answer was sent, out of what its device leaves over: under load there are none, and nothing is
proven."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from carpool.config.rollout_settings import CompareSettings
from carpool.errors import CarpoolError
from carpool.frontend.pictures.cascade_steps import STEP
from carpool.link.door import Answer, Ask, Call, OneAnswer
from carpool.memory.arena import Slot
from carpool.pipelines.picture_graph import Document, Item
from carpool.types import Timing
from carpool.vision.decode import Decoded
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.compare import compare_answers

if TYPE_CHECKING:
    from carpool.frontend.pictures.cascade_steps import Cascade
    from carpool.frontend.pictures.picture_service import PictureService
    from carpool.frontend.pictures.pipeline_pictures import PipelineModel, StepModel
    from carpool.frontend.pictures.run_steps import StepState


def count(
    model: PipelineModel, steps: Mapping[int, StepState], picture: Decoded, options: Options, degraded: str
) -> None:
    """A request was answered. Some of what the cheap model kept goes to the big one all the same."""
    cascade = model.cascade
    assert cascade is not None
    cheap, big = _took(steps[cascade.cheap]), _took(steps[cascade.big])
    assert cheap is not None
    asked = options.extra.get(STEP)
    if cascade.answered(cheap, big, degraded=bool(degraded), asked=asked):
        answers = steps[cascade.cheap].answers
        assert answers
        CascadeAudit(cascade, model.steps[cascade.big], model.service, answers[0], options).begin(picture)


def _took(step: StepState) -> Timing | None:
    """The time of a step that answered something."""
    given = step.requests[0].answer if step.requests and step.answers else None
    return None if given is None else given.timing


class CascadeAudit(OneAnswer):
    """One answer. The picture is kept until a thread has made the big model's input of it."""

    def __init__(
        self, cascade: Cascade, big: StepModel, service: PictureService, kept: Document, options: Options
    ) -> None:
        """`kept` is the cheap model's answer with these options."""
        self._cascade = cascade
        self._at = big
        self._service = service
        self._kept = kept
        self._options = options
        self._geometry: Geometry | None = None
        self._call: Call | None = None

    def begin(self, picture: Decoded) -> None:
        service, head = self._service, self._at.head(0, 1)
        try:
            slot = service.door.slot(head.tail_size)
        except CarpoolError:  # no memory now
            self._cascade.audited(None)
            return
        prepare = partial(self._at.prepare, picture, Item(), slot.view)
        if not service.workers.idle(prepare, partial(self._prepared, slot)):
            slot.release()
            self._cascade.audited(None)

    def _prepared(
        self, slot: Slot, made: tuple[Geometry, Decoded] | None, _error: BaseException | None
    ) -> None:
        if made is None:
            slot.release()
            self._cascade.audited(None)
            return
        self._geometry = made[0]
        try:
            ask = Ask(self._at.entry, self._at.head(0, 1), slot, 0, monotonic(), spare=True)
            self._call = self._service.door.infer(ask, self)
        except CarpoolError:
            slot.release()
            self._cascade.audited(None)

    def done(self, answer: Answer) -> None:
        if answer.error is not None or not self._service.workers.idle(
            partial(self._agrees, answer), self._over
        ):
            self._over(None, None)

    def _agrees(self, answer: Answer) -> bool:
        """In a thread."""
        model = self._at.model
        assert self._geometry is not None
        said = model.answer(model.of_one(answer.outputs, 0), self._geometry, self._options)
        if "text" in said:
            return bool(said["text"] == self._kept.get("text"))
        return not compare_answers(str(model.task), self._kept, said, CompareSettings()).differs

    def _over(self, agrees: bool | None, _error: BaseException | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.release()
        self._cascade.audited(agrees)
