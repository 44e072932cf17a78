"""Measures one picture and its answer. Samples are made in a front end's idle threads, and sent to the engine
as JSON."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import thread_time
from typing import Any

import cv2
import numpy as np
import orjson

from carpool.errors import TooLarge
from carpool.extensions.drift.kept_pictures import doubt
from carpool.extensions.drift.measures import PROJECTIONS, Value, answer_values
from carpool.extensions.drift.settings import UncertainSettings
from carpool.types import Array
from carpool.vision.decode import Decoded, decode
from carpool.vision.heads import read_head

_CENTRE = 256  # pixels of each side that sharpness is read from
_FEW_ROWS = 120
_PLAIN = 4.0  # grey levels: of what varies less, the noise would be measured
_BLACK, _EVEN = 20.0, 6.0  # at most so bright, and so uneven: video has its black at 16
_COLOURLESS = 2.0
_SEED = 20261116
_MOST_PIXELS = 1 << 24
_FEW = 240  # pixels that the shorter side keeps, where a file is decoded for this alone


@dataclass(slots=True)
class Sampled:
    """A picture on its way: `decoded` is put in where it is decoded for the model."""

    decoded: list[Decoded]
    size: int  # of its file, bytes
    file: bytes = b""  # only where it is needed: to be decoded here, or to be kept
    uncertain: UncertainSettings | None = None  # None: nothing is kept


@dataclass(frozen=True, slots=True)
class PictureMeasures:
    values: dict[str, Value]
    look: str
    black: bool
    doubt: str  # why the picture should be labelled; empty: it need not be
    form: str  # of its file, if that is to be kept
    answer: Mapping[str, Any]
    seconds: float  # of a processor, that this took


def measure(sampled: Sampled, document: bytes) -> PictureMeasures:
    """Raises `CarpoolError` for a picture that cannot be decoded."""
    started = thread_time()
    answer: dict[str, Any] = orjson.loads(document) if document else {}
    if not sampled.decoded:
        sampled.decoded.append(decode(sampled.file, reduction=_coarse))
    values, look, black = picture_values(sampled.decoded[0], sampled.size)
    values |= answer_values(answer)
    embedding = answer.get("embedding")
    if embedding:
        values |= directions(np.asarray(embedding, np.float64))
    why, form = "", ""
    if sampled.uncertain is not None and sampled.file:
        why = doubt(answer, sampled.uncertain)
        form = read_head(sampled.file).format if why else ""
    return PictureMeasures(values, look, black, why, form, answer, thread_time() - started)


def picture_values(decoded: Decoded, size: int) -> tuple[dict[str, Value], str, bool]:
    """Returns, of its pixels, what is measured, a digest by which they are known again, and whether all is
    black.

    Means are taken of a few pixels of each block: all of them would take ten times as long.
    """
    pixels = decoded.pixels
    step = max(1, min(pixels.shape[:2]) // _FEW_ROWS)
    few = np.ascontiguousarray(pixels[::step, ::step])
    grey = cv2.cvtColor(few, cv2.COLOR_RGB2GRAY)
    blocks = (
        cv2.resize(grey, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
        if min(grey.shape) > 8
        else grey
    )
    mean, deviation = (float(one[0, 0]) for one in cv2.meanStdDev(blocks))
    red, green, blue = cv2.split(few)
    colour = cv2.norm(red, green, cv2.NORM_L1) + cv2.norm(blue, green, cv2.NORM_L1)
    values: dict[str, Value] = {
        "size": f"{decoded.width}x{decoded.height}",
        "grey": "grey" if colour <= _COLOURLESS * green.size else "colour",
        "brightness": mean / 255.0,
        "contrast": deviation / (mean + 1.0),  # of the light there is: what is dark has no less of it
        "bytes": size / max(1, decoded.width * decoded.height),
    }
    sharpness = _sharpness(pixels)
    if not math.isnan(sharpness):
        values["sharpness"] = sharpness
    return values, f"{zlib.crc32(few.data):08x}", mean <= _BLACK and deviation <= _EVEN


def _sharpness(pixels: Array) -> float:
    """Returns how much neighbouring pixels differ, of what the centre of the picture varies at all."""
    height, width = pixels.shape[:2]
    top, left = max(0, (height - _CENTRE) // 2), max(0, (width - _CENTRE) // 2)
    green = cv2.extractChannel(pixels[top : top + _CENTRE, left : left + _CENTRE], 1)
    deviation = float(cv2.meanStdDev(green)[1][0, 0])
    if deviation < _PLAIN:
        return math.nan
    return float(cv2.meanStdDev(cv2.Laplacian(green, cv2.CV_16S))[1][0, 0]) / deviation


def directions(embedding: Array) -> dict[str, Value]:
    """Returns its length along directions that are the same everywhere; about from -4 to 4."""
    length = float(np.linalg.norm(embedding))
    if embedding.ndim != 1 or not math.isfinite(length) or length == 0.0:
        return {}
    along = embedding @ _axes(len(embedding)) * (math.sqrt(len(embedding)) / length)
    return {f"embedding-{number:02}": value for number, value in enumerate(along.tolist(), 1)}


@lru_cache(maxsize=8)
def _axes(dimensions: int) -> Array:
    drawn = np.random.default_rng(_SEED).standard_normal((dimensions, PROJECTIONS))
    axes: Array = drawn / np.linalg.norm(drawn, axis=0)
    return axes


def _coarse(width: int, height: int) -> int:
    """Returns how many times smaller a file is decoded that no model needs here. `TooLarge` for one that
    would keep a thread from others for long."""
    if width * height > _MOST_PIXELS:
        raise TooLarge(f"{width}×{height} pixels are too many to decode for a measurement")
    for factor in (8, 4, 2):
        if width % factor == height % factor == 0 and min(width, height) // factor >= _FEW:
            return factor
    return 1
