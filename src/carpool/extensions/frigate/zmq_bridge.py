"""Answers Frigate's `zmq` detector: tensors in, 20 rows out.

Pure functions of messages; `carpool frigate` has the socket. A row is class, score, y1, x1, y2, x2: sides are
shares of the input. A message that cannot be answered gets rows of zeros, because Frigate waits for each
reply before it sends the next request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from carpool.errors import InvalidInput
from carpool.types import Array

ROWS = 20
_NOTHING = np.zeros((ROWS, 6), np.float32).tobytes()
_MOST_PIXELS = 4096 * 4096

Detect: TypeAlias = Callable[[Array], Sequence[Mapping[str, Any]]]
"""Returns what the server found in pixels [height, width, 3]: label, class_id, score and box of each."""


def reply(frames: Sequence[bytes], detect: Detect, numbers: Mapping[str, int]) -> bytes:
    """Returns the answer to one message. `numbers` are the classes of labels in Frigate; without them, those
    of the model are used. Raises `InvalidInput` for a message that is none of Frigate's, and what `detect`
    raises."""
    asked = _header(frames)
    if asked.get("model_request"):
        return json.dumps({"model_available": True, "model_loaded": True}).encode()
    if asked.get("model_data"):
        return json.dumps({"model_saved": True, "model_loaded": True}).encode()
    pixels = _pixels(asked, frames)
    return _rows(detect(pixels), numbers, *pixels.shape[:2])


def nothing() -> bytes:
    """Returns rows for an image in which nothing was found."""
    return _NOTHING


def _header(frames: Sequence[bytes]) -> dict[str, Any]:
    try:
        asked = json.loads(frames[0])
    except (ValueError, IndexError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise InvalidInput("the first part of a message must be a JSON object")
    return asked


def _pixels(asked: Mapping[str, Any], frames: Sequence[bytes]) -> Array:
    """Returns the image as [height, width, 3], whichever order its tensor has."""
    shape, dtype = asked.get("shape"), asked.get("dtype")
    sides = isinstance(shape, list) and all(type(side) is int and 0 < side <= 1 << 15 for side in shape)
    if not sides or len(frames) < 2 or dtype not in ("uint8", "float32"):
        raise InvalidInput("a message must have a shape, a dtype (uint8 or float32) and a tensor")
    assert isinstance(shape, list)
    if len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 3 or 3 not in (shape[0], shape[2]) or math.prod(shape) > 3 * _MOST_PIXELS:
        raise InvalidInput("a tensor must have the shape [1, height, width, 3] or [1, 3, height, width]")
    try:
        tensor: Array = np.frombuffer(frames[1], dtype).reshape(shape)
    except ValueError:
        raise InvalidInput("the tensor does not have the bytes of its shape") from None
    if tensor.dtype == np.float32:
        whole = 255.0 if float(tensor.max()) <= 1.0 else 1.0
        tensor = np.nan_to_num(tensor * whole).clip(0, 255).astype(np.uint8)
    return tensor if shape[2] == 3 else np.ascontiguousarray(tensor.transpose(1, 2, 0))


def _rows(found: Sequence[Mapping[str, Any]], numbers: Mapping[str, int], height: int, width: int) -> bytes:
    rows = np.zeros((ROWS, 6), np.float32)
    known = [one for one in found if not numbers or one["label"] in numbers]
    for row, one in zip(rows, sorted(known, key=lambda one: -one["score"]), strict=False):
        left, top, right, bottom = one["box"]
        number = numbers[one["label"]] if numbers else one["class_id"]
        row[:] = number, one["score"], top / height, left / width, bottom / height, right / width
    return rows.tobytes()


def read_labelmap(text: str) -> dict[str, int]:
    """Reads Frigate's labelmap: lines like `0  person`, or one label a line. The first number of a label
    counts."""
    found: dict[str, int] = {}
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        first, _, rest = line.partition(" ")
        numbered = first.isascii() and first.isdigit() and len(first) <= 6 and bool(rest.strip())
        found.setdefault(*((rest.strip(), int(first)) if numbered else (line, number)))
    return found
