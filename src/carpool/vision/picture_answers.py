"""Defines what the tasks answer: the exact JSON, field by field, and its schema for the OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from carpool.config.model import MAX_DETECTIONS, MAX_REGIONS
from carpool.config.rules import shown
from carpool.errors import InvalidInput

Box = Annotated[list[float], "x1, y1, x2, y2 in pixels of the upright image, from its top left corner; edges"]
Label = Annotated[str, "the class's line in the labels file, or its number if there is none"]
ClassId = Annotated[int, "the class's place in the model's output, from 0"]
Score = Annotated[float, "from 0 to 1"]


class Size(TypedDict):
    width: Annotated[int, "pixels of the upright image"]
    height: Annotated[int, "pixels of the upright image"]


class Who(TypedDict):
    """The front end puts this before what a task answers."""

    model: Annotated[str, "the model that answered"]
    version: Annotated[str, "its version"]
    assumed: NotRequired[
        Annotated[
            list[str],
            "settings of [image] that are not known, so the response may be wrong; absent if all are known",
        ]
    ]


class Answer(TypedDict):
    """Defines what every task's answer has."""

    image: Annotated[Size, "the image, after its orientation was applied"]


class Class(TypedDict):
    label: Label
    class_id: ClassId
    score: Score


class Detection(TypedDict):
    label: Label
    class_id: ClassId
    score: Score
    box: Box


class Pose(Detection):
    keypoints: Annotated[
        list[list[float]], "x, y in pixels of the image and, if the model has it, their confidence"
    ]


class RotatedBox(Detection):
    corners: Annotated[list[list[float]], "four points x, y in pixels of the image, in turn around the box"]
    angle: Annotated[float, "radians, clockwise, from the x axis to the side between the last two corners"]


class RunLengths(TypedDict):
    size: Annotated[list[int], "height, width"]
    counts: Annotated[list[int], "lengths of runs down the columns, from left to right, outside first"]


class Mask(TypedDict):
    label: Label
    class_id: ClassId
    score: Annotated[float, "of the object, or the mean probability inside the mask, from 0 to 1"]
    box: Annotated[list[float], "of the object, or the smallest around the mask: x1, y1, x2, y2"]
    png: NotRequired[Annotated[str, "base64 of an 8-bit PNG of the image's size, 255 inside, 0 outside"]]
    rle: NotRequired[Annotated[RunLengths, "COCO's uncompressed run lengths"]]


class Output(TypedDict):
    name: Annotated[str, "the output's name"]
    datatype: Annotated[str, "its datatype in the v2 protocol"]
    shape: Annotated[list[int], "without the batch"]
    data: Annotated[list[Any], "nested lists, outermost dimension first; null where a number is not finite"]


class Classes(Answer):
    classes: Annotated[list[Class], "the best first"]


class Detections(Answer):
    detections: Annotated[list[Detection], "the best first"]


class Poses(Answer):
    detections: Annotated[list[Pose], "the best first"]


class RotatedBoxes(Answer):
    detections: Annotated[list[RotatedBox], "the best first"]


class Range(TypedDict):
    low: Annotated[float, "what 0 in the PNG stands for"]
    high: Annotated[float, "what 65535 stands for"]
    png: Annotated[str, "base64 of a 16-bit PNG of the image's size; 0 also where the model has no value"]


class Depths(Answer):
    depth: Annotated[Range, "distance of each pixel, in the model's own unit"]


class Anomaly(TypedDict):
    score: Annotated[float, "how unusual the image is, in the model's own unit: more is more"]
    anomalous: Annotated[bool, "what the model says, or whether the score reaches the model's threshold"]
    map: Annotated[Range, "how unusual each pixel is"]
    mask: NotRequired[Annotated[str, "base64 of an 8-bit PNG of the image's size, 255 where it is anomalous"]]


class Anomalies(Answer):
    anomaly: Annotated[Anomaly, "how unusual the image is, and where"]


class RestoredPicture(TypedDict):
    width: Annotated[int, "of the image that the model made, in pixels"]
    height: Annotated[int, "of the image that the model made, in pixels"]
    format: Annotated[str, "of the file: png, webp or jpeg"]
    data: Annotated[str, "base64 of the file"]


class Restored(Answer):
    restored: Annotated[RestoredPicture, "the image that the model made"]


class Masks(Answer):
    masks: Annotated[list[Mask], "the best first"]


class Embedding(Answer):
    embedding: Annotated[list[float], "the image as a vector"]


Polygon = Annotated[
    list[list[float]],
    "four points x, y in pixels of the image, in turn, from the start of the text; they may lie beyond the "
    "edges",
]


class TextRegion(TypedDict):
    polygon: Polygon
    box: Box
    score: Score


class TextRegions(Answer):
    regions: Annotated[list[TextRegion], "the best first"]


class TextLine(TypedDict):
    text: Annotated[str, "the text of the line"]
    score: Annotated[float, "the mean probability of its characters, from 0 to 1"]
    polygon: Polygon
    box: Box


