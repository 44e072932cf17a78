"""Answers drawn into the picture, and pictures as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.canvas import INK, PAPER, Canvas, colour
from carpool.vision.regions import NOTHING, Regions
from carpool.vision.results import Class, Detection

_FORMATS = {  # file ending, setting, longest side that the format can hold
    "jpeg": (".jpg", cv2.IMWRITE_JPEG_QUALITY, 65_500),
    "png": (".png", None, 1_000_000),
    "webp": (".webp", cv2.IMWRITE_WEBP_QUALITY, 16_383),
}
FORMATS = tuple(_FORMATS)
_TINT, _LIGHT_TINT = 0.45, 0.15  # how much of a mask is colour; one alone needs less
_SHADE = 0.45  # how bright the rest stays
_FASTEST_PNG = 1
_MOST_ROWS = 10
_MOST_TAGS = 100  # more could not be read, and finding places for them takes time
_COARSE = 256  # the grid on which the middle of a mask is looked for


def encode(pixels: Array, kind: str, quality: int = 90) -> bytes:
    """RGB pixels as a "jpeg", "png" or "webp" file; PNG ignores the quality."""
    if kind not in _FORMATS:
        raise InvalidInput(f"pictures are not written as {shown(kind)}; {nearest(kind, FORMATS)}")
    ending, key, longest = _FORMATS[kind]
    height, width = pixels.shape[:2]
    if max(height, width) > longest:
        raise InvalidInput(f"{width} × {height} pixels do not fit into a {kind} file; ask for png")
    settings = (cv2.IMWRITE_PNG_COMPRESSION, _FASTEST_PNG) if key is None else (key, quality)
    done, data = cv2.imencode(ending, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), settings)
    if not done:
        raise InvalidInput(f"this picture cannot be written as {kind}; ask for another format")
    return data.tobytes()


def detections(pixels: Array, found: Sequence[Detection], size: tuple[int, int]) -> Array:
    """Boxes with their labels and scores; `size` is the width and height that the boxes are for."""
    canvas = Canvas(pixels)
    scale = np.array([canvas.width / size[0], canvas.height / size[1]] * 2)
    boxes = [(np.array(one["box"]) * scale).tolist() for one in found]
    for one, box in reversed(list(zip(found, boxes, strict=True))):  # the best on top
        canvas.box(box, colour(one["class_id"]))
    for one, box in list(zip(found, boxes, strict=True))[:_MOST_TAGS]:  # the best choose first
        canvas.tag_box(box, f"{one['label']} {one['score']:.2f}", colour(one["class_id"]))
    return canvas.pixels


def classes(pixels: Array, found: Sequence[Class]) -> Array:
    """A panel in the corner: a row per class with its score as a bar."""
    canvas = Canvas(pixels)
    gap, letters = canvas.gap, canvas.letters
    row = letters + 2 * gap
    rows = found[: max(1, min(_MOST_ROWS, (canvas.height - 4 * gap) // row))]
    if not rows:
        return canvas.pixels
    numbers = [f"{one['score']:.1%}" for one in rows]
    number = max(map(canvas.text_width, numbers))
    name = max(canvas.text_width(one["label"]) for one in rows)
    bar = 5 * letters
    wanted = name + number + bar + 8 * gap
    width = min(wanted, canvas.width - 2 * gap)
    left, top = gap, gap
    canvas.panel((left, top, left + width, top + len(rows) * row + 2 * gap), INK, 0.72, letters // 2)
    for index, (one, text) in enumerate(zip(rows, numbers, strict=True)):
        y = top + gap + index * row
        middle = y + row / 2
        start = left + width - 2 * gap - number - bar - 2 * gap
        if width == wanted:  # where there is no room for bars, the words go first
            _bar(canvas, (start, round(middle - letters / 4), bar, letters // 2), one)
        canvas.text(left + 2 * gap, middle, one["label"], PAPER, "lm")
        canvas.text(left + width - 2 * gap, middle, text, PAPER, "rm")
    return canvas.pixels


def _bar(canvas: Canvas, place: tuple[int, int, int, int], one: Class) -> None:
    x, y, width, height = place
    canvas.panel((x, y, x + width, y + height), PAPER, 0.22, height // 2)
    full = round(width * min(1.0, one["score"]))
    if full:
        canvas.panel((x, y, x + full, y + height), colour(one["class_id"]), 1.0, height // 2)


def regions(pixels: Array, found: Regions, label: Callable[[int], str]) -> Array:
    """Masks in their colours with an outline; what belongs to none is darkened."""
    canvas = Canvas(pixels)
    size = (canvas.width, canvas.height)
    index = cv2.resize(found.index, size, interpolation=cv2.INTER_NEAREST)
    _darken(canvas.pixels, (index == NOTHING).view(np.uint8))
    spots = []
    for region in found.found:
        mask = (index == region.class_id).view(np.uint8)
        if mask.any():
            _tint(canvas, mask, colour(region.class_id), _TINT if len(found.found) > 1 else _LIGHT_TINT)
            spots.append((region, _middle(mask)))
    for region, (x, y) in spots[:_MOST_TAGS]:
        canvas.tag_point(x, y, f"{label(region.class_id)} {region.score:.2f}", colour(region.class_id))
    return canvas.pixels


def _darken(pixels: Array, mask: Array) -> None:
    cv2.copyTo(cv2.convertScaleAbs(pixels, alpha=_SHADE), mask, pixels)


def _tint(canvas: Canvas, mask: Array, own: tuple[int, int, int], share: float) -> None:
    x, y, width, height = cv2.boundingRect(mask)
    part = np.ascontiguousarray(canvas.pixels[y : y + height, x : x + width])
    inside = np.ascontiguousarray(mask[y : y + height, x : x + width])
    colours = np.full_like(part, np.array(own, np.uint8))
    cv2.copyTo(cv2.addWeighted(part, 1 - share, colours, share, 0), inside, part)
    canvas.pixels[y : y + height, x : x + width] = part
    outlines, _ = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(canvas.pixels, outlines, -1, own, max(1, canvas.line - 1), cv2.LINE_AA)


def _middle(mask: Array) -> tuple[float, float]:
    """The point furthest from any edge of the mask, where a tag covers the least."""
    height, width = mask.shape
    shrink = min(1.0, _COARSE / max(height, width))
    coarse_size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
    coarse = cv2.resize(mask * np.uint8(255), coarse_size, interpolation=cv2.INTER_AREA)
    framed = cv2.copyMakeBorder((coarse > 0).view(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    distance = cv2.distanceTransform(framed, cv2.DIST_L2, 3)
    _, _, _, (x, y) = cv2.minMaxLoc(distance)
    return (x - 0.5) / coarse_size[0] * width, (y - 0.5) / coarse_size[1] * height
