"""What is counted before anything is decoded."""

from __future__ import annotations

import pytest

from carpool.errors import TooLarge
from carpool.vision.heads import MOST_PIXELS_OF_REQUEST, claimed_head, heads_of_request, read_head
from vision.made_files import HEADS, jpeg_head, webp_head
from vision.photos import encoded, photo

PICTURE = photo("chelsea").resize((37, 21))


def claimed_pixels(data: bytes) -> int:
    (head,), (pixels,) = heads_of_request([data])
    assert head == claimed_head(data)
    assert (head is None) == (pixels == 0)
    return pixels


def pixels_of_request(pictures: list[bytes]) -> list[int]:
    return list(heads_of_request(pictures)[1])


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WebP", "BMP", "TIFF", "GIF"])
def test_pixels_are_known_from_the_head(name: str) -> None:
    assert claimed_pixels(encoded(PICTURE, name)) == 37 * 21


@pytest.mark.parametrize("name", HEADS)
def test_what_will_not_be_decoded_costs_nothing(name: str) -> None:
    assert claimed_pixels(HEADS[name](60_000, 60_000)) == 0
    assert claimed_pixels(b"no picture") == claimed_pixels(b"") == 0


def test_many_pixels_need_some_bytes() -> None:
    bomb = webp_head(7000, 7000)
    with pytest.raises(TooLarge, match=r"49000000 pixels in \d+ bytes"):
        read_head(bomb)
    assert read_head(bomb + bytes(45_000)).width == 7000
    assert read_head(webp_head(2000, 2000)).width == 2000  # a small one may be a plain surface
    assert claimed_pixels(bomb) == 0
    assert claimed_pixels(bomb + bytes(45_000)) == 49_000_000


def test_scans_of_a_large_jpeg_are_counted_by_its_size() -> None:
    def scans(side: int, count: int) -> bytes:
        return jpeg_head(side, side, marker=0xC2) + b"\xff\xda\0\0" * count + bytes(side * side // 500)

    assert read_head(scans(1000, 100)).scans == 100
    assert read_head(scans(7000, 12)).scans == 12
    seen = claimed_head(scans(1000, 100))
    assert seen is not None
    assert not seen.scans  # whoever decodes it counts them: the loop has no time to
    with pytest.raises(TooLarge, match="90 scans, more than the 12 allowed"):
        read_head(scans(7000, 90))


def test_the_pictures_of_a_request_are_counted_together() -> None:
    one = webp_head(7000, 7000) + bytes(45_000)
    assert sum(pixels_of_request([one] * 4)) <= MOST_PIXELS_OF_REQUEST
    with pytest.raises(TooLarge, match="245000000 pixels together"):
        pixels_of_request([one] * 5)
    assert pixels_of_request([webp_head(7000, 7000)] * 64) == [0] * 64  # each is told by itself
