"""Turns maps of probabilities into a mask per class in the picture's pixels; boxes and prototypes into one
per object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from carpool.config.model import SegmentSettings, Task
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.boxes import best_pairs, choose, from_centres, least_score, of_head, sound
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    IOU,
    MASK_FORMAT,
    MOST_BOXES,
    OVERLAY,
    SCORE,
    THRESHOLD,
    Mask,
    Masks,
    Option,
    Options,
)
from carpool.vision.picture_input import widened
from carpool.vision.tasks.detect import listed
from carpool.vision.tasks.task import SCORE_DIGITS, VisionTask, activate, read, read_floats, size
from carpool.vision.vision_settings import VisionSettings

if TYPE_CHECKING:
    from carpool.vision.mask_regions import MaskRegion, Regions

_ONE_MAP = "foreground"  # what the only class is called when there are no labels
_MOST_CLASSES = 1 << 15
_BACKGROUNDS = ("background", "__background__", "_background_")


class Segment(VisionTask):
    name = Task.SEGMENT
    route, summary = Task.SEGMENT.route, "Segment an image"
    form, title = Masks, "Masks of objects or classes"
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
        "iou": IOU,
        "max_detections": MOST_BOXES,
        "threshold": THRESHOLD,
        "format": MASK_FORMAT,
        "overlay": OVERLAY,
    }
    table = SegmentSettings
    needs = "an output [classes, height, width] or [height, width] of floats, or boxes with prototypes"

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, SegmentSettings)
        self._settings = settings
        self._table = settings.table
        self._output = settings.outputs[0]
        self._classes_last = settings.image.layout == "nhwc"
        self._maps = settings.table.format in (None, "maps", "class_map")
        named = (number for number, name in enumerate(settings.labels) if name.lower() in _BACKGROUNDS)
        self._background = next(named, None) if self._table.background is None else self._table.background

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """Masks are made and written one at a time: together they could be larger than the picture."""
        if not self._maps:
            objects = self._objects(outputs, geometry, options)
            masks = [_written(mask, pixels, options) for mask, pixels in objects]
            return dict(Masks(image=size(geometry), masks=masks))
        found, one_map = self._find(outputs, geometry, options)
        masks = [_written(self._mask(region, one_map), found.mask(region), options) for region in found.found]
        return dict(Masks(image=size(geometry), masks=masks))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw

        if not self._maps:
            objects = self._objects(outputs, geometry, options)
            return draw.objects(pixels, objects, (geometry.width, geometry.height))
        found, one_map = self._find(outputs, geometry, options)
        return draw.regions(pixels, found, lambda class_id: self._label(class_id, one_map))

    # ---- one mask per object ----------------------------------------------------------------------------

    def _objects(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Iterator[tuple[Mask, Array]]:
        """What is said of each, and its pixels in the picture: the best first."""
        from carpool.vision.mask_regions import inside_box

        table = self._table
        assert table.format is not None
        if table.format == "queries":
            yield from self._queries(outputs, geometry, options)
            return
        rows, prototypes = (read_floats(outputs, spec) for spec in self._settings.outputs)
        parts = prototypes.reshape(len(prototypes), -1)
        with np.errstate(all="ignore"):  # of what is not a number nothing comes
            found = of_head(table.format, rows, least_score(table, options), len(prototypes))
            found, placed = sound(found, geometry)
        stay = choose(found, table, options, table.format)
        threshold = table.threshold if options.threshold is None else options.threshold
        least = float(np.log(max(threshold, 1e-6)) - np.log(max(1 - threshold, 1e-6)))  # before the sigmoid
        chosen, boxes = found.only(stay), placed[stay]
        for said, box, weights in zip(listed(self._settings, chosen, boxes), boxes, chosen.rest, strict=True):
            label, class_id, score, corners = said
            with np.errstate(all="ignore"):
                values = np.nan_to_num(weights @ parts).reshape(prototypes.shape[1:])
            mask = Mask(label=label, class_id=class_id, score=score, box=corners)
            yield mask, inside_box(values, geometry, box.tolist(), least)

    def _queries(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Iterator[tuple[Mask, Array]]:
        """As above, where each query has a box, a sigmoid for each class, and a mask of its own: it may reach
        beyond the box."""
        from carpool.vision.mask_regions import inside_box

        table = self._table
        boxes, scores, masks = (read_floats(outputs, spec) for spec in self._settings.outputs)
        if not len(boxes) == len(scores) == len(masks):
            raise ModelError(f"the model returned {len(boxes)} boxes and {len(masks)} masks")
        sides = np.array([geometry.input_width, geometry.input_height] * 2, np.float32)
        with np.errstate(all="ignore"):  # of what is not a number nothing comes
            scores = activate(scores.T, table.activation, np.float32).T
            if table.background is not None and table.background < scores.shape[1]:
                scores[:, table.background] = -1.0
            numbered = np.concatenate((from_centres(boxes) * sides, np.arange(len(boxes))[:, None]), axis=1)
            found = best_pairs(numbered, scores, least_score(table, options))
            found, placed = sound(found._replace(boxes=found.boxes[:, :4]), geometry)
        stay = choose(found, table, options, "detr")
        threshold = table.threshold if options.threshold is None else options.threshold
        least = float(np.log(max(threshold, 1e-6)) - np.log(max(1 - threshold, 1e-6)))  # before the sigmoid
        above = float(np.nextafter(np.float32(least), np.float32(np.inf)))
        whole = [0.0, 0.0, float(geometry.width), float(geometry.height)]
        chosen = found.only(stay)
        for said, query in zip(
            listed(self._settings, chosen, placed[stay]), chosen.rest[:, 0].astype(np.intp), strict=True
        ):
            label, class_id, score, corners = said
            mask = Mask(label=label, class_id=class_id, score=score, box=corners)
            values = np.nan_to_num(masks[query].astype(np.float32))
            yield (
                mask,
                inside_box(values, geometry, whole, above),
            )

    # ---- one mask per class -----------------------------------------------------------------------------

    def _find(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> tuple[Regions, bool]:
        from carpool.vision import mask_regions  # brings OpenCV along, which the engine never needs

        if self._table.format == "class_map":
            return mask_regions.find_numbered(self._numbers(outputs), geometry, self._background), False
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
        found = mask_regions.find(probabilities, geometry, threshold, self._background)
        least = options.score or 0.0
        kept = tuple(region for region in found.found if region.score >= least)
        return mask_regions.Regions(found.index, found.width, found.height, kept), len(maps) == 1

    def _numbers(self, outputs: Mapping[str, Array]) -> Array:
        """Returns the map [height, width]; a value that is no number is no class."""
        numbers = widened(read(outputs, self._output), self._output)
        numbers = numbers[0] if numbers.ndim == 3 and len(numbers) == 1 else numbers
        if numbers.ndim != 2 or not numbers.size:
            found = list(numbers.shape)
            raise ModelError(f'the output "{self._output.name}" is no map of numbers in its shape {found}')
        return numbers if numbers.dtype.kind in "iu" else np.nan_to_num(numbers, nan=-1.0)

    def _mask(self, region: MaskRegion, one_map: bool) -> Mask:
        return Mask(
            label=self._label(region.class_id, one_map),
            class_id=region.class_id,
            score=round(region.score, SCORE_DIGITS),
            box=[float(side) for side in region.box],
        )

    def _label(self, class_id: int, one_map: bool) -> str:
        return _ONE_MAP if one_map and not self._settings.labels else self._settings.label(class_id)


def _written(mask: Mask, pixels: Array, options: Options) -> Mask:
    """Returns the mask with its pixels, in the form that was asked for."""
    from carpool.vision.mask_regions import png_text, run_lengths

    if options.format == "rle":
        height, width = pixels.shape
        mask["rle"] = {"size": [height, width], "counts": run_lengths(pixels)}
    else:
        mask["png"] = png_text(pixels)
    return mask
