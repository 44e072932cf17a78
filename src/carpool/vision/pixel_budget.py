"""How much a picture, a request and everybody together may have decoded, judged by what heads say.

A file of some bytes can hold fifty million pixels, which take a second and most of a gigabyte. So pixels are
counted before any is decoded, and large pictures of one request come one after the other: others get their
turns in between.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from carpool.errors import InvalidInput, TooLarge
from carpool.vision import heads
from carpool.vision.formats import FIELD, READERS, Buffer, check, sniff

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
