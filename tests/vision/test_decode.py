"""Every format and colour type comes out as Pillow reads it, upright, in RGB."""

from __future__ import annotations

import sys
import threading
import time
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.decode import decode
from vision.made_files import png
from vision.photos import PHOTOS, encoded, exif, photo, stored

PICTURE = photo("coffee").resize((117, 83))
PIXELS = np.asarray(PICTURE)


def as_pillow(data: bytes) -> Array:
    """What Pillow reads, with white behind what is transparent."""
    with Image.open(BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            shown = upright.convert("RGBA")
            white = Image.new("RGBA", shown.size, "white")
            return np.asarray(Image.alpha_composite(white, shown).convert("RGB"))
        return np.asarray(upright.convert("RGB"))


def difference(data: bytes) -> float:
    found = decode(data)
    expected = as_pillow(data)
    assert found.pixels.shape == expected.shape
    assert (found.height, found.width) == expected.shape[:2]
    assert found.pixels.dtype == np.uint8
    assert found.pixels.flags.c_contiguous
    return float(np.abs(found.pixels.astype(int) - expected).mean())


@pytest.mark.parametrize(
    ("format", "options", "tolerance"),
    [
        ("JPEG", {}, 1.0),
        ("JPEG", {"progressive": True, "quality": 90}, 1.0),
        ("JPEG", {"subsampling": 0}, 1.0),
        ("JPEG", {"subsampling": 1, "restart_marker_rows": 1}, 1.0),
        ("JPEG", {"keep_rgb": True}, 1.0),
        ("PNG", {}, 0.0),
        ("WebP", {}, 0.0),
        ("WebP", {"lossless": True}, 0.0),
        ("BMP", {}, 0.0),
        ("TIFF", {}, 0.0),
        ("TIFF", {"compression": "tiff_lzw"}, 0.0),
        ("TIFF", {"compression": "tiff_adobe_deflate"}, 0.0),
        ("TIFF", {"compression": "jpeg"}, 0.0),
        ("TIFF", {"big_tiff": True}, 0.0),
        ("GIF", {}, 0.0),
    ],
)
def test_formats(format: str, options: dict[str, object], tolerance: float) -> None:  # noqa: A002
    assert difference(encoded(PICTURE, format, **options)) <= tolerance


@pytest.mark.parametrize("format", ["PNG", "TIFF", "GIF", "BMP", "WebP", "JPEG"])
@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "PA", "CMYK", "YCbCr"])
def test_colour_types(format: str, mode: str) -> None:  # noqa: A002
    image = PICTURE.convert("P").convert("PA") if mode == "PA" else PICTURE.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    try:
        sent = encoded(image, format)
    except (OSError, ValueError):
        return  # the format has no such pixels
    assert difference(sent) <= (1.5 if format == "JPEG" else 0.51)


def test_sixteen_bits_are_scaled_to_eight() -> None:
    grey = PIXELS[:, :, 0].astype(np.uint16) * 257
    for name in ("PNG", "TIFF"):
        assert (decode(encoded(Image.fromarray(grey), name)).pixels == PIXELS[:, :, :1]).all()
    assert (decode(png(PIXELS.astype(np.uint16) * 257)).pixels == PIXELS).all()


def test_interlaced_png() -> None:
    assert (decode(png(PIXELS, interlaced=True)).pixels == PIXELS).all()


def test_thirty_two_bits_are_refused() -> None:
    for kind in (np.float32, np.int32):
        sent = encoded(Image.fromarray(np.zeros((4, 4), kind)), "TIFF")
        with pytest.raises(InvalidInput, match="32 bits"):
            decode(sent)


def test_cmyk_jpegs_are_not_negatives() -> None:
    """Adobe stores CMYK inverted; Pillow writes it so."""
    sent = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")
    assert b"Adobe" in sent
    red, green, blue = decode(sent).pixels.reshape(-1, 3).mean(axis=0)
    assert red > 240
    assert max(green, blue) < 15


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (2, 1))
    image.putdata([(10, 20, 30, 0), (10, 20, 30, 128)])
    assert decode(encoded(image, "PNG")).pixels.tolist() == [[[255, 255, 255], [132, 137, 142]]]
    image = Image.new("P", (1, 1))
    image.putpalette([1, 2, 3])
    assert decode(encoded(image, "GIF", transparency=0)).pixels.tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "TIFF"])
