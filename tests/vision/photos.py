"""Real photos, from packages that carry them, and the files that tests make of them."""

from __future__ import annotations

import importlib.util
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from carpool.types import Array

PHOTOS = {
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "astronaut": ("skimage", "data/astronaut.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}


@cache
def photo(name: str) -> Image.Image:
    package, file = PHOTOS[name]
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    with Image.open(Path(spec.origin).parent / file) as image:
        loaded = image.convert("RGB")
    loaded.info.clear()  # a colour profile of the source has no place in the files made from it
    return loaded


def enlarged_photo(name: str, times: int) -> Image.Image:
    """So many times larger, with sides that a reduced decode can divide."""
    image = photo(name)
    width, height = image.width // 8 * 8, image.height // 8 * 8
    return image.crop((0, 0, width, height)).resize((width * times, height * times))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:  # noqa: A002
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block that says nothing but this."""
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def stored(pixels: Array, orientation: int) -> Array:
    """How a camera stores what should be seen as `pixels`, by the definition of the eight orientations."""
    kinds = {
        1: pixels,
        2: pixels[:, ::-1],
        3: np.rot90(pixels, 2),
        4: pixels[::-1],
        5: np.swapaxes(pixels, 0, 1),
        6: np.rot90(pixels, 1),
        7: np.swapaxes(pixels[::-1, ::-1], 0, 1),
        8: np.rot90(pixels, -1),
    }
    return np.ascontiguousarray(kinds[orientation])
