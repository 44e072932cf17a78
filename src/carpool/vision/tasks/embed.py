"""One output → a vector, by default of length 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import EmbedSettings, Task
from carpool.errors import ModelError
from carpool.types import Array, TensorSpec
from carpool.vision import recognise
from carpool.vision.answer_forms import Embedding
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.recognise import in_words
from carpool.vision.tasks.raw import check_count
from carpool.vision.tasks.task import LoadedModel, Verdict, VisionSettings, VisionTask, read_floats, size


class Embed(VisionTask):
    name = Task.EMBED
    route, summary = "/embed", "Turn a picture into a vector"
    form, title = Embedding, "The picture as a vector"
    example: ClassVar[Mapping[str, Any]] = {"embedding": [0.6, -0.8, 0.0]}
    table = EmbedSettings
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, EmbedSettings)
        self._normalize = settings.table.normalize
        self._output = settings.outputs[0]

    @classmethod
    def recognise(cls, model: LoadedModel) -> Verdict | None:
        named = [spec for spec in model.outputs if "embed" in spec.name.lower()]
        if len(model.outputs) != 1 or not named or not recognise.length(named[0]):
            return None
        return Verdict(30, f"output {in_words(model.outputs)}")

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[EmbedSettings, tuple[TensorSpec, ...]]:
        chosen = next((spec for spec in model.outputs if spec.datatype in recognise.FLOATS), None)
        if chosen is None:
            raise model.cannot(cls.name, "an output of floats")
        return model.config.embed or EmbedSettings(), (chosen,)

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        values = read_floats(outputs, self._output).reshape(-1).astype(np.float64)
        check_count(values.size)
        if not np.isfinite(values).all():
            raise ModelError("the model answered an embedding with numbers that are not finite")
        if self._normalize:
            values = unit(values)
        return dict(Embedding(image=size(geometry), embedding=values.tolist()))


def unit(values: Array) -> Array:
    """The same direction with length 1; a vector of zeros has none and stays."""
    largest = np.abs(values).max(initial=0.0)
    if largest == 0.0:
        return values
    scaled = values / largest  # squares of huge values would overflow
    direction: Array = scaled / np.sqrt(np.square(scaled).sum())
    return direction
