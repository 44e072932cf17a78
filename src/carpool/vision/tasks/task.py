"""Defines what a task is, and how all of them read the model's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig
from carpool.errors import ConfigError, InvalidInput, ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.output_facts import FLOATS, Facts
from carpool.vision.picture_answers import Option, Options, Size, Who, schema_of
from carpool.vision.recognition import Reading, TaskTable

if TYPE_CHECKING:
    from carpool.vision.compare_settings import CompareSettings
    from carpool.vision.likeness import Difference

# ---- what a model's tensors look like

_PICTURES = (*FLOATS, Datatype.UINT8, Datatype.INT8, Datatype.UINT16, Datatype.INT32)
_CHANNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class Picture:
    """The input that takes the picture, without any batch; a side that varies is -1."""

    spec: TensorSpec
    layout: str
    height: int
    width: int
    leading: int | None  # the first dimension, where the model has no batches and its tensors begin with one

    @property
    def channels(self) -> int:
        return self.spec.shape[0 if self.layout == "nchw" else 2]


def find_picture(config: ModelConfig, signature: Signature) -> Picture | None:
    """Returns the one required input, if it has three dimensions of which one is 1 or 3 channels."""
    optional = {tensor.name for tensor in config.inputs if tensor.optional}
    required = [spec for spec in signature.inputs if spec.name not in optional]
    if len(required) != 1 or required[0].datatype not in _PICTURES:
        return None
    spec, leading = required[0], None
    if not signature.max_batch and len(spec.shape) == 4 and spec.shape[0] in (1, DYNAMIC):
        leading = spec.shape[0]
        spec = replace(spec, shape=spec.shape[1:])
    if len(spec.shape) != 3:
        return None
    declared = config.image.layout if config.image else None
    declared = declared or next((t.layout for t in config.inputs if t.name == spec.name), None)
    for layout, channel in (("nchw", 0), ("nhwc", 2)):
        known = spec.shape[channel] in _CHANNELS
        if declared in (None, layout) and (known or (declared and spec.shape[channel] == DYNAMIC)):
            height, width = (side for axis, side in enumerate(spec.shape) if axis != channel)
            return Picture(spec, layout, height, width, leading)
    return None


AS_TENSORS = "Send tensors to POST /v2/models/NAME/infer, each input under its name"


def no_picture(config: ModelConfig, signature: Signature) -> tuple[str, bool]:
    """Returns why no input takes a picture, and whether one looks as if it did."""
    optional = {tensor.name for tensor in config.inputs if tensor.optional}
    required = [spec for spec in signature.inputs if spec.name not in optional]
    if not required:
        return "each of its inputs may be left out", False
    likely = any(_like_a_picture(spec, signature) for spec in required)
    found = f"it takes {in_words(required)}"
    if len(required) != 1:
        other = next((spec for spec in required if not _like_a_picture(spec, signature)), required[-1])
        why = f"{found}: {len(required)} inputs, and an image route fills one"
        set_it = f'If "{other.name}" is the same for every image, set [inputs.{other.name}] in model.toml'
        return f"{why}. {set_it}" if likely else why, likely
    spec = required[0]
    if spec.datatype not in _PICTURES:
        return f"{found}: values of {spec.datatype.value} are no pixels", False
    shape = spec.shape
    if not signature.max_batch and len(shape) == 4 and shape[0] > 1:
        why = (
            f"a fixed batch of {shape[0]}, which one image does not fill: export it with a batch of any size"
        )
        return f"{found}: {why}", likely
    sides = shape if signature.max_batch else shape[1:]
    if len(sides) > 3:
        return f"{found}: {len(sides)} dimensions beside the batch are those of a video or a volume", likely
    if len(sides) == 3 and any(side == DYNAMIC for side in (sides[0], sides[2])):
        why = 'nothing says how many channels it has: set layout = "nchw" or "nhwc" in [image] of model.toml'
        return f"{found}: {why}", likely
    if len(sides) == 3:
        channels = min(sides[0], sides[2])
        return f"{found}: {channels} channels, and images have 1 or 3", likely
    return f"{found}: images have three dimensions beside the batch", False


def _like_a_picture(spec: TensorSpec, signature: Signature) -> bool:
    sides = spec.shape if signature.max_batch else spec.shape[1:]
    return spec.datatype in _PICTURES and len(sides) >= 3


def outputs_of(signature: Signature, picture: Picture) -> tuple[TensorSpec, ...]:
    """Returns the outputs for one picture: without the leading dimension, where the input has one too."""
    if picture.leading is None:
        return signature.outputs
    return tuple(
        replace(spec, shape=spec.shape[1:]) if spec.shape[:1] == (picture.leading,) else spec
        for spec in signature.outputs
    )


def in_words(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f'"{spec.name}" {list(spec.shape)}' for spec in specs) or "none"


SCORE_DIGITS, BOX_DIGITS = 6, 2  # of numbers in answers: beyond this is noise


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Nothing is left open: the format, the activation and the outputs are known. Shapes have no batch."""

    task: str
    image: ImageSettings
    input: TensorSpec  # three dimensions, in the order of image.layout
    outputs: tuple[TensorSpec, ...]  # those the task reads, in the order of its format
    table: TaskTable | None = None  # the task's own settings, if it has any
    labels: tuple[str, ...] = ()
    encoded: bool = False  # the model's device decodes pictures; `image` says what is left to do elsewhere
    assumed: tuple[str, ...] = ()  # settings of [image] that nothing says

    @property
    def sides(self) -> tuple[int, int]:
        """Returns height and width that the model's input has; -1: any."""
        shape = self.input.shape
        return (shape[1], shape[2]) if self.image.layout == "nchw" else (shape[0], shape[1])

    def label(self, class_id: int) -> str:
        name = self.labels[class_id] if class_id < len(self.labels) else ""
        return name or str(class_id)


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


def widened(array: Array, spec: TensorSpec) -> Array:
    """Returns bfloat16, which numpy lacks, as float32; anything else as it is."""
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
