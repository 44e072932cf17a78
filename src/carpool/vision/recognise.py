"""What a model's tensors look like: which input takes the picture, and which outputs a task could read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from carpool.config.model import DYNAMIC, ModelConfig
from carpool.types import Datatype, Signature, TensorSpec

FLOATS = (Datatype.FP32, Datatype.FP16, Datatype.FP64, Datatype.BF16)
_PICTURES = (*FLOATS, Datatype.UINT8, Datatype.INT8, Datatype.UINT16, Datatype.INT32)
_CHANNELS = (1, 3)
_IMAGENET = 1000
_SMALLEST_MAP = 8  # a map may be this many times smaller than the picture; deeper ones are features
_YOLO_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (16, 32))


@dataclass(frozen=True, slots=True)
class Picture:
    """The input that takes the picture, without any batch; a side that varies is -1."""

    spec: TensorSpec
    layout: str
    height: int
    width: int
    leading: int | None  # the first dimension, where the model has no batches and its tensors begin with one


def find_picture(config: ModelConfig, signature: Signature) -> Picture | None:
    """The one required input, if it has three dimensions of which one is 1 or 3 channels."""
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


def outputs_of(signature: Signature, picture: Picture) -> tuple[TensorSpec, ...]:
    """The outputs for one picture: without the leading dimension, where the input has one too."""
    if picture.leading is None:
        return signature.outputs
    return tuple(
        replace(spec, shape=spec.shape[1:]) if spec.shape[:1] == (picture.leading,) else spec
        for spec in signature.outputs
    )


def in_words(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f'"{spec.name}" {list(spec.shape)}' for spec in specs) or "none"


# ---- vectors --------------------------------------------------------------------------------------------


def length(spec: TensorSpec) -> int | None:
    """Of a vector, however many dimensions of 1 surround it; None for anything else."""
    sides = [side for side in spec.shape if side != 1]
    if spec.datatype not in FLOATS or not spec.shape or len(sides) > 1:
        return None
    return sides[0] if sides else 1


def is_classes(spec: TensorSpec, labels: Sequence[str]) -> bool:
    """As many numbers as labels, or as ImageNet has classes."""
    return length(spec) == (len(labels) or _IMAGENET)


# ---- detectors ------------------------------------------------------------------------------------------


def boxes_and_scores(outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, TensorSpec] | None:
    """[anchors, 4] and [anchors, classes]; of two alike, the one called …box… holds the boxes."""
    tables = [spec for spec in outputs if len(spec.shape) == 2 and spec.datatype in FLOATS]
    tables.sort(key=lambda spec: "box" not in spec.name.lower())
    for boxes in tables:
        for scores in tables:
            same = boxes.shape[0] == scores.shape[0]
            if scores is not boxes and boxes.shape[1] == 4 and same and scores.shape[1] != DYNAMIC:
                return boxes, scores
    return None


def yolo_format(spec: TensorSpec, labels: Sequence[str], picture: Picture) -> str | None:
    """Told by the number of labels, or by the number of anchors that a picture of this size has."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS:
        return None
    for form, fields, anchors, extra, per_cell in (
        ("yolov8", spec.shape[0], spec.shape[1], 4, 1),
        ("yolov5", spec.shape[1], spec.shape[0], 5, 3),
    ):
        if fields <= extra:
            continue
        if len(labels) == fields - extra or (not labels and anchors in _anchor_counts(picture, per_cell)):
            return form
    return None


def likely_yolo(spec: TensorSpec) -> str | None:
    """For an output known to be a detector's: the shorter side holds the fields of one anchor."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS or DYNAMIC in spec.shape:
        return None
    rows, columns = spec.shape
    if 4 < rows < columns:
        return "yolov8"
    return "yolov5" if 5 < columns < rows else None


def can_be(form: str, spec: TensorSpec) -> bool:
    """Whether this output may hold what a declared YOLO format says."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS:
        return False
    fields, least = (spec.shape[0], 5) if form == "yolov8" else (spec.shape[1], 6)
    return fields == DYNAMIC or fields >= least


def _anchor_counts(picture: Picture, per_cell: int) -> set[int]:
    if DYNAMIC in (picture.height, picture.width):
        return set()
    return {
        per_cell * sum(-(-picture.height // stride) * -(-picture.width // stride) for stride in strides)
        for strides in _YOLO_STRIDES
    }


# ---- maps -----------------------------------------------------------------------------------------------


def map_shape(spec: TensorSpec, picture: Picture) -> tuple[int, int, int] | None:
    """Classes, height, width of maps; the classes stand where the input has its channels."""
    if spec.datatype not in FLOATS or len(spec.shape) not in (2, 3):
        return None
    if len(spec.shape) == 2:
        return 1, spec.shape[0], spec.shape[1]
    first, second, third = spec.shape
    return (first, second, third) if picture.layout == "nchw" else (third, first, second)


def is_map(spec: TensorSpec, labels: Sequence[str], picture: Picture) -> bool:
    """As many classes as labels (or one), and sides in the picture's proportions and not much smaller."""
    shape = map_shape(spec, picture)
    if shape is None or shape[0] == DYNAMIC or (shape[0] != 1 and labels and shape[0] != len(labels)):
        return False
    for side, full in ((shape[1], picture.height), (shape[2], picture.width)):
        if DYNAMIC in (side, full):
            if side != full:
                return False
        elif not full <= side * _SMALLEST_MAP or side > full:
            return False
    return shape[1] * picture.width == shape[2] * picture.height
