"""Checks whether the large model would have answered the same: it is asked for some pictures that the cheap
model answered, after that answer was sent."""

from __future__ import annotations

from functools import partial

from carpool.extensions.cascades.cascade_steps import Cascade
from carpool.extensions.pipelines.picture_graph import Document, Item
from carpool.extensions.pipelines.pipeline_pictures import StepModel
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.recomputation import Recomputation
from carpool.link.engine_client import Answer
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.decode import Decoded
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.compare import compare_answers


class CascadeAudit(Recomputation[bool]):
    """Represents one answer. The picture is kept until a thread has made the big model's input of it."""

    def __init__(
        self, cascade: Cascade, big: StepModel, service: PictureService, kept: Document, options: Options
    ) -> None:
        """`kept` is the cheap model's answer with these options."""
        super().__init__(service, big.entry, service.workers.idle)
        self._cascade = cascade
        self._at = big
        self._kept = kept
        self._options = options
        self._geometry: Geometry | None = None

    def begin(self, picture: Decoded) -> None:
        head = self._at.head(0, 1)
        self.prepare(head, head.tail_size, partial(self._write, picture))

    def _write(self, picture: Decoded, memory: memoryview) -> None:
        self._geometry, _ = self._at.prepare(picture, Item(), memory)

    def _compare(self, answer: Answer) -> bool:
        model = self._at.model
        assert self._geometry is not None
        said = model.answer(model.of_one(answer.outputs, 0), self._geometry, self._options)
        if "text" in said:
            return bool(said["text"] == self._kept.get("text"))
        return not compare_answers(str(model.task), self._kept, said, CompareSettings()).differs

    def _compared(self, agrees: bool) -> None:
        self._cascade.audited(agrees)

    def _skipped(self, _why: str) -> None:
        self._cascade.audited(None)
