"""Formats are told from content; sizes are known, and limits kept, before anything is decoded."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from carpool.errors import InvalidInput, TooLarge
from carpool.vision.decode import decode
from carpool.vision.heads import PictureHead, PictureLimits, read_head, sniff
from vision.made_files import HEADS, bmp_head, chunk, gif_head, jpeg_head, png_head, tiff_head, webp_head
from vision.photos import encoded, exif, photo

PICTURE = photo("chelsea").resize((37, 21))
FORMATS = ["JPEG", "PNG", "WebP", "BMP", "TIFF", "GIF"]


@pytest.mark.parametrize("name", FORMATS)
def test_real_files(name: str) -> None:
    for data in (
        encoded(PICTURE, name),
        memoryview(encoded(PICTURE, name)),
        bytearray(encoded(PICTURE, name)),
    ):
        head = read_head(data)
        assert (head.format, head.width, head.height, head.orientation) == (name, 37, 21, 1)


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 5}, {"exif": exif(6)}])
def test_every_kind_of_webp(options: dict[str, object]) -> None:
    head = read_head(encoded(PICTURE, "WebP", **options))
    assert (head.width, head.height) == (37, 21)
    assert head.upright == ((21, 37) if "exif" in options else (37, 21))


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WebP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_read_from_the_head(name: str, orientation: int) -> None:
    options = {"tiffinfo": {274: orientation}} if name == "TIFF" else {"exif": exif(orientation)}
    head = read_head(encoded(PICTURE, name, **options))
    assert head.orientation == orientation
    assert head.upright == ((37, 21) if orientation < 5 else (21, 37))


def test_frames_where_they_are_cheap_to_count() -> None:
    many = {"save_all": True, "append_images": [PICTURE.rotate(5), PICTURE.rotate(9)], "duration": 10}
    frames = {name: read_head(encoded(PICTURE, name, **many)).frames for name in ("PNG", "WebP", "GIF")}
    assert frames == {"PNG": 3, "WebP": 3, "GIF": None}
    with pytest.raises(TooLarge, match="3 frames"):
        read_head(encoded(PICTURE, "PNG", **many), PictureLimits(frames=2))


def test_a_bmp_may_start_at_the_top() -> None:
    assert read_head(bmp_head(5, -7)) == PictureHead("BMP", 5, 7, bits=24)


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiffs_of_both_byte_orders(order: str) -> None:
    if order == "<":
        assert read_head(tiff_head(5, 7)).width == 5
    head = read_head(tiff_head(5, 7, order=order))
    assert (head.width, head.height) == (5, 7)


@pytest.mark.parametrize("name", FORMATS)
def test_limits_hold_before_memory_is_taken(name: str) -> None:
    width, height = (60000, 60000) if name != "WebP" else (16000, 16000)
    sent = HEADS[name](width, height)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as error:
            decode(sent)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert f"{width}×{height}" in str(error.value)
    assert error.value.field == "image"


def test_the_largest_heads() -> None:
    for sent in (jpeg_head(65535, 65535), png_head(2**31 - 1, 2**31 - 1), webp_head(1 << 24, 1 << 24)):
        with pytest.raises(TooLarge):
            decode(sent)
    for sent in (bmp_head(2**31 - 1, -(2**31)), tiff_head(2**32 - 1, 2**32 - 1), gif_head(65535, 65535)):
        with pytest.raises(TooLarge):
            decode(sent)


def test_each_limit() -> None:
    sent = encoded(PICTURE, "PNG")
    for limits, words in (
        (PictureLimits(bytes=100), "bytes, more than the 100 allowed"),
        (PictureLimits(pixels=776), "37×21 pixels, more than the 776 allowed"),
        (PictureLimits(side=36), "a side may have 36"),
    ):
        with pytest.raises(TooLarge, match=words):
            decode(sent, limits)
    assert decode(sent, PictureLimits(bytes=len(sent), pixels=777, side=37)).width == 37


def test_a_progressive_jpeg_may_not_have_endless_scans() -> None:
    sent = encoded(PICTURE, "JPEG", progressive=True)
    scans = read_head(sent).scans
    assert 1 < scans <= 20
    with pytest.raises(TooLarge, match="scans"):
        decode(sent, PictureLimits(scans=scans - 1))
    with pytest.raises(TooLarge, match="10000 scans"):
        decode(jpeg_head(8, 8, 0xC2) + b"\xff\xda\x00\x02" * 10_000)


@pytest.mark.parametrize("name", FORMATS)
def test_no_picture_has_no_pixels(name: str) -> None:
    if name == "WebP":  # its sizes are stored less one
        return
    for width, height in ((0, 5), (5, 0)):
        with pytest.raises(InvalidInput):
            decode(HEADS[name](width, height))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf  <?xml version='1.0'?><svg/>", "SVG"),
        (b"<html></html>", "HTML"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x1cftypavif", "AVIF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"hello", "not an image of a known format"),
        (b"\0" * 1000, "not an image of a known format"),
        (b"RIFF\0\0\0\0WAVE", "not an image of a known format"),
        (b"\xff\xd8", "not an image of a known format"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as error:
        decode(data)
    assert error.value.field == "image"


def test_a_polyglot_is_what_its_first_bytes_say() -> None:
    names = [name for name in FORMATS if name != "TIFF"]
    for first in names:
        for second in FORMATS:
            both = encoded(PICTURE, first) + encoded(PICTURE.rotate(90), second)
            assert sniff(both) == first
            assert read_head(both).format == first
    assert sniff(b"GIF89a<svg/>") == "GIF"


@pytest.mark.parametrize("name", FORMATS)
def test_every_short_head_is_an_error(name: str) -> None:
    whole = HEADS[name](8, 8)
    for length in range(min(len(whole), 40)):
        with pytest.raises(InvalidInput):
            decode(whole[:length])


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xd8" + b"\xff" * 100_000,
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000,
        png_head(8, 8) + chunk(b"tEXt", b"") * 70_000,
        webp_head(8, 8) + (b"JUNK" + bytes(4)) * 70_000,
        gif_head(8, 8)[:19] + b"\x21\xfe" + b"\x01x" * 70_000,
        tiff_head(8, 8)[:8] + b"\xff\xff" + bytes(65535 * 12),
        tiff_head(8, 8, *((40000 + n, 1, 1000, 0) for n in range(50))),
        tiff_head(8, 8, (273, 4, 1 << 30, 0)),
        tiff_head(8, 8, (273, 4, 100, 0xFFFFFFF0)),
        b"II*\0" + struct.pack("<I", 0xFFFFFFF0),
        b"II*\0" + struct.pack("<IHHHII", 8, 1, 256, 4, 1, 8),
    ],
    ids=[
        "fill",
        "segments",
        "chunks",
        "junk",
        "blocks",
        "tags",
        "overlap",
        "values",
        "offset",
        "far",
        "no-height",
    ],
)
def test_endless_or_lying_heads_are_errors(sent: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(sent)


def test_a_tile_larger_than_its_picture() -> None:
    with pytest.raises(TooLarge):
        decode(tiff_head(8, 8, (322, 4, 1, 1 << 20), (323, 4, 1, 1 << 20)))


def test_broken_exif_does_not_cost_the_picture() -> None:
    for block in (
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        exif(9),
    ):
        assert read_head(encoded(PICTURE, "JPEG", exif=block)).orientation == 1
