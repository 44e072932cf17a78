"""Defines what a task is, and how all of them read the model's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from carpool.config.model import DYNAMIC, ModelConfig
from carpool.errors import ConfigError, InvalidInput, ModelError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.output_facts import Facts
from carpool.vision.picture_answers import Option, Options, Size, Who, schema_of
from carpool.vision.picture_input import Picture, in_words, widened
from carpool.vision.recognition import Reading
from carpool.vision.vision_settings import VisionSettings

if TYPE_CHECKING:
    from carpool.vision.compare_settings import CompareSettings
    from carpool.vision.likeness import Difference

SCORE_DIGITS, BOX_DIGITS = 6, 2  # of numbers in answers: beyond this is noise


@dataclass(slots=True)
class LoadedModel:
    """Describes to a task the model that takes pictures. `notes` receives what was concluded, in words."""

    config: ModelConfig
    picture: Picture
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...]
    notes: list[str]

    def cannot(self, task: str, expected: str) -> ConfigError:
        why = f'task = "{task}"' if self.config.task else f"[{task}]"
        found = in_words(self.outputs)
        return ConfigError(f"{self.config.name}: {why} needs {expected}; the model's outputs are {found}")


class VisionTask:
    """Everything about one task: the class says what it is, an object of it answers for one model.

    An object holds no state of any request, so that one serves every thread.
    """

    name: ClassVar[str]  # in model.toml and in answers
    route: ClassVar[str] = ""  # where any model of this task can be asked; none: only by the model's name
    summary: ClassVar[str] = ""  # of that route
    form: ClassVar[type]  # the TypedDict that it answers; its name is that of the schema
    title: ClassVar[str]  # of that schema
    example: ClassVar[Mapping[str, Any]]  # what an answer has beside `image`
    options: ClassVar[Mapping[str, Option]] = {}  # what a request may ask; with OVERLAY it can be drawn
    table: ClassVar[type | None] = None  # its settings in model.toml, a dataclass
    needs: ClassVar[str] = ""  # which outputs: what is said where a model for it has none of them
    quick: ClassVar[bool] = False  # few numbers are answered in less time than a thread takes to wake up
    compare: ClassVar[
        Callable[[Mapping[str, Any], Mapping[str, Any], CompareSettings], Difference] | None
    ] = None
    """Whether two answers to one picture differ, for a task of another package, as a staticmethod; without
    it they are compared field by field. Those of this package: vision/plans/compare.py."""

    def __init__(self, settings: VisionSettings) -> None:
        self._settings = settings

    @classmethod
    def recognise(cls, facts: Facts) -> Reading | None:  # noqa: ARG003
        """Returns how the outputs of a model would be read by a task of another package; those of this one
        have their rules in vision/head_rules.py."""
        return None

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[Any, tuple[TensorSpec, ...]]:
        """Settles a model that the settings say is for this task, and that no reading fits: its settings with
        nothing left open, and the outputs that are read. ConfigError if it cannot be."""
        if cls.needs:
            raise model.cannot(cls.name, cls.needs)
        return None, model.outputs

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """Returns the answer to one picture, from the model's outputs without the batch dimension."""
        raise NotImplementedError

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        """A new picture with the answer drawn in; `pixels` are RGB [h, w, 3], of any size."""
        raise cannot_draw(f"responses of {self.name}")

    @classmethod
    def examples(cls) -> dict[str, Any]:
        return {"model": "m", "version": "1", "image": {"width": 640, "height": 427}, **cls.example}

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Returns the JSON schema of an answer, with descriptions and an example."""
        who, answer = schema_of(Who), schema_of(cls.form)
        return {
            "title": cls.title,
            "type": "object",
            "properties": {**who["properties"], **answer["properties"]},
            "required": [*who["required"], *answer["required"]],
            "examples": [cls.examples()],
        }


def read(outputs: Mapping[str, Array], spec: TensorSpec) -> Array:
    """Returns one output, in the shape that was declared; without a leading 1 that was not declared."""
    if spec.name not in outputs:
        raise ModelError(f'the model did not return the output "{spec.name}"')
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
    """Returns the same as numbers that numpy is fast with."""
    found = outputs.get(spec.name)
    array = read(outputs, spec) if found is None or found.shape != spec.shape else found
    if spec.datatype is Datatype.BF16:
        array = widened(array, spec)
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def size(geometry: Geometry) -> Size:
    return {"width": geometry.width, "height": geometry.height}


def rounded(values: Array, digits: int) -> list[Any]:
    """Python floats with so many digits; float32 would drag its rounding error into the JSON."""
    numbers: list[Any] = np.round(values.astype(np.float64), digits).tolist()
    return numbers


def cannot_draw(what: str) -> InvalidInput:
    return InvalidInput(f"{what} cannot be drawn; ask for JSON, without overlay", field="overlay")


def activate(values: Array, activation: str | None, dtype: type[np.floating[Any]]) -> Array:
    """Values over the first dimension → probabilities; what is not a number has none."""
    wide: Array = values.astype(dtype)
    if activation == "softmax" and wide.ndim == 1 and len(wide) and math.isfinite(most := wide.max()):
        wide -= most  # classes of one picture, by far the most frequent: nothing is out of order
        np.exp(wide, out=wide)
        wide /= wide.sum()
        return wide
    if activation == "softmax":
        top = wide.max(axis=0, initial=-np.inf)
        if not np.isfinite(top).all():  # else nothing is out of order: −∞ has none
            wide = _as_numbers(wide, dtype)
            top = wide.max(axis=0, initial=-_far(dtype))
        wide -= top
        np.exp(wide, out=wide)
        wide /= wide.sum(axis=0)
    elif not np.isfinite(wide).all():  # to ask takes a tenth of the time of putting it in order
        wide = _as_numbers(wide, dtype)
    if activation == "sigmoid":  # in the form that never overflows
        np.tanh(np.multiply(wide, dtype(0.5), out=wide), out=wide)
        wide = wide * dtype(0.5) + dtype(0.5)
    elif activation == "minmax":
        low, high = float(wide.min()), float(wide.max())
        wide -= dtype(low)
        wide /= dtype(high - low if high > low else 1.0)
    return wide.clip(0.0, 1.0, out=wide)


def _far(dtype: type[np.floating[Any]]) -> float:
    """Returns what stands for infinity: the difference of two of them is still a number."""
    return float(np.finfo(dtype).max) / 4


def _as_numbers(wide: Array, dtype: type[np.floating[Any]]) -> Array:
    """Returns it with what is not a number as the least of all."""
    far = _far(dtype)
    numbers: Array = np.nan_to_num(wide, nan=-far, posinf=far, neginf=-far)
    return numbers
