"""Cut, flipped and lying files: an error or a whole picture, never a crash, never memory without bounds.

The decoders are C. They run in a process of their own here, so that a crash is a failure and not an end.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from carpool.errors import InvalidInput, TooLarge
from carpool.vision.decode import decode
from carpool.vision.heads import PictureLimits
from vision.made_files import chunk, gif_head, png_head, tiff_head
from vision.photos import encoded, exif, photo

PICTURE = photo("astronaut").resize((96, 72))
FILES = {
    "jpeg": encoded(PICTURE, "JPEG", exif=exif(6)),
    "progressive": encoded(PICTURE, "JPEG", progressive=True),
    "cmyk": encoded(PICTURE.convert("CMYK"), "JPEG"),
    "grey": encoded(PICTURE.convert("L"), "JPEG"),
    "png": encoded(PICTURE, "PNG", exif=exif(3)),
    "palette": encoded(PICTURE.convert("P"), "PNG", transparency=3),
    "animated": encoded(PICTURE, "PNG", save_all=True, append_images=[PICTURE.rotate(9)]),
    "webp": encoded(PICTURE, "WebP", exif=exif(8)),
    "lossless": encoded(PICTURE, "WebP", lossless=True),
    "bmp": encoded(PICTURE, "BMP"),
    "gif": encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(9)]),
    "tiff": encoded(PICTURE, "TIFF"),
    "lzw": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
    "deflate": encoded(PICTURE, "TIFF", compression="tiff_adobe_deflate"),
    "tiff-jpeg": encoded(PICTURE, "TIFF", compression="jpeg"),
}
FLIPS = 50  # variants of each file
LIMITS = PictureLimits(pixels=1_000_000)
MEMORY = 48 << 20  # beyond what is there before: what the limits allow, twice over


def in_a_process(folder: Path, case: str) -> None:
    command = [sys.executable, "-c", f"from vision.test_decode_hostile import {case} as case; case()"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def memory(line: str) -> int:
    """Bytes of this process, from the kernel: VmRSS now, VmHWM at most since `forget_the_peak`."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in status if text.startswith(line)) * 1024


def forget_the_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmHWM")


def outcome(data: bytes) -> str:
    """What became of it; anything but a whole picture or one of our errors raises."""
    try:
        found = decode(data, LIMITS)
    except (InvalidInput, TooLarge) as error:
        said = error
    else:
        assert found.pixels.shape == (found.height, found.width, 3)
        return "picture"
    assert said.field == "image"
    assert len(said.message) < 400
    return type(said).__name__


