"""Reads which format a picture is in and how large it is from its first bytes, before any memory is taken.

Each reader walks a bounded number of steps and takes no memory to speak of.

struct.error means that the bytes ended too early, ValueError that they cannot be right.

Pillow could open all but JPEG lazily, and was tried: its walks have no bounds, and heads are read in the
event loop. 1 MiB of empty PNG chunks took it 700 ms (here 9), 66 kB of packed texts 160 ms (here 0.1).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from carpool.errors import InvalidInput, TooLarge

# ---- the tags of TIFF files and EXIF blocks: the first directory, read with every length distrusted

WIDTH, HEIGHT, BITS, ORIENTATION = 256, 257, 258, 274
TILE_WIDTH, TILE_HEIGHT = 322, 323

_MAX_TAGS = 1024  # cameras write a few dozen
_MAX_VALUES = 1 << 18  # in one tag: a strip per row of a tall picture fits
_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # else 1
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_BYTES = (1, 2, 7)  # types whose values are text or blobs


_LAYOUTS = {42: ("H", "HHI", "I", 4), 43: ("Q", "HHQ", "Q", 8)}
"""By version, classic and BigTIFF: formats of the number of tags, of tag, type and number of values, and of
an offset; and where the first offset stands."""


def read_tags(data: memoryview) -> Mapping[int, int]:
    """The first value of each whole-number tag; ValueError says what cannot be right."""
    try:
        return _read(data)
    except struct.error:
        raise ValueError("the directory lies outside the data") from None


def _read(data: memoryview) -> dict[int, int]:
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        raise ValueError("no byte order")
    version = struct.unpack_from(f"{order}H", data, 2)[0]
    if version not in _LAYOUTS:
        raise ValueError(f"version {version} is unknown")
    *formats, first = _LAYOUTS[version]
    counted, entry, offset = (struct.Struct(order + form) for form in formats)
    (start,) = offset.unpack_from(data, first)
    (count,) = counted.unpack_from(data, start)
    if count > _MAX_TAGS:
        raise ValueError(f"{count} tags are more than the {_MAX_TAGS} allowed")
    values: dict[int, int] = {}
    outside, start, room = 0, start + counted.size, offset.size
    for at in range(start, start + count * (entry.size + room), entry.size + room):
        tag, kind, length = entry.unpack_from(data, at)
        if length > _MAX_VALUES and kind not in _BYTES:
            raise ValueError(f"tag {tag} has {length} values")
        size = length * _SIZES.get(kind, 1)
        place = at + entry.size
        if size > room:
            (place,) = offset.unpack_from(data, place)
            outside += size
        if outside > len(data):  # in an honest file every byte belongs to one tag at most
            raise ValueError("the tags claim more bytes than there are")
        if kind in _NUMBERS and length:
            (values[tag],) = struct.unpack_from(order + _NUMBERS[kind], data, place)
    return values


# ---- EXIF orientation: which way up a picture was taken

UPRIGHT = 1
_EXIF = b"Exif\0\0"


def exif_orientation(block: memoryview) -> int:
    """Returns 1 to 8 from an EXIF block, with or without its `Exif` prefix; 1 where it is absent or
    broken."""
    if bytes(block[: len(_EXIF)]) == _EXIF:
        block = block[len(_EXIF) :]
    try:
        return checked(read_tags(block).get(ORIENTATION, UPRIGHT))
    except ValueError:
        return UPRIGHT  # a camera's note that cannot be read is no reason to refuse its picture


def checked(orientation: int) -> int:
    return orientation if 1 <= orientation <= 8 else UPRIGHT


# ---- the heads themselves

_MAX_SEGMENTS = 4_096  # marker segments of a JPEG before its first scan
_MAX_CHUNKS = 16_384  # chunks of a PNG or WebP
_MAX_BLOCKS = 65_536  # sub-blocks of a GIF before its first frame
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # JPEG markers without a length
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))


@dataclass(frozen=True, slots=True)
class PictureHead:
    """Describes what the head of a picture says. Width and height are as stored; `orientation` is EXIF's, 1
    to 8."""

    format: str
    width: int
    height: int
    orientation: int = UPRIGHT
    bits: int = 8  # per channel, or per pixel where there is a palette
    components: int = 0  # of a JPEG
    frames: int | None = 1  # None where only reading everything would show it
    scans: int = 1  # 0: of a progressive JPEG, not counted yet
    tile_pixels: int = 0  # of a TIFF, which may claim tiles larger than itself

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as the photographer saw them."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def jpeg(data: memoryview) -> PictureHead:
    head, marker = jpeg_frame(data)
    if marker not in _PROGRESSIVE:
        return head
    return replace(head, scans=bytes(data).count(b"\xff\xda"))  # inside a scan these two cannot occur


def jpeg_frame(data: memoryview) -> tuple[PictureHead, int]:
    """Reads a head without its scans, which only a look at the whole file shows; and the marker of its
    frame."""
    orientation, at = UPRIGHT, 2
    for _ in range(_MAX_SEGMENTS):
        lead, marker = struct.unpack_from(">BB", data, at)
        if lead != 0xFF:
            raise ValueError("a marker is missing")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        at += 2
        if marker in _STANDALONE:
            continue
        if marker in (0xD9, 0xDA):
            raise ValueError("it has no frame")
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _START_OF_FRAME:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 2)
            return PictureHead("JPEG", width, height, orientation, bits, components), marker
        if marker == 0xE1 and bytes(data[at + 2 : at + 6]) == b"Exif":
            orientation = exif_orientation(data[at + 2 : at + length])
        at += length
    raise ValueError("its frame is too far from its start")


def png(data: memoryview) -> PictureHead:
    length, kind, width, height, bits = struct.unpack_from(">I4sIIB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ValueError("it does not start with IHDR")
    orientation, frames = UPRIGHT, 1
    for name, start, end in _png_chunks(data):
        if name == b"eXIf":
            orientation = exif_orientation(data[start:end])
        elif name == b"acTL":
            (frames,) = struct.unpack_from(">I", data, start)
    return PictureHead("PNG", width, height, orientation, bits, frames=frames)


def _png_chunks(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return
        length, name = struct.unpack_from(">I4s", data, at)
        yield name, at + 8, at + 8 + length
        if name == b"IEND":
            return
        at += 12 + length
    raise ValueError(f"it has more than {_MAX_CHUNKS} chunks")


def webp(data: memoryview) -> PictureHead:
    (kind,) = struct.unpack_from("4s", data, 12)
    if kind == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        if start != b"\x9d\x01\x2a":
            raise ValueError("its frame has no header")
        return PictureHead("WebP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        mark, sizes = struct.unpack_from("<BI", data, 20)
        if mark != 0x2F:
            raise ValueError("its frame has no header")
        return PictureHead("WebP", (sizes & 0x3FFF) + 1, (sizes >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X":
        raise ValueError("its first chunk is unknown")
    return _webp_extended(data)


def _webp_extended(data: memoryview) -> PictureHead:
    low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", data, 24)
    orientation, frames, at = UPRIGHT, 0, 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            width, height = (high_w << 16 | low_w) + 1, (high_h << 16 | low_h) + 1
            return PictureHead("WebP", width, height, orientation, frames=max(frames, 1))
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            orientation = exif_orientation(data[at + 8 : at + 8 + length])
        frames += name == b"ANMF"
        at += 8 + length + length % 2
    raise ValueError(f"it has more than {_MAX_CHUNKS} chunks")


def bmp(data: memoryview) -> PictureHead:
    (size,) = struct.unpack_from("<I", data, 14)
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    elif 40 <= size <= 124:
        width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    else:
        raise ValueError(f"its head of {size} bytes is unknown")
    return PictureHead("BMP", width, abs(height), bits=bits)  # a negative height counts from the top


def tiff(data: memoryview) -> PictureHead:
    found = read_tags(data)
    if WIDTH not in found or HEIGHT not in found:
        raise ValueError("it does not declare its size")
    return PictureHead(
        "TIFF",
        found[WIDTH],
        found[HEIGHT],
        checked(found.get(ORIENTATION, UPRIGHT)),
        found.get(BITS, 1),
        frames=None,
        tile_pixels=found.get(TILE_WIDTH, 0) * found.get(TILE_HEIGHT, 0),
    )


def gif(data: memoryview) -> PictureHead:
    """Returns the size of the canvas; a first frame that reaches beyond it is refused when it is decoded."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    steps = 0
    while steps < _MAX_BLOCKS:
        (mark,) = struct.unpack_from("B", data, at)
        if mark == 0x2C:
            return PictureHead("GIF", width, height, bits=(flags & 7) + 1, frames=None)
        if mark != 0x21:
            raise ValueError("it has no frame")
        at += 2
        length = 1
        while length and steps < _MAX_BLOCKS:
            (length,) = struct.unpack_from("B", data, at)
            at += 1 + length
            steps += 1
    raise ValueError(f"it has more than {_MAX_BLOCKS} blocks before its first frame")


