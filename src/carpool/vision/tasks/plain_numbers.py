"""Implements the tasks that answer numbers: raw, every output as nested lists, for models whose meaning only
the client knows; and embed, one output as a vector, by default of length 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import EmbedSettings, Task
from carpool.errors import ModelError, TooLarge
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Embedding, Options, Output, Outputs
from carpool.vision.picture_input import FLOATS, widened
from carpool.vision.tasks.task import LoadedModel, VisionTask, read, read_floats, size
from carpool.vision.vision_settings import VisionSettings

MAX_NUMBERS = 100_000  # in one answer; as JSON text that is one or two megabytes


class Raw(VisionTask):
    name = Task.RAW
    form, title = Outputs, "The model's outputs as they are"
    example: ClassVar[Mapping[str, Any]] = {
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2], "data": [0.25, -1.5]}]
    }

    def __init__(self, settings: VisionSettings) -> None:
        self._outputs = settings.outputs

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        arrays = [(spec, read(outputs, spec)) for spec in self._outputs]
        check_count(sum(array.size for _, array in arrays))
        return dict(Outputs(image=size(geometry), outputs=[_output(spec, array) for spec, array in arrays]))


def check_count(numbers: int) -> None:
    if numbers > MAX_NUMBERS:
        raise TooLarge(
            f"the response has {numbers} numbers, more than the {MAX_NUMBERS} allowed in JSON; "
            "request binary outputs with the v2 protocol, POST /v2/models/{model}/infer"
        )


def _output(spec: TensorSpec, array: Array) -> Output:
    return Output(
        name=spec.name,
        datatype=spec.datatype.value,
        shape=list(array.shape),
        data=_listed(widened(array, spec), spec.datatype),
    )


def _listed(array: Array, datatype: Datatype) -> Any:
    if datatype is Datatype.BYTES:
        texts = [value.decode("utf-8", "replace") for value in array.reshape(-1).tolist()]
        array = np.array(texts, object).reshape(array.shape)
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        numbers = array.astype(object)
        numbers[~np.isfinite(array)] = None
        array = numbers
    return array.tolist()


class Embed(VisionTask):
    name = Task.EMBED
    route, summary = Task.EMBED.route, "Turn an image into a vector"
    form, title = Embedding, "The image as a vector"
    example: ClassVar[Mapping[str, Any]] = {"embedding": [0.6, -0.8, 0.0]}
    table = EmbedSettings
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, EmbedSettings)
        self._normalize = settings.table.normalize
        self._output = settings.outputs[0]

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[EmbedSettings, tuple[TensorSpec, ...]]:
        """Takes whatever it has, made flat."""
        chosen = next((spec for spec in model.outputs if spec.datatype in FLOATS), None)
        if chosen is None:
            raise model.cannot(cls.name, "an output of floats")
        return model.config.embed or EmbedSettings(), (chosen,)

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        values = read_floats(outputs, self._output).reshape(-1).astype(np.float64)
        check_count(values.size)
        if not np.isfinite(values).all():
            raise ModelError("the model returned an embedding with numbers that are not finite")
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
