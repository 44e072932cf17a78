"""The fast transform against the plain one, every setting, and the errors of settings that cannot be."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from carpool.config.model import ImageSettings
from carpool.errors import ConfigError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.decode import Decoded, decode
from carpool.vision.geometry import Geometry
from carpool.vision.transforms import Transform
from later import first, many
from vision.photos import PHOTOS, encoded, enlarged_photo, exif, photo, stored
from vision.reference import transformed


def spec(shape: tuple[int, ...], datatype: str = "FP32") -> TensorSpec:
    return TensorSpec("images", Datatype[datatype], shape)


def decoded(pixels: Array) -> Decoded:
    return Decoded(pixels, pixels.shape[1], pixels.shape[0])


def noise(width: int, height: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def prepared(transform: Transform, picture: Decoded) -> tuple[Array, Geometry]:
    out = np.full(transform.shape, 99, transform.dtype)
    return out, transform.prepare(picture, out)


SETTINGS = st.builds(
    ImageSettings,
    resize=st.sampled_from(["letterbox", "stretch", "crop"]),
    kernel=st.sampled_from(["auto", "area", "bilinear", "bicubic"]),
    anchor=st.sampled_from(["center", "top_left"]),
    crop=st.sampled_from([1.0, 0.875, 0.3]),
    enlarge=st.sampled_from([None, 0.8, 1.5]),
    pad=st.sampled_from([0, 114, 255]),
    channels=st.sampled_from(["rgb", "bgr"]),
    layout=st.sampled_from(["nchw", "nhwc"]),
    mean=st.sampled_from([(0.0,), (0.5,)]),
    std=st.sampled_from([(1.0,), (0.25,)]),
    scale=st.sampled_from([1.0, 1 / 255]),
)
SIDE = st.integers(1, 70)


@settings(max_examples=many(150), deadline=None)
@given(
    SETTINGS, SIDE, SIDE, st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(1, 8)
)
def test_it_equals_the_plain_reference(
    chosen: ImageSettings, width: int, height: int, rows: int, columns: int, channels: int, orientation: int
) -> None:
    pixels = noise(width, height, width * 71 + height)
    sent = encoded(Image.fromarray(stored(pixels, orientation)), "PNG", exif=exif(orientation))
    shape = (channels, rows, columns) if chosen.layout == "nchw" else (rows, columns, channels)
    out, geometry = prepared(Transform(chosen, spec(shape), "m"), decode(sent))
    found = out if chosen.layout == "nchw" else out.transpose(2, 0, 1)
    expected = transformed(pixels, chosen, (rows, columns), channels)
    in_pixels = np.abs(found - expected) * chosen.std[0] / (chosen.scale or 1)
    rounding = 1e-4  # one level off is 1.000004 in single precision
    assert in_pixels.mean() <= 1 + rounding
    assert in_pixels.max() <= 3 + rounding
    assert (geometry.width, geometry.height) == (width, height)
    assert (geometry.input_width, geometry.input_height) == (columns, rows)


@pytest.mark.parametrize("name", first(2, PHOTOS))
@pytest.mark.parametrize("kernel", ["auto", "area", "bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "crop"), [("letterbox", 1.0), ("stretch", 1.0), ("crop", 0.875)])
def test_photos_equal_the_plain_reference(name: str, kernel: str, resize: str, crop: float) -> None:
    chosen = ImageSettings(resize=resize, kernel=kernel, crop=crop, scale=1.0)
    picture = decode(encoded(photo(name), "JPEG", quality=90))
    out, _ = prepared(Transform(chosen, spec((3, 96, 128)), "m"), picture)
    difference = np.abs(out - transformed(picture.pixels, chosen, (96, 128), 3))
    assert difference.mean() <= 0.5


REDUCED = [
    (resize, crop, side)
    for resize, crop in (("letterbox", 1.0), ("stretch", 1.0), ("crop", 1.0), ("crop", 0.875))
    for side in (16, 24, 48, 64, 80, 96, 112, 128)
]


@pytest.mark.parametrize("name", first(2, PHOTOS))
@pytest.mark.parametrize(("quality", "subsampling", "enlarged"), [(75, 2, 1), (98, 1, 1), (90, 2, 2)])
def test_a_reduced_decode_gives_the_same_input(
    name: str, quality: int, subsampling: int, enlarged: int
) -> None:
    """2.5 of 255 on average over the picture's own area, for every photo, and in the same place."""
    image = enlarged_photo(name, enlarged)
    sent = encoded(image, "JPEG", quality=quality, subsampling=subsampling)
    in_full = decode(sent)
    used = []
    for resize, crop, side in REDUCED:
        transform = Transform(ImageSettings(resize=resize, crop=crop, scale=1.0), spec((3, side, side)), "m")
        factor = transform.reduction(*image.size)
        used.append(factor)
        small = decode(sent, reduction=transform.reduction)
        assert small.pixels.shape[:2] == (image.height // factor, image.width // factor)
        reduced, where = prepared(transform, small)
        full, whole = prepared(transform, in_full)
        assert where == whole
        x1, y1, x2, y2 = (round(v) for v in whole.area)
        shown = np.s_[:, max(y1, 0) : y2, max(x1, 0) : x2]
        assert np.abs(full - reduced)[shown].mean() <= 2.5, (resize, crop, side, factor)
    assert {2, 4, 8} <= set(used)
    assert used.count(1) < len(used) / 2


@pytest.mark.parametrize(
    ("width", "height", "kernel", "factor"),
    [
        (1920, 1080, "area", 2),  # 960 / 416 = 2.3
        (1920, 1080, "auto", 2),
        (1920, 1080, "bilinear", 1),
        (1921, 1080, "area", 1),  # half a pixel would be left over
        (4000, 3000, "area", 4),
        (8000, 4000, "area", 4),  # 1000 / 416 = 2.4 is not enough for an eighth
        (16000, 8000, "area", 8),
        (640, 480, "area", 1),
        (1, 50000, "area", 1),
    ],
)
def test_the_rule_for_reduced_decodes(width: int, height: int, kernel: str, factor: int) -> None:
    transform = Transform(ImageSettings(kernel=kernel), spec((3, 416, 416)), "m")
    assert transform.reduction(width, height) == factor


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 50000), (50000, 1), (2, 3), (700, 2)])
def test_extreme_shapes_take_no_more_memory_than_others(resize: str, width: int, height: int) -> None:
    for kernel in ("auto", "area", "bilinear", "bicubic"):
        transform = Transform(ImageSettings(resize=resize, kernel=kernel, pad=7), spec((3, 33, 20)), "m")
        out, geometry = prepared(transform, decoded(np.full((height, width, 3), 51, np.uint8)))
        shown = np.isclose(out, 51 / 255)
        assert shown.any()
        assert (shown | np.isclose(out, 7 / 255)).all()
        assert geometry.scale_x > 0
        assert geometry.scale_y > 0
        x1, y1, x2, y2 = geometry.to_picture(np.array([[0, 0, 20, 33]], np.float32))[0]
        assert 0 <= x1 < x2 <= width
        assert 0 <= y1 < y2 <= height


