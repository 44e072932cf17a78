"""What a task is, and how all of them read the model's outputs. docs/extending.md says how one is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from carpool.config.model import (
    DYNAMIC,
    ClassifySettings,
    DetectSettings,
    EmbedSettings,
    ImageSettings,
    ModelConfig,
    SegmentSettings,
)
from carpool.errors import ConfigError, InvalidInput, ModelError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.answer_forms import Size, Who, schema_of
from carpool.vision.geometry import Geometry
from carpool.vision.options import Option, Options
from carpool.vision.recognise import Picture, in_words

SCORE_DIGITS, BOX_DIGITS = 6, 2  # of numbers in answers: beyond this is noise


TaskTable: TypeAlias = ClassifySettings | DetectSettings | SegmentSettings | EmbedSettings


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Nothing is left open: the format, the activation and the outputs are known. Shapes have no batch."""

    task: str
    image: ImageSettings
    input: TensorSpec  # three dimensions, in the order of image.layout
    outputs: tuple[TensorSpec, ...]  # those the task reads: for boxes_scores the boxes, then the scores
    table: TaskTable | None = None  # the task's own settings, if it has any
    labels: tuple[str, ...] = ()
    encoded: bool = False  # the model's device decodes pictures; `image` says what is left to do elsewhere

    def label(self, class_id: int) -> str:
        name = self.labels[class_id] if class_id < len(self.labels) else ""
        return name or str(class_id)


@dataclass(slots=True)
class LoadedModel:
    """What a task is told about a model that takes pictures. `notes` hears what was concluded, in words."""

    config: ModelConfig
    picture: Picture
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...]
    notes: list[str]

    def cannot(self, task: str, expected: str) -> ConfigError:
        why = f'task = "{task}"' if self.config.task else f"[{task}]"
        found = in_words(self.outputs)
        return ConfigError(f"{self.config.name}: {why} needs {expected}; the model's outputs are {found}")

    def note_labels(self, classes: int) -> None:
        if self.labels and classes not in (DYNAMIC, len(self.labels)):
            self.notes.append(f"{len(self.labels)} labels for {classes} classes: the rest go by number")

    def counted_labels(self) -> str:
        return f" and {len(self.labels)} labels" if self.labels else ""


class Verdict(NamedTuple):
    """That a model is for a task. Of several the strongest counts."""

    strength: int
    why: str


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
    quick: ClassVar[bool] = False  # few numbers are answered in less time than a thread takes to wake up

    def __init__(self, settings: VisionSettings) -> None:
        self._settings = settings

    @classmethod
    def recognise(cls, model: LoadedModel) -> Verdict | None:  # noqa: ARG003
        """Whether the outputs of a model show beyond doubt that it is for this task."""
        return None

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[Any, tuple[TensorSpec, ...]]:
        """The settings with nothing left open, and the outputs that are read. ConfigError if it cannot be."""
        return None, model.outputs

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        """The answer to one picture, from the model's outputs without the batch dimension."""
        raise NotImplementedError

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        """A new picture with the answer drawn in; `pixels` are RGB [h, w, 3], of any size."""
        raise cannot_draw(f"answers of {self.name}")

    @classmethod
    def examples(cls) -> dict[str, Any]:
        return {"model": "m", "version": "1", "image": {"width": 640, "height": 427}, **cls.example}

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """JSON schema of an answer, with descriptions and an example."""
        who, answer = schema_of(Who), schema_of(cls.form)
        return {
            "title": cls.title,
            "type": "object",
            "properties": {**who["properties"], **answer["properties"]},
            "required": [*who["required"], *answer["required"]],
            "examples": [cls.examples()],
        }


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


_ALREADY = ("prob", "softmax", "sigmoid")  # in the name of an output: it holds probabilities


def holds_probabilities(spec: TensorSpec) -> bool:
    return any(word in spec.name.lower() for word in _ALREADY)


def activation_in_words(activation: str | None) -> str:
    return "the" if activation == "none" else f"the {activation} of"
