"""Which format a picture is in and how large it is, told from its first bytes before any memory is taken."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from carpool.errors import InvalidInput, TooLarge
from carpool.vision import heads
from carpool.vision.heads import Head

Buffer: TypeAlias = bytes | bytearray | memoryview

FIELD = "image"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a picture may cost. Pixels and sides are of the picture before any reduction."""

    bytes: int = 64 << 20
    pixels: int = 50_000_000
    side: int = 65_535
    frames: int = 1_000  # only the first is read; more is not a picture
    scans: int = 100  # of a progressive JPEG: each is a pass over all of it
    scanned_pixels: int = 600_000_000  # scans × pixels
    free_pixels: int = 4_000_000  # may be in a file of any length
    pixels_per_byte: int = 1_000  # beyond those: a plain surface has some hundred


DEFAULT_LIMITS = Limits()

READERS: Mapping[str, Callable[[memoryview], Head]] = {
    "JPEG": heads.jpeg,
    "PNG": heads.png,
    "WebP": heads.webp,
    "BMP": heads.bmp,
    "TIFF": heads.tiff,
    "GIF": heads.gif,
}
_READ_HERE = "send JPEG, PNG, WebP, BMP, TIFF or GIF"
_TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_FOREIGN = (  # where, what, and the name of a format that is known and not read
    (4, b"ftyp", "an AVIF, HEIC or video file"),
    (0, b"%PDF", "a PDF"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
)


def read_head(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Head:
    """Format, size and orientation of a picture within the limits; InvalidInput or TooLarge otherwise."""
    view = memoryview(data).cast("B")
    if len(view) > limits.bytes:
        raise TooLarge(
            f"the picture has {len(view)} bytes, more than the {limits.bytes} allowed", field=FIELD
        )
    name = sniff(view)
    try:
        head = READERS[name](view)
    except struct.error:
        raise InvalidInput(f"the {name} picture ends within its head", field=FIELD) from None
    except ValueError as error:
        raise InvalidInput(f"the {name} picture cannot be read: {error}", field=FIELD) from None
    check(head, len(view), limits)
    return head


def check(head: Head, size: int, limits: Limits = DEFAULT_LIMITS) -> None:
    """Whether a picture in so many bytes may be decoded; raises."""
    width, height = head.width, head.height
    pixels = width * height
    if width < 1 or height < 1:
        raise InvalidInput(f"the {head.format} picture says it is {width}×{height} pixels", field=FIELD)
    if max(width, height) > limits.side:
        raise TooLarge(f"the picture is {width}×{height} pixels; a side may have {limits.side}", field=FIELD)
    if max(pixels, head.tile_pixels) > limits.pixels:
        raise TooLarge(
            f"the picture is {width}×{height} pixels, more than the {limits.pixels} allowed", field=FIELD
        )
    if (head.frames or 1) > limits.frames:
        raise TooLarge(
            f"the picture has {head.frames} frames, more than the {limits.frames} allowed", field=FIELD
        )
    if pixels > limits.free_pixels + limits.pixels_per_byte * size:
        raise TooLarge(
            f"the picture says it has {pixels} pixels in {size} bytes: "
            f"more than {limits.pixels_per_byte} for each byte are no picture",
            field=FIELD,
        )
    if head.scans > limits.scans or head.scans * pixels > limits.scanned_pixels:
        most = min(limits.scans, limits.scanned_pixels // pixels)
        raise TooLarge(
            f"the progressive JPEG has {head.scans} scans, more than the {most} allowed", field=FIELD
        )


def sniff(data: Buffer) -> str:
    """The format by its first bytes, whatever follows them and whatever the file is called."""
    if not len(data):
        raise InvalidInput("the picture is empty", field=FIELD)
    start = bytes(data[:16])
    found = _known(start)
    if found:
        return found
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise InvalidInput(f"an SVG, XML or HTML text has no pixels; {_READ_HERE}", field=FIELD)
    for at, mark, what in _FOREIGN:
        if start[at : at + len(mark)] == mark:
            raise InvalidInput(f"{what} is not read here; {_READ_HERE}", field=FIELD)
    raise InvalidInput(f"the bytes are no picture of a known format; {_READ_HERE}", field=FIELD)


def _known(start: bytes) -> str | None:
    if start.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "WebP"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if start.startswith(_TIFFS):
        return "TIFF"
    return "BMP" if start.startswith(b"BM") else None


# ---- how much a picture, a request and everybody together may have decoded, judged by what heads say
# A file of some bytes can hold fifty million pixels, which take a second and most of a gigabyte. So pixels
# are counted before any is decoded, and large pictures of one request come one after the other: others get
# their turns in between.


MOST_PIXELS_OF_REQUEST = 200_000_000
MOST_PIXELS_AT_ONCE = 16_000_000
"""Of one request, unless a single picture has more."""
MOST_PIXELS_WAITING = 1_000_000_000
"""Of all requests of a front end."""


def claimed_pixels(data: Buffer) -> int:
    """That a picture has by its head; 0 if it will not be decoded: whoever is to will say why.

    A walk over some markers, without a look at the pixels: for the loop.
    """
    view = memoryview(data).cast("B")
    try:
        name = sniff(view)
        head = heads.jpeg_frame(view)[0] if name == "JPEG" else READERS[name](view)
        check(head, len(view))
    except (InvalidInput, TooLarge, ValueError, struct.error):
        return 0
    return head.width * head.height


def pixels_of_request(pictures: Sequence[Buffer]) -> list[int]:
    """Of each picture; raises `TooLarge` when all of them together are too many."""
    pixels = [claimed_pixels(picture) for picture in pictures]
    together = sum(pixels)
    if together > MOST_PIXELS_OF_REQUEST:
        raise TooLarge(
            f"the pictures have {together} pixels together; a request may have {MOST_PIXELS_OF_REQUEST}",
            field=FIELD,
        )
    return pixels