def test_a_mark_is_found_where_geometry_says() -> None:
    for resize in ("letterbox", "stretch", "crop"):
        for width, height in ((200, 120), (90, 300), (1600, 1200)):
            pixels = np.zeros((height, width, 3), np.uint8)
            x1, y1, x2, y2 = (int(v) for v in (width * 0.4, height * 0.45, width * 0.6, height * 0.6))
            pixels[y1:y2, x1:x2] = 255
            chosen = ImageSettings(resize=resize, crop=0.9 if resize == "crop" else 1.0, pad=0)
            out, geometry = prepared(Transform(chosen, spec((3, 160, 128)), "m"), decoded(pixels))
            rows, columns = np.nonzero(out[0] > 0.5)
            box = [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]
            found = geometry.to_picture(np.array(box, np.float32))[0]
            pixel = 1 / min(geometry.scale_x, geometry.scale_y)
            assert np.abs(found - [x1, y1, x2, y2]).max() <= 0.75 * pixel + 1e-3


@pytest.mark.parametrize("shape", [(3, 20, 30), (20, 30, 3), (1, 20, 30), (20, 30, 1), (1, 3, 20, 30)])
@pytest.mark.parametrize(
    "datatype",
    [
        "UINT8",
        "INT8",
        "UINT16",
        "INT16",
        "UINT32",
        "INT32",
        "UINT64",
        "INT64",
        "FP16",
        "BF16",
        "FP32",
        "FP64",
    ],
)
def test_every_datatype_and_layout(shape: tuple[int, ...], datatype: str) -> None:
    pixels = np.full((10, 10, 3), 200, np.uint8)
    chosen = ImageSettings(scale=0.5, mean=(10.0,), std=(2.0,), pad=100)
    out, _ = prepared(Transform(chosen, spec(shape, datatype), "m"), decoded(pixels))
    values = (out.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else out.astype(np.float64)
    assert set(np.unique(values)) == {45.0, 20.0}
    assert (values == 45).sum() == 20 * 20 * (3 if 3 in shape else 1)


def test_whole_numbers_are_rounded_and_stop_at_their_ends() -> None:
    pixels = np.array([[[0, 3, 255]]], np.uint8)
    chosen = ImageSettings(scale=0.5, mean=(-100.0,), std=(1.0,))
    out, _ = prepared(Transform(chosen, spec((3, 1, 1), "INT8"), "m"), decoded(pixels))
    assert out.ravel().tolist() == [100, 102, 127]
    chosen = ImageSettings(scale=1.0, mean=(100.0,))
    out, _ = prepared(Transform(chosen, spec((3, 1, 1), "UINT8"), "m"), decoded(pixels))
    assert out.ravel().tolist() == [0, 0, 155]


@pytest.mark.parametrize(
    ("chosen", "datatype", "white"),
    [
        (None, "FP32", 1.0),
        (None, "UINT8", 255),
        (ImageSettings(), "FP16", 1.0),
        (ImageSettings(mean=(5.0,)), "FP32", 250.0),
        (ImageSettings(std=(5.0,)), "FP32", 51.0),
        (ImageSettings(mean=(0.5,), std=(0.5,)), "FP32", 1.0),
        (ImageSettings(mean=(1.0,)), "UINT8", 254),
        (ImageSettings(mean=(0.5,), std=(0.5,), scale=1.0), "FP32", 509.0),
        (ImageSettings(scale=1.0), "FP32", 255.0),
    ],
)
def test_values_when_little_is_said(chosen: ImageSettings | None, datatype: str, white: float) -> None:
    transform = Transform(chosen, spec((3, 4, 4), datatype), "m")
    out, _ = prepared(transform, decoded(np.full((9, 9, 3), 255, np.uint8)))
    assert (out == white).all()


def test_channel_orders_and_their_means() -> None:
    pixels = np.full((4, 4, 3), (10, 20, 30), np.uint8)
    for layout, shape in (("nchw", (3, 2, 2)), ("nhwc", (2, 2, 3))):
        chosen = ImageSettings(channels="bgr", mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 7.0), layout=layout)
        out, _ = prepared(Transform(chosen, spec(shape), "m"), decoded(pixels))
        first = out[:, 0, 0] if layout == "nchw" else out[0, 0]
        assert first.tolist() == [29.0, 18.0, 1.0]


