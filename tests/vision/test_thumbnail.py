"""Small grey pictures, and what changed between two of them."""

from __future__ import annotations

from math import inf

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from carpool.demo import pictures
from carpool.types import Array
from carpool.vision.thumbnail import block_change, thumbnail, thumbnail_of
from later import many
from vision.made_files import jpeg_head, png_head
from vision.photos import encoded, exif


def smooth(width: int, height: int, seed: int = 1) -> Array:
    """A scene without detail, so that every way to make it smaller is alike."""
    coarse = np.random.default_rng(seed).integers(40, 200, (4, 5, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize(("width", "height"), [(640, 480), (641, 479), (8, 8), (5, 3), (1, 1), (1000, 9)])
def test_every_way_gives_an_eighth(width: int, height: int) -> None:
    pixels = smooth(width, height)
    shape = (-(-height // 8), -(-width // 8))
    jpeg = thumbnail(simplejpeg.encode_jpeg(pixels, 95))
    png = thumbnail(memoryview(encoded(Image.fromarray(pixels), "PNG")))
    assert jpeg is not None
    assert png is not None
    assert jpeg.shape == png.shape == thumbnail_of(pixels).shape == shape
    assert jpeg.dtype == png.dtype == np.uint8
    assert block_change(jpeg, thumbnail_of(pixels)) < 6
    assert block_change(png, thumbnail_of(pixels)) == 0.0


def test_a_turned_photo_is_upright() -> None:
    pixels = smooth(64, 32)
    turned = thumbnail(encoded(Image.fromarray(pixels), "JPEG", quality=95, exif=exif(6)))
    assert turned is not None
    assert turned.shape == (8, 4)
    assert block_change(turned, np.rot90(thumbnail_of(pixels), -1)) < 6


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_printers_jpegs_are_read(mode: str) -> None:
    small = thumbnail(encoded(Image.fromarray(smooth(64, 32)).convert(mode), "JPEG"))
    assert small is not None
    assert small.shape == (4, 8)


def test_what_is_no_picture_has_no_thumbnail() -> None:
    photo = pictures()[0].read_bytes()
    assert thumbnail(photo) is not None
    assert thumbnail(b"") is None
    assert thumbnail(b"<svg/>") is None
    assert thumbnail(photo[: len(photo) // 2]) is None
    assert thumbnail(b"\xff\xd8\xff" + bytes(100)) is None


def test_a_picture_that_claims_too_much_is_not_decoded() -> None:
    assert thumbnail(png_head(60_000, 60_000)) is None
    assert thumbnail(jpeg_head(60_000, 60_000)) is None


@settings(max_examples=many(50), deadline=None)
@given(st.data())
def test_damage_is_a_picture_or_none(data: st.DataObject) -> None:
    file = bytearray(simplejpeg.encode_jpeg(smooth(48, 40), 80))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(2, len(file) - 1))] = data.draw(st.integers(0, 255))
    small = thumbnail(bytes(file))
    assert small is None or (small.dtype == np.uint8 and small.ndim == 2)


@given(st.data())
def test_the_largest_block_counts(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    one, other = (data.draw(arrays.arrays(np.uint8, shape)) for _ in range(2))
    change = one.astype(float) - other
    some = change[::2, ::2].reshape(-1)
    odd = some[: (some.size - 1) | 1]  # the middle is one of them, whichever way round
    change = np.pad(np.abs(change - np.median(odd)), 1, mode="edge")
    blocks = [change[y : y + 3, x : x + 3].mean() for y in range(shape[0]) for x in range(shape[1])]
    assert block_change(one, other) == pytest.approx(max(blocks), abs=1e-3)
    assert block_change(one, other) == block_change(other, one)
    assert block_change(one, one) == 0.0


def test_light_is_no_change_and_a_small_figure_is_one() -> None:
    scene = smooth(640, 480)
    noise = np.random.default_rng(3).normal(0, 3, scene.shape)
    still = np.clip(scene + noise, 0, 255).astype(np.uint8)
    figure = scene.copy()
    figure[200:224, 300:312] = 250
    first = thumbnail(simplejpeg.encode_jpeg(scene, 80))
    assert first is not None
    for picture, changed in (
        (still, False),
        (np.clip(scene + 5, 0, 255).astype(np.uint8), False),
        (figure, True),
    ):
        later = thumbnail(simplejpeg.encode_jpeg(picture, 80))
        assert later is not None
        assert (block_change(first, later) > 6) == changed
    assert block_change(first, first[1:]) == inf
