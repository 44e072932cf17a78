"""One output → a vector, by default of length 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.config.model import EmbedSettings
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.results import Embedding
from carpool.vision.settings import VisionSettings
from carpool.vision.tasks.raw import check_count
from carpool.vision.tasks.task import cannot_draw, read_floats, size


class Embed:
    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, EmbedSettings)
        self._normalize = settings.table.normalize
        self._output = settings.outputs[0]

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        values = read_floats(outputs, self._output).reshape(-1).astype(np.float64)
        check_count(values.size)
        if not np.isfinite(values).all():
            raise ModelError("the model answered an embedding with numbers that are not finite")
        if self._normalize:
            values = unit(values)
        return dict(Embedding(image=size(geometry), embedding=values.tolist()))

    def draw(
        self,
        pixels: Array,
        outputs: Mapping[str, Array],
        geometry: Geometry,
        options: Options,
    ) -> Array:
        raise cannot_draw("an embedding")


def unit(values: Array) -> Array:
    """The same direction with length 1; a vector of zeros has none and stays."""
    largest = np.abs(values).max(initial=0.0)
    if largest == 0.0:
        return values
    scaled = values / largest  # squares of huge values would overflow
    direction: Array = scaled / np.sqrt(np.square(scaled).sum())
    return direction
