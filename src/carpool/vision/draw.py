"""Answers drawn into the picture, and pictures as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.mask_regions import NOTHING, Regions
from carpool.vision.picture_answers import Class, Detection, Mask, Pose, RotatedBox

# ---- A picture to draw on: lines, tags and text that can be read on any size and any background

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # x1, y1, x2, y2

INK: Colour = (16, 20, 26)
PAPER: Colour = (255, 255, 255)
_SMALLEST_SIDE = 480  # the longer side of a smaller picture is enlarged to about this, for the text's sake
_LARGEST_FACTOR = 16
_LONGEST_TEXT = 60
_SMOOTH = 4  # tags are drawn so many times larger and scaled down: that rounds their corners
_GOLDEN = 0.61803398875
_FINE, _UNIT = 4, 16  # OpenCV takes coordinates in 16ths of a pixel
_FURTHEST = 1 << 24  # in such units: what lies beyond is as good as there


@lru_cache(maxsize=1024)
def colour(class_id: int) -> Colour:
    """Returns a class's own colour, always the same: steps of the golden ratio keep neighbours far apart."""
    hue = 2 * math.pi * ((0.6 + class_id * _GOLDEN) % 1.0)
    lightness, chroma = ((0.74, 0.17), (0.66, 0.2), (0.82, 0.14))[class_id % 3]
    return _from_oklch(lightness, chroma, hue)


