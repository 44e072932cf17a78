"""Which pictures may go to a device as they are: only those that every decoder reads alike."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool.vision.decode import MOST_PIXELS, decode, plain_size

PIXELS = np.random.default_rng(7).integers(0, 256, (30, 44, 3), dtype=np.uint8)


def file(kind: str = "JPEG", mode: str = "RGB", **more: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(out, kind, **more)
    return out.getvalue()


def with_orientation(number: int) -> bytes:
    exif = Image.Exif()
    exif[274] = number
    return file(exif=exif)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_an_ordinary_jpeg_is_told_with_its_size(subsampling: int) -> None:
    data = file(subsampling=subsampling, quality=90)
    assert plain_size(data) == plain_size(bytearray(data)) == plain_size(memoryview(data)) == (44, 30)


def test_comments_profiles_and_an_upright_exif_change_nothing() -> None:
    assert plain_size(with_orientation(1)) == (44, 30)
    assert plain_size(file(comment=b"hello", icc_profile=b"p" * 3000)) == (44, 30)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff\xd9",
        file("PNG"),
        file("WEBP"),
        file(mode="L"),
        file(mode="CMYK"),
        file(progressive=True),
        with_orientation(6),
        with_orientation(3),
        file()[:-2],
        file()[: len(file()) // 2],
        file() + b"more",
        file(keep_rgb=True),
    ],
    ids=range(13),
)
def test_everything_else_is_left_to_the_cpu(data: bytes) -> None:
    assert plain_size(data) is None


def test_a_picture_that_a_batch_of_would_fill_a_device_is_left_to_the_cpu() -> None:
    data = file()
    at = data.index(b"\xff\xc0")
    side = int(MOST_PIXELS**0.5)
    for height, width, fits in ((side, side, True), (side + 2, side + 2, False), (0, 44, False)):
        told = data[: at + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 9 :]
        assert plain_size(told) == ((width, height) if fits else None)


@given(st.data())
def test_whatever_bytes_say_nothing_is_raised(given_data: st.DataObject) -> None:
    data = bytearray(file())
    for _ in range(given_data.draw(st.integers(1, 4))):
        at = given_data.draw(st.integers(0, 700).filter(lambda at: at < len(data)))
        data[at] = given_data.draw(st.integers(0, 255))
    size = plain_size(data)
    assert size is None or (0 < size[0] * size[1] <= MOST_PIXELS)
    cut = given_data.draw(st.integers(0, len(data)))
    plain_size(bytes(data[:cut]) + b"\xff\xd9")


def test_what_is_told_is_what_the_decoder_finds() -> None:
    data = file()
    decoded = decode(data)
    assert plain_size(data) == (decoded.width, decoded.height)