# ---- which format it is, and what a picture may cost

Buffer: TypeAlias = bytes | bytearray | memoryview

FIELD = "image"


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits what a picture may cost. Pixels and sides are of the picture before any reduction."""

    bytes: int = 64 << 20
    pixels: int = 50_000_000
    side: int = 65_535
    frames: int = 1_000  # only the first is read; more is not a picture
    scans: int = 100  # of a progressive JPEG: each is a pass over all of it
    scanned_pixels: int = 600_000_000  # scans × pixels
    free_pixels: int = 4_000_000  # may be in a file of any length
    pixels_per_byte: int = 1_000  # beyond those: a plain surface has some hundred


DEFAULT_LIMITS = PictureLimits()

READERS: Mapping[str, Callable[[memoryview], PictureHead]] = {
    "JPEG": jpeg, "PNG": png, "WebP": webp, "BMP": bmp, "TIFF": tiff, "GIF": gif,
}  # fmt: skip
_READ_HERE = "send JPEG, PNG, WebP, BMP, TIFF or GIF"
_BEGINS = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WebP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "BMP": re.compile(rb"BM"),
}
_FOREIGN = (  # where, what, and the name of a format that is known and not read
    (4, b"ftyp", "an AVIF, HEIC or video file"),
    (0, b"%PDF", "a PDF"),
    (0, b"\xff\x0a", "a JPEG XL image"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
)


def read_head(data: Buffer, limits: PictureLimits = DEFAULT_LIMITS) -> PictureHead:
    """Returns format, size and orientation of a picture within the limits; InvalidInput or TooLarge
    otherwise."""
    view = memoryview(data).cast("B")
    if len(view) > limits.bytes:
        raise _too_large(f"has {len(view)} bytes, more than the {limits.bytes} allowed")
    name = sniff(view)
    try:
        head = READERS[name](view)
    except struct.error:
        raise InvalidInput(f"the {name} image ends within its head", field=FIELD) from None
    except ValueError as error:
        raise InvalidInput(f"the {name} image cannot be read: {error}", field=FIELD) from None
    check(head, len(view), limits)
    return head


def sniff(data: Buffer) -> str:
    """The format by its first bytes, whatever follows them and whatever the file is called."""
    if not len(data):
        raise InvalidInput("the image is empty", field=FIELD)
    start = bytes(data[:16])
    for name, begins in _BEGINS.items():
        if begins.match(start):
            return name
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise InvalidInput(f"an SVG, XML or HTML text has no pixels; {_READ_HERE}", field=FIELD)
    for at, mark, what in _FOREIGN:
        if start[at : at + len(mark)] == mark:
            raise InvalidInput(f"{what} is not supported; {_READ_HERE}", field=FIELD)
    raise InvalidInput(f"the bytes are not an image of a known format; {_READ_HERE}", field=FIELD)


def check(head: PictureHead, size: int, limits: PictureLimits = DEFAULT_LIMITS) -> None:
    """Whether a picture in so many bytes may be decoded; raises."""
    width, height = head.width, head.height
    pixels = width * height
    if width < 1 or height < 1:
        raise InvalidInput(f"the {head.format} image declares {width}×{height} pixels", field=FIELD)
    if max(width, height) > limits.side:
        raise TooLarge(f"the image is {width}×{height} pixels; a side may have {limits.side}", field=FIELD)
    if max(pixels, head.tile_pixels) > limits.pixels:
        raise TooLarge(
            f"the image is {width}×{height} pixels, more than the {limits.pixels} allowed", field=FIELD
        )
    if (head.frames or 1) > limits.frames:
        raise TooLarge(
            f"the image has {head.frames} frames, more than the {limits.frames} allowed", field=FIELD
        )
    if pixels > limits.free_pixels + limits.pixels_per_byte * size:
        raise TooLarge(
            f"the image declares {pixels} pixels in {size} bytes, more than {limits.pixels_per_byte} per "
            "byte",
            field=FIELD,
        )
    if head.scans > limits.scans or head.scans * pixels > limits.scanned_pixels:
        most = min(limits.scans, limits.scanned_pixels // pixels)
        raise TooLarge(
            f"the progressive JPEG has {head.scans} scans, more than the {most} allowed", field=FIELD
        )


def _too_large(why: str, what: str = "the image") -> TooLarge:
    return TooLarge(f"{what} {why}", field=FIELD)


# ---- how much a picture, a request and all requests together may have decoded, judged by what heads say
# A file of some bytes can hold fifty million pixels, which take a second and most of a gigabyte. So pixels
# are counted before any is decoded, and large pictures of one request come one after the other: others get
# their turns in between.

MOST_PIXELS_OF_REQUEST = 200_000_000
MOST_PIXELS_AT_ONCE = 16_000_000
"""Of one request, unless a single picture has more."""
MOST_PIXELS_WAITING = 1_000_000_000
"""Of all requests of a front end."""


def claimed_head(data: Buffer) -> PictureHead | None:
    """Returns the head of a picture; None if it will not be decoded: the decoder reports why.

    A walk over some markers, without a look at the pixels: for the loop.
    """
    view = memoryview(data).cast("B")
    try:
        name = sniff(view)
        if name == "JPEG":
            head, marker = jpeg_frame(view)
            head = replace(head, scans=0) if marker in _PROGRESSIVE else head
        else:
            head = READERS[name](view)
        check(head, len(view))
    except (InvalidInput, TooLarge, ValueError, struct.error):
        return None
    return head


def heads_of_request(pictures: Sequence[Buffer]) -> tuple[Sequence[PictureHead | None], Sequence[int]]:
    """The head of each picture and its pixels, which are none without a head; raises `TooLarge` when all of
    them together are too many."""
    heads, pixels = [], []
    for data in pictures:
        head = claimed_head(data)
        heads.append(head)
        pixels.append(0 if head is None else head.width * head.height)
    together = sum(pixels)
    if together > MOST_PIXELS_OF_REQUEST:
        why = f"have {together} pixels together; a request may have {MOST_PIXELS_OF_REQUEST}"
        raise _too_large(why, "the images")
    return heads, pixels
