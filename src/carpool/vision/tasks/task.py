"""The shape of a task, and how all of them read the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from carpool.config.model import DYNAMIC
from carpool.errors import InvalidInput, ModelError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.results import Size

SCORE_DIGITS, BOX_DIGITS = 6, 2  # of numbers in answers: beyond this is noise


class VisionTask(Protocol):
    """Holds no state of any request: one object serves every thread."""

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """The answer to one picture, from the model's outputs without the batch dimension."""

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        """A new picture with the answer drawn in; `pixels` are RGB [h, w, 3], of any size."""


def read(outputs: Mapping[str, Array], spec: TensorSpec) -> Array:
    """One output, in the shape that was declared; without a leading 1 that nobody declared."""
    if spec.name not in outputs:
        raise ModelError(f'the model did not answer the output "{spec.name}"')
    array = outputs[spec.name]
    if array.shape == spec.shape:
        return array
    if array.ndim == len(spec.shape) + 1 and array.shape[0] == 1:
        array = array[0]
    fits = array.ndim == len(spec.shape) and all(
        side in (DYNAMIC, actual) for side, actual in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        found, expected = list(array.shape), list(spec.shape)
        raise ModelError(f'the output "{spec.name}" has the shape {found} instead of {expected}')
    return array


def read_floats(outputs: Mapping[str, Array], spec: TensorSpec) -> Array:
    """The same as numbers that numpy is fast with."""
    array = widened(read(outputs, spec), spec)
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def widened(array: Array, spec: TensorSpec) -> Array:
    """bfloat16, which numpy lacks, as float32; anything else as it is."""
    if spec.datatype is not Datatype.BF16:
        return array
    wide: Array = (array.astype(np.uint32) << 16).view(np.float32)
    return wide


def size(geometry: Geometry) -> Size:
    return {"width": geometry.width, "height": geometry.height}


def rounded(values: Array, digits: int) -> list[Any]:
    """Python floats with so many digits; float32 would drag its rounding error into the JSON."""
    numbers: list[Any] = np.round(values.astype(np.float64), digits).tolist()
    return numbers


def cannot_draw(what: str) -> InvalidInput:
    return InvalidInput(f"{what} cannot be drawn; ask for JSON, without overlay", field="overlay")
