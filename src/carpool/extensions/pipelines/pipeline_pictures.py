"""Represents a pipeline as pictures see it: like a model, but its pixels are kept for the steps after the
first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import orjson

from carpool.errors import Unavailable
from carpool.extensions.pipelines.picture_graph import Document, Item, PictureGraph
from carpool.extensions.pipelines.settings import NAME, PipelineStep, read_document
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.catalog import Catalog, ModelEntry
from carpool.memory.picture_leases import KEPT_FILE, LEASE_BYTES, cuts_bytes, write_cuts
from carpool.types import Array, RequestedOutput, RequestOptions, Tensor
from carpool.vision import crops, draw
from carpool.vision.decode import Decoded, decode
from carpool.vision.geometry import Geometry
from carpool.vision.heads import Buffer, PictureHead
from carpool.vision.picture_answers import DEFAULT, Option, Options, flag
from carpool.vision.text_lines import as_lines
from carpool.vision.transforms import Transform
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.v2 import RequestHead

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService

Size = tuple[int, int]
"""Width and height."""
_QUICK, _EACH_CROP = 20_000, 8_000
"""Pixels that are read and written in 60 µs; and what a crop of any size takes, as so many of them."""
EXPLAIN = "explain"
EXPLAIN_OPTION = Option(flag, {"type": "boolean", "default": False}, "Also report the time of each step.")


class StepModel:
    """Describes a step, and the model that runs it now. What does not depend on a request is made once."""

    def __init__(self, number: int, step: PipelineStep, model: PictureModel) -> None:
        self.number = number
        self.step = step
        self.model = model
        self.entry = model.entry
        self.most = max(1, model.entry.signature.max_batch)  # images of one request
        self._transforms = {0: model.transform}
        if step.crop.rectify:
            for width in step.crop.widths:
                image = replace(model.settings.image, size=(step.crop.height, width))
                self._transforms[width] = Transform(image, model.settings.input, model.entry.name)
        self._written = {width: math.prod(one.shape) // 3 for width, one in self._transforms.items()}
        self._heads: dict[tuple[int, int], RequestHead] = {}
        self._cut_heads: dict[int, RequestHead] = {}

    def head(self, width: int, images: int) -> RequestHead:
        """Returns always the same object for equal ones: by that the link knows it again."""
        found = self._heads.get((width, images))
        if found is None:
            shape = self._transforms[width].shape
            found = self._heads[width, images] = self.model.head_of(images, self.model.outputs, shape=shape)
        return found

    def cut_head(self, images: int) -> RequestHead:
        """Does the same as `head`, for crops that the device cuts out of a picture that it has."""
        found = self._cut_heads.get(images)
        if found is None:
            size = cuts_bytes(images)
            found = self.model.file_head_of(self.model.outputs, size=size, images=images)
            self._cut_heads[images] = found
        return found

    def describe(self, token: int, items: Sequence[Item], size: Size, view: memoryview) -> list[Geometry]:
        """As `prepare`, for such crops: says which."""
        boxes = [(0, 0, *size) if item.place is None else item.place[:4] for item in items]
        write_cuts(view, token, boxes)
        return [self.model.transform.geometry(right - x, bottom - y) for x, y, right, bottom in boxes]

    def is_quick(self, picture: Decoded, items: Sequence[Item]) -> bool:
        """Returns whether these are cut out in less time than a thread takes to wake up."""
        work = 0
        for item in items:
            place = item.place
            if place is None:
                work += picture.pixels.size
            elif place.corners:
                return False
            else:
                work += (place.right - place.left) * (place.bottom - place.top)
            work += _EACH_CROP + self._written[item.width]
        return work <= _QUICK

    def prepare(self, picture: Decoded, item: Item, memory: memoryview) -> tuple[Geometry, Size]:
        """Cut out what is asked about, and write it as the model's input; any thread."""
        place, crop = item.place, self.step.crop
        part = picture
        if place is not None and place.corners:
            part = crops.rectified(picture, place.corners, crop.height, item.width, crop.stretch)
        elif place is not None:
            part = crops.crop(picture, *place[:4])
        transform = self._transforms[item.width]
        into: Array = np.ndarray(transform.shape, transform.dtype, memory)
        return transform.prepare(part, into), (part.width, part.height)


def _on_device(steps: Sequence[StepModel]) -> bool:
    """Returns whether the models of all steps run beside each other and decode pictures themselves, so that
    the picture can stay with them. What is rectified is cut out here."""
    return all(at.model.encoded and at.entry.traits.hosted and not at.step.crop.rectify for at in steps)


def _serving(step: PipelineStep, catalog: Catalog) -> ModelEntry | None:
    """Returns the version that runs a step now."""
    if step.version == -1:
        return catalog.newest.get(step.model)
    return catalog.entries.get((step.model, str(step.version)))