def cut_everywhere() -> None:
    for name, data in FILES.items():
        step = max(1, len(data) // 120)
        for length in [*range(0, len(data) - 16, step), *range(len(data) - 16, len(data) - 4)]:
            found = outcome(data[:length])
            if found == "picture":
                assert same_as_whole(data[:length], data), f"{name}: {length} of {len(data)} bytes"


def same_as_whole(part: bytes, whole: bytes) -> bool:
    """What was cut off held no pixels: later frames, directories, end marks."""
    return bool(np.array_equal(decode(part).pixels, decode(whole).pixels))


def flip_bytes() -> None:
    for data in FILES.values():
        outcome(data)  # imports and warms up
    random, before = Random(20), forget_the_peak()
    tally = {"picture": 0, "InvalidInput": 0, "TooLarge": 0}
    for data in FILES.values():
        for _ in range(FLIPS):
            broken = bytearray(data)
            for _ in range(random.choice((1, 2, 8, 40))):
                # Half of the damage goes to the head, where the lengths and offsets are.
                reach = len(broken) if random.random() < 0.5 else min(len(broken), 160)
                broken[random.randrange(reach)] = random.choice(
                    (0, 1, 0x7F, 0x80, 0xFF, random.randrange(256))
                )
            tally[outcome(bytes(broken))] += 1
    assert min(tally["picture"], tally["InvalidInput"]) > 100, tally
    more = memory("VmHWM") - before
    assert more < MEMORY, f"{more >> 20} MiB"


def splice_files() -> None:
    """The head of one file with the body of another, doubled parts, and parts left out."""
    random = Random(21)
    names = sorted(FILES)
    for _ in range(600):
        one, other = FILES[random.choice(names)], FILES[random.choice(names)]
        at, to = random.randrange(len(one)), random.randrange(len(other))
        outcome(one[:at] + other[to:])
        outcome(one[:at] + one[max(0, at - random.randrange(64)) :])
        outcome(one[:at] + one[at + random.randrange(64) :])


def leak_nothing() -> None:
    """Errors on the way give their memory back: the tenth round needs no more than the second."""
    broken = [data[: len(data) * 2 // 3] for data in FILES.values()]
    held = []
    for _ in range(10):
        for data in broken * 10:
            outcome(data)
        held.append(memory("VmRSS"))
    assert held[-1] - held[1] < 4 << 20, held


def deflate_bombs() -> None:
    """A picture of one pixel with 256 MB of zeros behind it, and others with the zeros in their notes."""
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    outcome(FILES["png"])
    before = forget_the_peak()
    outcome(png_head(1, 1) + chunk(b"IDAT", bomb) + chunk(b"IEND", b""))
    for name, words in ((b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")):
        outcome(png_head(1, 1) + chunk(name, words + bomb) + chunk(b"IDAT", zlib.compress(bytes(4))))
    more = memory("VmHWM") - before
    assert more < MEMORY, f"{more >> 20} MiB"


@pytest.mark.parametrize(
    "case", ["cut_everywhere", "flip_bytes", "splice_files", "leak_nothing", "deflate_bombs"]
)
def test_no_bytes_bring_it_down(case: str, tmp_path: Path) -> None:
    in_a_process(tmp_path, case)


@pytest.mark.parametrize("name", FILES)
def test_half_a_picture_is_an_error(name: str) -> None:
    data = FILES[name]
    if name in ("gif", "animated"):  # half of the file holds all of the first frame
        data = data[: len(data) // 2]
    with pytest.raises(InvalidInput) as error:
        decode(data[: len(data) // 2])
    assert "cannot be" in error.value.message or "ends within" in error.value.message


def test_jpeg_data_that_stops_making_sense_is_an_error() -> None:
    data = FILES["jpeg"]
    middle = len(data) * 2 // 3
    with pytest.raises(InvalidInput, match="premature end"):
        decode(data[:middle] + b"\xff\xd9" + data[middle:])


def test_a_frame_beyond_its_canvas_is_an_error() -> None:
    sent = gif_head(8, 8).replace(b"\x2c\0\0\0\0\x08\0\x08\0", b"\x2c\0\0\0\0\xff\xff\xff\xff")
    with pytest.raises(InvalidInput):
        decode(sent)


def test_a_tiff_whose_strips_lie_elsewhere() -> None:
    strips = [(258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 0xFFFFFF00), (278, 4, 1, 8), (279, 4, 1, 64)]
    with pytest.raises(InvalidInput):
        decode(tiff_head(8, 8, *strips))
    far = [(t, k, n, 8 if t == 273 else v) for t, k, n, v in strips[:-1]] + [(279, 4, 1, 0xFFFFFF00)]
    outcome(tiff_head(8, 8, *far))


def test_an_error_names_no_python() -> None:
    for data in FILES.values():
        with pytest.raises(InvalidInput) as error:
            decode(data[:200])
        assert "Traceback" not in error.value.message
        assert "object at 0x" not in error.value.message


def test_wrong_formats_are_not_tried() -> None:
    """Only the decoder that the first bytes name sees the data."""
    with pytest.raises(InvalidInput, match="BMP"):
        decode(b"BM" + FILES["png"])
    assert isinstance(Image.MAX_IMAGE_PIXELS, int)  # Pillow's own guard stays as it was
