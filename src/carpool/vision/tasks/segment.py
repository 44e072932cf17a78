"""Maps of probabilities → one mask per class in the picture's pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.config.model import SegmentSettings
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision import draw, regions
from carpool.vision.geometry import Geometry
from carpool.vision.masks import png_text, run_lengths
from carpool.vision.options import Options
from carpool.vision.regions import Region, Regions
from carpool.vision.results import Mask, Masks
from carpool.vision.settings import VisionSettings
from carpool.vision.tasks.task import SCORE_DIGITS, read_floats, size

_ONE_MAP = "foreground"  # what the only class is called when there are no labels
_MOST_CLASSES = 1 << 15


class Segment:
    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, SegmentSettings)
        self._settings = settings
        self._table = settings.table
        self._output = settings.outputs[0]
        self._classes_last = settings.image.layout == "nhwc"

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """Masks are made and written one at a time: together they could be larger than the picture."""
        found, one_map = self._find(outputs, geometry, options)
        masks = [self._mask(found, region, one_map, options) for region in found.found]
        return dict(Masks(image=size(geometry), masks=masks))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        found, one_map = self._find(outputs, geometry, options)
        return draw.regions(pixels, found, lambda class_id: self._label(class_id, one_map))

    def _find(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> tuple[Regions, bool]:
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
        probabilities = activate(maps, self._table.activation)
        found = regions.find(probabilities, geometry, threshold, self._table.background)
        least = options.score or 0.0
        kept = tuple(region for region in found.found if region.score >= least)
        return Regions(found.index, found.width, found.height, kept), len(maps) == 1

    def _mask(self, found: Regions, region: Region, one_map: bool, options: Options) -> Mask:
        mask = Mask(
            label=self._label(region.class_id, one_map),
            class_id=region.class_id,
            score=round(region.score, SCORE_DIGITS),
            box=[float(side) for side in region.box],
        )
        pixels = found.mask(region)
        if options.format == "rle":
            mask["rle"] = {"size": [found.height, found.width], "counts": run_lengths(pixels)}
        else:
            mask["png"] = png_text(pixels)
        return mask

    def _label(self, class_id: int, one_map: bool) -> str:
        return _ONE_MAP if one_map and not self._settings.labels else self._settings.label(class_id)


def activate(maps: Array, activation: str | None) -> Array:
    """Values [classes, h, w] → probabilities in float32; what is not a number has none."""
    values = np.nan_to_num(maps.astype(np.float32), nan=-1e30, posinf=1e30, neginf=-1e30)
    if activation == "softmax":
        values -= values.max(axis=0)
        np.exp(values, out=values)
        values /= values.sum(axis=0)
    elif activation == "sigmoid":
        values *= np.float32(0.5)
        np.tanh(values, out=values)
        values *= np.float32(0.5)
        values += np.float32(0.5)
    elif activation == "minmax":
        low, high = float(values.min()), float(values.max())
        values -= np.float32(low)
        values /= np.float32(high - low if high > low else 1.0)
    return np.clip(values, 0.0, 1.0, out=values)