class PipelineModel(PictureModel):
    """Acts as the model of its first step, as far as the picture's way into the engine goes."""

    may_stay_on_device = True  # its picture, where the models of all steps can take it from there

    def __init__(self, entry: ModelEntry, steps: Sequence[StepModel], service: PictureService) -> None:
        self.service = service
        self.graph = PictureGraph(read_document(entry.extra[NAME]))
        self.steps = steps
        self._reader = self.graph.reader([at.model.task for at in steps])
        self.first = first = steps[self.graph.base].model
        super().__init__(first.entry)
        self.entry = entry
        self.keeps_pixels = True
        self._batched = False  # one picture, one answer
        self.encoded = self.may_stay_on_device and _on_device(steps)  # else its pixels are needed here
        self.room_behind = LEASE_BYTES if self.encoded else 0
        self.quick = True  # what is answered is made on the way
        self.own_options = {EXPLAIN: EXPLAIN_OPTION}  # besides those of its task
        self.options = {**self.options, **self.own_options}
        self.outputs = (RequestedOutput("answer", binary=True),)
        self.assumes([f"{at.step.name}.{key}" for at in steps for key in at.model.settings.assumed])
        self._reduction = crops.reduction_to(self.graph.settings.keep_px)

    @classmethod
    def found(cls, entry: ModelEntry, service: PictureService) -> Self:
        """Returns the pipeline with the models that run its steps now. Raises `Unavailable` while one is not
        loaded."""
        steps = []
        for number, step in enumerate(read_document(entry.extra[NAME]).steps):
            model = _serving(step, service.engine.catalog)
            if model is None:
                why = f"{entry.name} cannot run: {step.model}, which it needs, is not loaded"
                raise Unavailable(why, reason="model-not-ready")
            steps.append(StepModel(number, step, service.model(model)))
        return cls(entry, steps, service)

    def is_current(self, catalog: Catalog) -> bool:
        """Returns whether the models of its steps are still those that serve."""
        return all(_serving(at.step, catalog) is at.entry for at in self.steps)

    # ── in the place of a model ──

    def read_options(self, given: Mapping[str, object]) -> Options:
        own = self.own_options
        options = super().read_options({name: value for name, value in given.items() if name not in own})
        read = {name: option.read(name, str(given[name])) for name, option in own.items() if name in given}
        return replace(options, extra={**options.extra, **read}) if read else options

    def head_of(
        self,
        batch: int,
        _outputs: Sequence[RequestedOutput],
        options: RequestOptions = DEFAULT_OPTIONS,
        shape: tuple[int, ...] = (),
    ) -> RequestHead:
        """Returns what goes to the engine for the first step."""
        return self.first.head_of(batch, self.first.outputs, options, shape)

    def file_head_of(
        self,
        _outputs: Sequence[RequestedOutput],
        options: RequestOptions = DEFAULT_OPTIONS,
        size: int = KEPT_FILE,
        images: int = 1,
    ) -> RequestHead:
        """Its pixels stay where they are decoded."""
        return self.first.file_head_of(self.first.outputs, options, size, images)

    def decoded(self, data: Buffer, head: PictureHead | None = None) -> Decoded:
        """Returns the picture as large as it is kept."""
        return crops.kept(decode(data, reduction=self._reduction, head=head), self.graph.settings.keep_px)

    def prepare(
        self,
        data: Buffer,
        memory: memoryview | bytearray,
        keep: list[Decoded] | None = None,
        head: PictureHead | None = None,
    ) -> Geometry:
        """One decode for all steps: what is kept is what the first one sees, too."""
        picture = self.decoded(data, head)
        if keep is not None:
            keep.append(picture)
        into: Array = np.ndarray(self.transform.shape, self.transform.dtype, memory)
        return self.transform.prepare(picture, into)

    def document(
        self, outputs: Sequence[Tensor], _number: int, _geometry: Geometry, _options: Options
    ) -> bytes:
        """Returns what the run has put together."""
        found = outputs[0].data.reshape(-1)[0]
        assert isinstance(found, bytes)
        return found

    def worded(self, answer: Document) -> Document:
        """Returns the answer of all steps, as it is sent: lines in the order of reading, where they were
        read."""
        if self._reader is None:
            return answer
        regions = answer["regions"]
        return {"image": answer["image"], **as_lines(regions, [one.get(self._reader) for one in regions])}

    def drawn(
        self,
        data: Buffer,
        outputs: Mapping[str, Array],
        geometry: Geometry,
        options: Options = DEFAULT,
        format: str = "jpeg",  # noqa: A002
    ) -> bytes:
        """Returns the objects of the first step, each with what the later ones say about it."""
        answer = orjson.loads(outputs["answer"].reshape(-1)[0])
        pixels, size = decode(data).pixels, (geometry.width, geometry.height)
        texts = answer.get("lines", answer.get("regions"))
        if texts is not None:
            return draw.encode(draw.text(pixels, texts, size), format)
        found: Any = [{**one, "label": self._words(one)} for one in answer.get("detections", ())]
        return draw.encode(draw.detections(pixels, found, size), format)

    def _words(self, one: Mapping[str, Any]) -> str:
        words = [str(one["label"])]
        for step in self.graph.steps:
            said = one.get(step.name)
            if isinstance(said, dict):
                best = next(iter(said.get("classes", ())), None)
                words += [said["text"]] if "text" in said else [best["label"]] if best else []
        return ": ".join(words)
