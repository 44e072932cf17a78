"""Frames of cameras that stand still: the same scene, the noise of a sensor, and now and then somebody."""

from __future__ import annotations

from functools import cache
from importlib import resources

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

WIDTH, HEIGHT = 640, 480
NOISE = 3.0  # grey levels
QUALITY = 80
_HALF_LENGTH = (slice(0, 440), slice(20, 420))  # where the astronaut is in her picture


@cache
def demo_picture(name: str) -> Pixels:
    data = (resources.files("carpool.demo") / "pictures" / name).read_bytes()
    found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert found is not None
    return found.astype(np.uint8)


@cache
def scene(kind: str) -> Pixels:
    """A photograph, or a plain wall."""
    if kind == "wall":
        shade = np.linspace(140, 170, WIDTH)[None, :, None] + np.zeros((HEIGHT, 1, 3))
        return shade.astype(np.uint8)
    return cv2.resize(demo_picture(kind), (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA).astype(np.uint8)


@cache
def figure(height: int) -> Pixels:
    person = demo_picture("astronaut.jpg")[_HALF_LENGTH]
    width = round(height * person.shape[1] / person.shape[0])
    return cv2.resize(person, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8)


def frame(kind: str, seed: int, height: int = 0, left: int = 0, light: float = 1.0) -> bytes:
    """As a JPEG; with a figure of this height, at the bottom, whose left edge is there."""
    pixels = scene(kind).copy()
    if height:
        person = figure(height)
        begin, end = max(0, left), min(WIDTH, left + person.shape[1])
        if begin < end:
            pixels[HEIGHT - height :, begin:end] = person[:, begin - left : end - left]
    noise = np.random.default_rng(seed).normal(0.0, NOISE, pixels.shape)
    noisy = np.clip(pixels * light + noise, 0, 255).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1])


def is_seen(height: int, left: int) -> bool:
    """Whether any of a figure is in the picture."""
    return bool(height) and -figure(height).shape[1] < left < WIDTH
