"""Every output as nested lists, for models whose meaning only the client knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import Task
from carpool.errors import TooLarge
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.answer_forms import Output, Outputs
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.tasks.task import VisionSettings, VisionTask, read, size, widened

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
            f"the answer has {numbers} numbers, more than the {MAX_NUMBERS} that JSON is good for; "
            "ask for binary outputs over the v2 protocol, POST /v2/models/{model}/infer"
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