def _from_oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """Converts Björn Ottosson's OKLab, in which equal steps look equally large, to sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = (_gamma(min(1.0, max(0.0, part))) for part in linear)
    return red, green, blue


def _gamma(part: float) -> int:
    return round(255 * (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055))


def ink_on(background: Colour) -> Colour:
    """Dark or light, whichever can be read."""
    brightness = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2]
    return INK if brightness > 140 else PAPER


class Canvas:
    """Holds a copy of the picture, enlarged if it is tiny. Sizes of lines and letters follow the
    picture's."""

    def __init__(self, pixels: Array) -> None:
        height, width = pixels.shape[:2]
        factor = min(_LARGEST_FACTOR, -(-_SMALLEST_SIDE // max(height, width)))
        if factor > 1:
            size = (width * factor, height * factor)
            self.pixels: Array = cv2.resize(pixels, size, interpolation=cv2.INTER_CUBIC)
        else:
            self.pixels = np.array(pixels, np.uint8, order="C")
        self.height, self.width = self.pixels.shape[:2]
        extent = math.sqrt(self.height * self.width)
        self.line = max(2, round(extent / 230))
        self.letters = max(12, round(extent / 36))
        self.gap = max(2, self.letters // 4)
        self._font = ImageFont.load_default(self.letters)
        self._taken: list[Rectangle] = []

    # ---- boxes ------------------------------------------------------------------------------------------

    def box(self, corners: Sequence[float], own: Colour) -> None:
        """Draws a frame in the class's colour with a dark rim, so that it shows on its own colour too."""
        x1, y1, x2, y2 = corners
        half = self.line / 2
        left, top = max(half, x1), max(half, y1)
        right, bottom = min(self.width - half, x2), min(self.height - half, y2)
        first = (round(left * _UNIT), round(top * _UNIT))
        last = (round(max(left, right) * _UNIT), round(max(top, bottom) * _UNIT))
        for thickness, shade in ((self.line + 2, (own[0] // 4, own[1] // 4, own[2] // 4)), (self.line, own)):
            cv2.rectangle(self.pixels, first, last, shade, thickness, cv2.LINE_AA, _FINE)

    def polyline(self, points: Sequence[Array], own: Colour) -> None:
        """Draws lines from point to point, with a dark rim as well."""
        path = np.rint(np.array(points) * _UNIT).clip(-_FURTHEST, _FURTHEST).astype(np.int32)
        for thickness, shade in ((self.line + 2, (own[0] // 4, own[1] // 4, own[2] // 4)), (self.line, own)):
            cv2.polylines(self.pixels, [path], False, shade, thickness, cv2.LINE_AA, _FINE)

    def dot(self, point: Array, own: Colour) -> None:
        place = tuple(np.rint(point * _UNIT).clip(-_FURTHEST, _FURTHEST).astype(int).tolist())
        for radius, shade in ((self.line + 2, (own[0] // 4, own[1] // 4, own[2] // 4)), (self.line + 1, own)):
            cv2.circle(self.pixels, place, radius * _UNIT, shade, cv2.FILLED, cv2.LINE_AA, _FINE)

    # ---- tags -------------------------------------------------------------------------------------------

    def tag_box(self, corners: Sequence[float], text: str, own: Colour) -> None:
        """Draws a tag at a corner of the box where no other tag is yet: above, inside, below."""
        width, height = self.tag_size(text)
        x1, y1, x2, y2 = (round(side) for side in corners)
        x1, y1 = x1 - self.line // 2, y1 - self.line // 2
        places = (
            (x1, y1 - height),
            (x1, y1),
            (x2 - width, y1 - height),
            (x1, y2),
            (x1, y2 - height),
            (x2 - width, y2 - height),
        )
        self._tag([self._inside(x, y, width, height) for x, y in places], text, own)

    def tag_point(self, x: float, y: float, text: str, own: Colour) -> None:
        """Draws a tag around a point; a little above or below it where another tag is there."""
        width, height = self.tag_size(text)
        left, top = round(x - width / 2), round(y - height / 2)
        steps = (0, -height, height, -2 * height, 2 * height)
        self._tag([self._inside(left, top + step, width, height) for step in steps], text, own)

    def tag_size(self, text: str) -> tuple[int, int]:
        return self.text_width(text) + 3 * self.gap, self.letters + 2 * self.gap

    def text_width(self, text: str) -> int:
        return math.ceil(self._font.getlength(_line(text)))

    def _inside(self, x: int, y: int, width: int, height: int) -> Rectangle:
        left = max(0, min(x, self.width - width))
        top = max(0, min(y, self.height - height))
        return left, top, left + width, top + height

    def _tag(self, places: Sequence[Rectangle], text: str, own: Colour) -> None:
        free = (place for place in places if not any(_overlap(place, taken) for taken in self._taken))
        place = next(free, places[0])
        self._taken.append(place)
        self.panel(place, own, 0.92)
        middle = (place[1] + place[3]) / 2
        self.text((place[0] + place[2]) / 2, middle, text, ink_on(own), "mm")

    # ---- what they are made of --------------------------------------------------------------------------

    def panel(self, place: Rectangle, fill: Colour, opacity: float, radius: int | None = None) -> None:
        """Draws a filled rectangle with round corners."""
        width, height = place[2] - place[0], place[3] - place[1]
        if width <= 0 or height <= 0:
            return
        large = Image.new("L", (width * _SMOOTH, height * _SMOOTH), 0)
        bend = (self.letters // 4 if radius is None else radius) * _SMOOTH
        edges = (0, 0, width * _SMOOTH - 1, height * _SMOOTH - 1)
        ImageDraw.Draw(large).rounded_rectangle(edges, bend, fill=round(255 * opacity))
        shape = cv2.resize(np.asarray(large), (width, height), interpolation=cv2.INTER_AREA)
        self._stamp(place[0], place[1], shape, fill)

    def text(self, x: float, y: float, text: str, ink: Colour, anchor: str) -> None:
        """One line of text; the anchor is Pillow's: "mm" for the middle, "lm" and "rm" for the ends."""
        line = _line(text)
        width, height = self.text_width(line) + 2, 2 * self.letters
        left = {"l": x, "m": x - width / 2, "r": x - width}[anchor[0]]
        shape = Image.new("L", (width, height), 0)
        ImageDraw.Draw(shape).text((1, height / 2), line, 255, self._font, "lm")
        self._stamp(round(left), round(y - height / 2), np.asarray(shape), ink)

    def _stamp(self, x: int, y: int, shape: Array, ink: Colour) -> None:
        """Lay a colour on, as opaque as `shape` says, cut at the picture's edges."""
        top, left = max(0, -y), max(0, -x)
        shape = shape[top : max(top, self.height - y), left : max(left, self.width - x)]
        if not shape.size:
            return
        y, x = y + top, x + left
        under = self.pixels[y : y + shape.shape[0], x : x + shape.shape[1]]
        opacity = shape[:, :, None].astype(np.float32) / 255
        under[:] = np.rint(under + (np.array(ink, np.float32) - under) * opacity).astype(np.uint8)


def _line(text: str) -> str:
    """One line that ends somewhere, whatever a labels file holds."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean if len(clean) <= _LONGEST_TEXT else clean[: _LONGEST_TEXT - 1] + "…"


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


# ---- what the tasks draw

_FORMATS = {  # file ending, setting, longest side that the format can hold
    "jpeg": (".jpg", cv2.IMWRITE_JPEG_QUALITY, 65_500),
    "png": (".png", None, 1_000_000),
    "webp": (".webp", cv2.IMWRITE_WEBP_QUALITY, 16_383),
}
FORMATS = tuple(_FORMATS)
_TINT, _LIGHT_TINT = 0.45, 0.15  # how much of a mask is colour; one alone needs less
_HEAT = 0.7  # how much of a hot place is colour
_SHADE = 0.45  # how bright the rest stays
_FASTEST_PNG = 1
_MOST_ROWS = 10
_MOST_LINES = 500
_MOST_TAGS = 100  # more could not be read, and finding places for them takes time
_UNSURE = 0.3  # keypoints below this are not drawn
_PERSON = 17  # keypoints of a person in COCO, and which of them are joined:
_LIMBS = (
    *((0, 1), (0, 2), (1, 3), (2, 4), (5, 6), (5, 7), (7, 9), (6, 8), (8, 10)),
    *((5, 11), (6, 12), (11, 12), (11, 13), (13, 15), (12, 14), (14, 16)),
)
_COARSE = 256  # the grid on which the middle of a mask is looked for


def encode(pixels: Array, kind: str, quality: int = 90) -> bytes:
    """Writes RGB pixels as a "jpeg", "png" or "webp" file; PNG ignores the quality."""
    if kind not in _FORMATS:
        raise InvalidInput(f"images are not written as {shown(kind)}; {nearest(kind, FORMATS)}")
    ending, key, longest = _FORMATS[kind]
    height, width = pixels.shape[:2]
    if max(height, width) > longest:
        raise InvalidInput(f"{width} × {height} pixels do not fit into a {kind} file; ask for png")
    settings = (cv2.IMWRITE_PNG_COMPRESSION, _FASTEST_PNG) if key is None else (key, quality)
    done, data = cv2.imencode(ending, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), settings)
    if not done:
        raise InvalidInput(f"this image cannot be written as {kind}; ask for another format")
    return data.tobytes()


def detections(pixels: Array, found: Sequence[Detection], size: tuple[int, int]) -> Array:
    """Boxes with their labels and scores; `size` is the width and height that the boxes are for."""
    canvas = Canvas(pixels)
    boxes = [_scaled(canvas, size, one["box"]).tolist() for one in found]
    for one, box in reversed(list(zip(found, boxes, strict=True))):  # the best on top
        canvas.box(box, colour(one["class_id"]))
    _tag(canvas, found, boxes)
    return canvas.pixels


def _scaled(canvas: Canvas, size: tuple[int, int], places: Sequence[float]) -> Array:
    """Returns coordinates x, y, x, y, … of a picture of this size, on the canvas."""
    scale = np.array([canvas.width / size[0], canvas.height / size[1]])
    scaled: Array = (np.array(places, np.float64).reshape(-1, 2) * scale).reshape(-1)
    return scaled


def _tag(canvas: Canvas, found: Sequence[Detection | Mask], boxes: Sequence[Sequence[float]]) -> None:
    for one, box in list(zip(found, boxes, strict=True))[:_MOST_TAGS]:  # the best choose first
        canvas.tag_box(box, f"{one['label']} {one['score']:.2f}", colour(one["class_id"]))


def poses(pixels: Array, found: Sequence[Pose], size: tuple[int, int]) -> Array:
    """Boxes, and their keypoints as dots; those of people are joined."""
    drawn = detections(pixels, found, size)
    canvas = Canvas(drawn)
    for one in reversed(found):
        own = colour(one["class_id"])
        points = [
            None if len(point) > 2 and point[2] < _UNSURE else _scaled(canvas, size, point[:2])
            for point in one["keypoints"]
        ]
        for start, end in _LIMBS if len(points) == _PERSON else ():
            first, last = points[start], points[end]
            if first is not None and last is not None:
                canvas.polyline([first, last], own)
        for point in points:
            if point is not None:
                canvas.dot(point, own)
    return canvas.pixels


def rotated(pixels: Array, found: Sequence[RotatedBox], size: tuple[int, int]) -> Array:
    """Draws boxes at their angles."""
    canvas = Canvas(pixels)
    boxes = [_scaled(canvas, size, one["box"]).tolist() for one in found]
    for one in reversed(found):
        corners = [_scaled(canvas, size, corner) for corner in one["corners"]]
        canvas.polyline([*corners, corners[0]], colour(one["class_id"]))
    _tag(canvas, found, boxes)
    return canvas.pixels


def text(pixels: Array, found: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Array:
    """Draws regions or lines of text in their frames; beside them what they say, where that is known, each at
    its place on a white page."""
    canvas = Canvas(pixels)
    for number, one in reversed(list(enumerate(found))):
        corners = [_scaled(canvas, size, corner) for corner in one["polygon"]]
        canvas.polyline([*corners, corners[0]], colour(number))
    if not any("text" in one for one in found):
        return canvas.pixels
    page = Image.new("RGB", (canvas.width, canvas.height), PAPER)
    pen = ImageDraw.Draw(page)
    for number, one in list(enumerate(found))[:_MOST_LINES]:
        left, top, right, bottom = _scaled(canvas, size, one["box"]).tolist()
        line = _line(one["text"])
        letters = min(max(8.0, 0.7 * (bottom - top)), float(canvas.height))
        letters *= min(1.0, (right - left) / max(1.0, ImageFont.load_default(letters).getlength(line)))
        font = ImageFont.load_default(max(8.0, letters))
        pen.rectangle((left, top, left + canvas.line, bottom), fill=colour(number))
        pen.text((left + 2 * canvas.line, (top + bottom) / 2), line, INK, font, "lm")
    return np.concatenate((canvas.pixels, np.asarray(page)), axis=1)


def objects(pixels: Array, found: Iterable[tuple[Mask, Array]], size: tuple[int, int]) -> Array:
    """Draws masks, each with the pixels [h, w] of the picture that belong to it, laid on in turn."""
    canvas = Canvas(pixels)
    told = []
    for one, mask in found:
        own = cv2.resize(mask, (canvas.width, canvas.height), interpolation=cv2.INTER_NEAREST)
        if own.any():
            _tint(canvas, own, colour(one["class_id"]), _TINT)
        told.append(one)
    _tag(canvas, told, [_scaled(canvas, size, one["box"]).tolist() for one in told])
    return canvas.pixels


def distances(pixels: Array, near: Array) -> Array:
    """From dark and blue, far away, to bright and yellow; `near` is [h, w] from 0 to 1."""
    height, width = pixels.shape[:2]
    steps = np.rint(255 * cv2.resize(near, (width, height), interpolation=cv2.INTER_LINEAR)).astype(np.uint8)
    return cv2.cvtColor(cv2.applyColorMap(steps, cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB)


def heat(pixels: Array, share: Array) -> Array:
    """Lays a map from 0 to 1 over the image: the more, the brighter and the less of the image shows."""
    height, width = pixels.shape[:2]
    colours = distances(pixels, share).astype(np.float32)
    weight = cv2.resize(share.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    weight = np.clip(weight, 0, 1)[:, :, None] * _HEAT
    laid: Array = np.rint(pixels * (1 - weight) + colours * weight).astype(np.uint8)
    return laid


def classes(pixels: Array, found: Sequence[Class]) -> Array:
    """Draws a panel in the corner: a row per class with its score as a bar."""
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
    dark = cv2.convertScaleAbs(canvas.pixels, alpha=_SHADE)
    cv2.copyTo(dark, (index == NOTHING).view(np.uint8), canvas.pixels)
    spots = []
    for region in found.found:
        mask = (index == region.class_id).view(np.uint8)
        if mask.any():
            _tint(canvas, mask, colour(region.class_id), _TINT if len(found.found) > 1 else _LIGHT_TINT)
            spots.append((region, _middle(mask)))
    for region, (x, y) in spots[:_MOST_TAGS]:
        canvas.tag_point(x, y, f"{label(region.class_id)} {region.score:.2f}", colour(region.class_id))
    return canvas.pixels


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
    """Returns the point furthest from any edge of the mask, where a tag covers the least."""
    height, width = mask.shape
    shrink = min(1.0, _COARSE / max(height, width))
    coarse_size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
    coarse = cv2.resize(mask * np.uint8(255), coarse_size, interpolation=cv2.INTER_AREA)
    framed = cv2.copyMakeBorder((coarse > 0).view(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    distance = cv2.distanceTransform(framed, cv2.DIST_L2, 3)
    _, _, _, (x, y) = cv2.minMaxLoc(distance)
    return (x - 0.5) / coarse_size[0] * width, (y - 0.5) / coarse_size[1] * height