def test_orientation(format: str, orientation: int) -> None:  # noqa: A002
    image = Image.fromarray(stored(PIXELS, orientation))
    info: dict[str, object] = {"exif": exif(orientation)}
    options = {
        "JPEG": info | {"quality": 95, "subsampling": 0},
        "WebP": info | {"lossless": True},
        "PNG": info,
        "TIFF": {"tiffinfo": {274: orientation}, "compression": "tiff_lzw"},
    }[format]
    sent = encoded(image, format, **options)
    found = decode(sent)
    assert (found.width, found.height) == PICTURE.size
    assert np.abs(found.pixels.astype(int) - PIXELS).mean() < 2.5
    assert difference(sent) <= 1.0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_jpeg_is_upright_too(orientation: int) -> None:
    image = photo("china").crop((0, 0, 640, 424))
    pixels = np.asarray(image)
    sent = encoded(Image.fromarray(stored(pixels, orientation)), "JPEG", exif=exif(orientation), quality=95)
    found = decode(sent, reduction=lambda width, height: 4 if (width, height) == image.size else 1)
    assert (found.width, found.height) == image.size
    assert found.pixels.shape == (106, 160, 3)
    small = np.asarray(image.resize((160, 106), Image.Resampling.BOX)).astype(int)
    assert np.abs(found.pixels - small).mean() < 2.5


def test_other_formats_and_cmyk_are_never_reduced() -> None:
    for sent in (encoded(PICTURE, "PNG"), encoded(PICTURE.convert("CMYK"), "JPEG")):
        assert decode(sent, reduction=lambda width, height: 1 // 0).pixels.shape[:2] == (83, 117)


def test_the_first_frame_of_many() -> None:
    more = {"save_all": True, "append_images": [Image.new("RGB", PICTURE.size, "red")], "duration": 50}
    for name in ("GIF", "PNG", "WebP", "TIFF"):
        sent = encoded(
            PICTURE, name, **(more if name != "TIFF" else {k: more[k] for k in more if k != "duration"})
        )
        limit = 12 if name == "GIF" else 6
        assert np.abs(decode(sent).pixels.astype(int) - PIXELS).mean() < limit


@pytest.mark.parametrize("name", PHOTOS)
def test_photos(name: str) -> None:
    assert difference(encoded(photo(name), "JPEG", quality=85)) <= 1.0


def test_single_pixels() -> None:
    for name in ("JPEG", "PNG", "WebP", "BMP", "TIFF", "GIF"):
        for size in ((1, 1), (1, 300), (300, 1)):
            assert decode(encoded(Image.new("RGB", size, "blue"), name)).pixels.shape == (size[1], size[0], 3)


def test_threads_decode_side_by_side() -> None:
    files = [encoded(PICTURE.rotate(90 * n, expand=True), name) for n in range(2) for name in ("JPEG", "PNG")]
    expected = [decode(file).pixels for file in files]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not np.array_equal(decode(files[n]).pixels, expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WebP"])
def test_other_threads_run_meanwhile(name: str) -> None:
    """With an endless switch interval another thread runs only where the decoder lets go of the lock."""
    sent = encoded(photo("flower").resize((800, 600)), name)
    decode(sent)  # imports what it needs
    turns, enough, done = 0, 100, threading.Event()

    def work() -> None:
        for _ in range(30):  # on a busy machine the other thread may not have its turn during the first
            if turns < enough:
                decode(sent)
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        while not done.is_set() and turns < 10_000_000:
            turns += 1
            time.sleep(0)  # lets go of the lock, so that the decoder can come back
    finally:
        sys.setswitchinterval(before)
    thread.join(60)
    assert turns >= enough