def test_threads_share_a_transform() -> None:
    transform = Transform(ImageSettings(scale=1.0), spec((3, 64, 64)), "m")
    pictures = [np.full((90, 120 + 40 * n, 3), 40 * n, np.uint8) for n in range(4)]
    wrong: list[Any] = []

    def work(n: int) -> None:
        for _ in range(50):
            out, geometry = prepared(transform, decoded(pictures[n]))
            top = int(geometry.top)
            if set(np.unique(out[:, top : 64 - top])) - {40.0 * n, 114.0}:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_the_wrong_memory_is_refused() -> None:
    transform = Transform(None, spec((3, 4, 4)), "m")
    for out in (np.empty((3, 4, 5), np.float32), np.empty((3, 4, 4), np.float64)):
        with pytest.raises(ValueError, match="the input is"):
            transform.prepare(decoded(noise(5, 5)), out)


@pytest.mark.parametrize(
    ("chosen", "shape", "words"),
    [
        (ImageSettings(size=(10, 20)), (3, 20, 10), "image.size [10, 20] (height, width) does not fit"),
        (ImageSettings(), (3, -1, 10), "image.size is needed"),
        (ImageSettings(), (5, 20, 10), "image.layout is needed"),
        (ImageSettings(layout="nchw"), (20, 10, 3), "image.layout: an image has 1 or 3 channels"),
        (ImageSettings(), (20, 10), "three dimensions besides the batch"),
        (ImageSettings(), (4, 3, 20, 10), "three dimensions besides the batch"),
        (ImageSettings(mean=(1.0, 2.0, 3.0)), (1, 20, 10), "image.mean has 3 numbers"),
        (ImageSettings(std=(1.0, 2.0, 3.0)), (20, 10, 1), "the model's input has 1 channel"),
    ],
)
def test_settings_that_do_not_fit_the_model(
    chosen: ImageSettings, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Transform(chosen, spec(shape), "detector")
    assert words in str(error.value)
    assert str(error.value).startswith("detector: ")


def test_pixels_are_numbers() -> None:
    for datatype in ("BOOL", "BYTES"):
        with pytest.raises(ConfigError, match="pixels are numbers"):
            Transform(None, spec((3, 4, 4), datatype), "m")


def test_open_sides_are_filled_by_the_settings() -> None:
    assert Transform(ImageSettings(size=(8, 6)), spec((3, -1, -1)), "m").shape == (3, 8, 6)
    assert Transform(ImageSettings(size=(8, 6), layout="nhwc"), spec((-1, -1, -1)), "m").shape == (8, 6, 3)
    assert Transform(ImageSettings(size=(8, 6)), spec((-1, 1, 8, 6)), "m").shape == (1, 1, 8, 6)
