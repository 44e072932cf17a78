"""Maps of probabilities → one mask per class in the picture's pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from carpool.config.model import DYNAMIC, SegmentSettings, Task
from carpool.errors import ModelError
from carpool.types import Array, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    MASK_FORMAT,
    OVERLAY,
    SCORE,
    THRESHOLD,
    Mask,
    Masks,
    Option,
    Options,
)
from carpool.vision.tasks.task import (
    FLOATS,
    SCORE_DIGITS,
    LoadedModel,
    Picture,
    Verdict,
    VisionSettings,
    VisionTask,
    activate,
    activation_in_words,
    holds_probabilities,
    in_words,
    read_floats,
    size,
)

if TYPE_CHECKING:
    from carpool.vision.mask_regions import Region, Regions

_ONE_MAP = "foreground"  # what the only class is called when there are no labels
_MOST_CLASSES = 1 << 15
_SMALLEST_MAP = 8  # a map may be this many times smaller than the picture; deeper ones are features
_BACKGROUNDS = ("background", "__background__", "_background_")


class Segment(VisionTask):
    name = Task.SEGMENT
    route, summary = "/segment", "Cut things out"
    form, title = Masks, "Which pixels belong to what"
    example: ClassVar[Mapping[str, Any]] = {
        "masks": [
            {
                "label": "foreground",
                "class_id": 0,
                "score": 0.9731,
                "box": [2.0, 1.0, 4.0, 3.0],
                "rle": {"size": [4, 6], "counts": [9, 2, 2, 2, 9]},
            }
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "threshold": THRESHOLD,
        "format": MASK_FORMAT,
        "overlay": OVERLAY,
    }
    table = SegmentSettings

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, SegmentSettings)
        self._settings = settings
        self._table = settings.table
        self._output = settings.outputs[0]
        self._classes_last = settings.image.layout == "nhwc"

    @classmethod
    def recognise(cls, model: LoadedModel) -> Verdict | None:
        outputs = model.outputs
        alike = len({spec.shape for spec in outputs}) == 1
        if not alike or not is_map(outputs[0], model.labels, model.picture):
            return None
        return Verdict(40, f"output {in_words(outputs[:1])} is a map of the picture{model.counted_labels()}")

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[SegmentSettings, tuple[TensorSpec, ...]]:
        maps = [spec for spec in model.outputs if map_shape(spec, model.picture)]
        if not maps:
            raise model.cannot(cls.name, "an output [classes, height, width] or [height, width] of floats")
        chosen = maps[0]
        shape = map_shape(chosen, model.picture)
        classes = shape[0] if shape else 1
        model.note_labels(classes)
        table = model.config.segment or SegmentSettings()
        if table.activation is None:
            table = replace(table, activation=_map_activation(chosen, classes))
            model.notes.append(
                f'masks are from {activation_in_words(table.activation)} output "{chosen.name}"'
            )
        if table.background is None:
            named = (number for number, name in enumerate(model.labels) if name.lower() in _BACKGROUNDS)
            table = replace(table, background=next(named, None))
        return table, (chosen,)

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """Masks are made and written one at a time: together they could be larger than the picture."""
        found, one_map = self._find(outputs, geometry, options)
        masks = [self._mask(found, region, one_map, options) for region in found.found]
        return dict(Masks(image=size(geometry), masks=masks))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        found, one_map = self._find(outputs, geometry, options)
        from carpool.vision import draw

        return draw.regions(pixels, found, lambda class_id: self._label(class_id, one_map))

    def _find(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> tuple[Regions, bool]:
        from carpool.vision import mask_regions  # brings OpenCV along, which the engine never needs

        maps = read_floats(outputs, self._output)
        if maps.ndim == 2:
            maps = maps[None]
        elif self._classes_last:
            maps = np.moveaxis(maps, -1, 0)
        if not maps.size or len(maps) > _MOST_CLASSES:
            raise ModelError(f'the output "{self._output.name}" has no maps in its shape {list(maps.shape)}')
        threshold = self._table.threshold if options.threshold is None else options.threshold
        exclusive = len(maps) > 1 and self._table.activation in ("softmax", "none")
        if exclusive and options.threshold is None:
            threshold = 0.0  # the most probable class wins, however improbable
        probabilities = activate(maps, self._table.activation, np.float32)
        found = mask_regions.find(probabilities, geometry, threshold, self._table.background)
        least = options.score or 0.0
        kept = tuple(region for region in found.found if region.score >= least)
        return mask_regions.Regions(found.index, found.width, found.height, kept), len(maps) == 1

    def _mask(self, found: Regions, region: Region, one_map: bool, options: Options) -> Mask:
        mask = Mask(
            label=self._label(region.class_id, one_map),
            class_id=region.class_id,
            score=round(region.score, SCORE_DIGITS),
            box=[float(side) for side in region.box],
        )
        from carpool.vision.mask_regions import png_text, run_lengths

        pixels = found.mask(region)
        if options.format == "rle":
            mask["rle"] = {"size": [found.height, found.width], "counts": run_lengths(pixels)}
        else:
            mask["png"] = png_text(pixels)
        return mask

    def _label(self, class_id: int, one_map: bool) -> str:
        return _ONE_MAP if one_map and not self._settings.labels else self._settings.label(class_id)


def map_shape(spec: TensorSpec, picture: Picture) -> tuple[int, int, int] | None:
    """Classes, height, width of maps; the classes stand where the input has its channels."""
    if spec.datatype not in FLOATS or len(spec.shape) not in (2, 3):
        return None
    if len(spec.shape) == 2:
        return 1, spec.shape[0], spec.shape[1]
    first, second, third = spec.shape
    return (first, second, third) if picture.layout == "nchw" else (third, first, second)


def is_map(spec: TensorSpec, labels: Sequence[str], picture: Picture) -> bool:
    """As many classes as labels (or one), and sides in the picture's proportions and not much smaller."""
    shape = map_shape(spec, picture)
    if shape is None or shape[0] == DYNAMIC or (shape[0] != 1 and labels and shape[0] != len(labels)):
        return False
    for side, full in ((shape[1], picture.height), (shape[2], picture.width)):
        if DYNAMIC in (side, full):
            if side != full:
                return False
        elif not full <= side * _SMALLEST_MAP or side > full:
            return False
    return shape[1] * picture.width == shape[2] * picture.height


def _map_activation(spec: TensorSpec, classes: int) -> str:
    """Classes exclude each other; a single map is taken as probabilities unless it is called …logit…."""
    if classes == 1:
        return "sigmoid" if "logit" in spec.name.lower() else "none"
    return "none" if holds_probabilities(spec) else "softmax"
