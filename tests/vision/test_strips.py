"""Large pictures of Pillow's are made RGB strip by strip, in the memory where they lie."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from carpool.types import Array
from carpool.vision import decode as decoding
from carpool.vision.decode import decode
from vision.photos import photo

WIDTH, HEIGHT = 300, 257
PEAK = """
import re, sys
from carpool.vision.decode import decode
def most() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
data = open(sys.argv[1], "rb").read()
decode(open(sys.argv[2], "rb").read())
before = most()
decoded = decode(data)
print((most() - before) / (decoded.width * decoded.height))
"""


def picture(mode: str) -> tuple[bytes, Array]:
    """A file, and what its pixels are on white."""
    image = photo("chelsea").resize((WIDTH, HEIGHT)).convert("RGB")
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize((WIDTH, HEIGHT)))
    image = image.quantize(16) if mode == "P" else image.convert(mode)
    file = BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG", quality=95)
    on_white = np.asarray(image.convert("RGBA")).astype(int) if mode in ("RGBA", "LA") else None
    if on_white is not None:
        alpha = on_white[:, :, 3:]
        return file.getvalue(), 255 - ((255 - on_white[:, :, :3]) * alpha + 127) // 255
    if mode == "I;16":
        return file.getvalue(), np.repeat((np.asarray(image) >> 8)[:, :, None], 3, 2)
    return file.getvalue(), np.asarray(Image.open(BytesIO(file.getvalue())).convert("RGB"))


@pytest.mark.parametrize("strip", [1, 7 * WIDTH, 1 << 20])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "CMYK", "I;16"])
def test_strips_make_the_same_picture(mode: str, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_STRIP", strip)
    data, expected = picture(mode)
    pixels = decode(data).pixels
    assert np.array_equal(pixels, expected)
    assert pixels.flags.c_contiguous
    pixels[:] = 7  # it is the caller's own


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_large_picture_takes_four_bytes_a_pixel(
    mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three copies of it took nine and a half."""
    folder = tmp_path_factory.mktemp("large")
    Image.new(mode, (4000, 4000), "teal").save(folder / "large.png", compress_level=1)
    Image.new(mode, (40, 40), "teal").save(folder / "small.png")
    sizes = [str(folder / "large.png"), str(folder / "small.png")]
    told = subprocess.run([sys.executable, "-c", PEAK, *sizes], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 6.0
