"""Picture files written by hand, byte by byte: heads that lie, and kinds that no library here writes."""

from __future__ import annotations

import struct
import zlib

from carpool.types import Array


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_head(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def jpeg_head(width: int, height: int, marker: int = 0xC0) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes.fromhex("012200021101031101")
    return b"\xff\xd8\xff" + bytes([marker]) + struct.pack(">H", len(frame) + 2) + frame


def webp_head(width: int, height: int) -> bytes:
    sizes = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + sizes


def bmp_head(width: int, height: int) -> bytes:
    return b"BM" + bytes(8) + struct.pack("<IIiiHH", 54, 40, width, height, 1, 24) + bytes(24)


def gif_head(width: int, height: int) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08\x00\x3b"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame


def tiff_head(width: int, height: int, *more: tuple[int, int, int, int], order: str = "<") -> bytes:
    entries = [(256, 4, 1, width), (257, 4, 1, height), *more]
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(entries))
    return head + b"".join(struct.pack(f"{order}HHII", *entry) for entry in entries) + bytes(4)


HEADS = {
    "PNG": png_head,
    "JPEG": jpeg_head,
    "WebP": webp_head,
    "BMP": bmp_head,
    "GIF": gif_head,
    "TIFF": tiff_head,
}


def png(pixels: Array, *, interlaced: bool = False) -> bytes:
    """RGB pixels of 8 or 16 bits; interlaced, they are stored in seven passes over a growing part."""
    whole = [(0, 0, 1, 1)]
    adam7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    passes = adam7 if interlaced else whole
    parts = [pixels[top::down, left::across] for top, left, down, across in passes]
    big_endian = pixels.dtype.newbyteorder(">")
    rows = b"".join(b"\0" + row.astype(big_endian).tobytes() for part in parts if part.size for row in part)
    bits = pixels.itemsize * 8
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], bits, 2, 0, 0, int(interlaced))
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