Finish = Annotated[str, "of text that a model writes: stop, or length where it was cut off"]


class ReadText(Answer):
    text: Annotated[str, "of a line, or of a page: rows in the order of reading, one below the other"]
    score: NotRequired[Annotated[float, "of a line: the mean probability of its characters, from 0 to 1"]]
    lines: NotRequired[Annotated[list[TextLine], "of a page, in the order of reading"]]
    finish_reason: NotRequired[Finish]


class CaptionText(Answer):
    text: Annotated[str, "the text that the model wrote"]
    finish_reason: Finish


class Outputs(Answer):
    outputs: Annotated[list[Output], "every output of the model as it is"]


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(form: Any) -> dict[str, Any]:
    """Returns the JSON schema of a TypedDict, or of what stands in one."""
    origin = get_origin(form)
    if origin is NotRequired:
        return schema_of(get_args(form)[0])
    if origin is Annotated:
        inner, description = get_args(form)[:2]
        return {**schema_of(inner), "description": description}
    if origin is list:
        return {"type": "array", "items": schema_of(get_args(form)[0])}
    if is_typeddict(form):
        fields = get_type_hints(form, include_extras=True)
        return {
            "type": "object",
            "properties": {name: schema_of(field) for name, field in fields.items()},
            "required": [name for name, field in fields.items() if get_origin(field) is not NotRequired],
        }
    return {"type": _PLAIN[form]} if form in _PLAIN else {}


# ---- what a client may ask

MAX_TOP_K = 1000
MASK_FORMATS = ("png", "rle")
PICTURE_FORMATS = ("png", "webp", "jpeg")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """None leaves it to the model's settings."""

    top_k: int = 5
    score: float | None = None
    iou: float | None = None
    max_detections: int | None = None
    threshold: float | None = None
    format: str = "png"
    overlay: bool = False
    extra: Mapping[str, object] = field(
        default_factory=dict, hash=False
    )  # of tasks from other packages, by name


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Option:
    """Describes one of them: how its text is read, what OpenAPI says of it, and in words. `read` gets name
    and text."""

    read: Callable[[str, str], object]
    schema: Mapping[str, Any]
    description: str


def _whole(most: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
            raise _wrong(name, f"a whole number from 1 to {most}", text)
        return int(text)

    return read


def fraction(name: str, text: str) -> float:
    try:
        number = float(text) if len(text) <= 32 else math.nan
    except ValueError:
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise _wrong(name, "a number from 0 to 1", text)
    return number


def flag(name: str, text: str) -> bool:
    word = text.lower()
    if word not in _YES + _NO:
        raise _wrong(name, "1 or 0", text)
    return word in _YES


def _mask_format(name: str, text: str) -> str:
    if text not in MASK_FORMATS:
        raise _wrong(name, " or ".join(MASK_FORMATS), text)
    return text


def _picture_format(name: str, text: str) -> str:
    if text not in PICTURE_FORMATS:
        raise _wrong(name, " or ".join(PICTURE_FORMATS), text)
    return text


def _wrong(name: str, expected: str, given: str) -> InvalidInput:
    return InvalidInput(f"{name} must be {expected}, not {shown(given)}", field=name)


_FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
TOP_K = Option(
    _whole(MAX_TOP_K),
    {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K, "default": DEFAULT.top_k},
    "Number of classes in the response, the best ones.",
)
SCORE = Option(fraction, _FRACTION, "Lowest score of a result, in place of the model's own setting.")
IOU = Option(
    fraction,
    _FRACTION,
    "Overlap (IoU) above which the box with the lower score is dropped, in place of the model's own setting.",
)
MOST_BOXES = Option(
    _whole(MAX_DETECTIONS),
    {"type": "integer", "minimum": 1, "maximum": MAX_DETECTIONS},
    "Most boxes in the response, the best ones.",
)
MOST_REGIONS = Option(
    _whole(MAX_REGIONS),
    {"type": "integer", "minimum": 1, "maximum": MAX_REGIONS},
    "Most regions in the response, the best ones.",
)
MAX_TOKENS = 1 << 20
MOST_TOKENS = Option(
    _whole(MAX_TOKENS),
    {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
    "Most tokens to write. Only for models that write text; others reject it.",
)
THRESHOLD = Option(
    fraction, _FRACTION, "Lowest probability of a pixel inside a mask, instead of the model's own setting."
)
MASK_FORMAT = Option(
    _mask_format,
    {"type": "string", "enum": list(MASK_FORMATS), "default": DEFAULT.format},
    "Format of masks: a PNG in base64, or COCO's uncompressed run lengths.",
)
PICTURE_FORMAT = Option(
    _picture_format,
    {"type": "string", "enum": list(PICTURE_FORMATS), "default": DEFAULT.format},
    "Format of the image in the response.",
)
OVERLAY = Option(
    flag,
    {"type": "boolean", "default": False},
    "Respond with the image and the result drawn in, instead of JSON.",
)
