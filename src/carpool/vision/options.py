"""What a client may ask of one answer. A name or a value that means nothing is an error, never ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.config.rules import shown
from carpool.config.toml import MAX_DETECTIONS
from carpool.errors import InvalidInput

MAX_TOP_K = 1000
MASK_FORMATS = ("png", "rle")
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
    """One of them: how its text is read, what OpenAPI says of it, and in words. `read` gets name and text."""

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


def _wrong(name: str, expected: str, given: str) -> InvalidInput:
    return InvalidInput(f"{name} must be {expected}, not {shown(given)}", field=name)


_FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
TOP_K = Option(
    _whole(MAX_TOP_K),
    {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K, "default": DEFAULT.top_k},
    "How many classes to answer, the best ones.",
)
SCORE = Option(fraction, _FRACTION, "Lowest score that counts, instead of the model's own setting.")
IOU = Option(
    fraction,
    _FRACTION,
    "Overlap above which the weaker of two boxes goes, instead of the model's own setting.",
)
MOST_BOXES = Option(
    _whole(MAX_DETECTIONS),
    {"type": "integer", "minimum": 1, "maximum": MAX_DETECTIONS},
    "How many boxes to answer at most, the best ones.",
)
THRESHOLD = Option(
    fraction, _FRACTION, "Lowest probability of a pixel inside a mask, instead of the model's own setting."
)
MASK_FORMAT = Option(
    _mask_format,
    {"type": "string", "enum": list(MASK_FORMATS), "default": DEFAULT.format},
    "How masks are written: a PNG in base64, or COCO's uncompressed run lengths.",
)
OVERLAY = Option(
    flag,
    {"type": "boolean", "default": False},
    "Answer the picture with the result drawn in, instead of JSON.",
)
