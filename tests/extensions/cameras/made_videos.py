"""Videos for tests: whole ones, and all the ways in which a file can be none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import av
import numpy as np

_FILE = Path(__file__).parents[3] / "tools" / "make_camera_videos.py"
_spec = spec_from_file_location("make_camera_videos", _FILE)
assert _spec is not None
assert _spec.loader is not None
tool = sys.modules["make_camera_videos"] = module_from_spec(_spec)
_spec.loader.exec_module(tool)


def picture(number: int = 0, size: tuple[int, int] = (64, 48)) -> np.ndarray[Any, Any]:
    """Red on the left; a bar that moves."""
    pixels = np.full((size[1], size[0], 3), 60, np.uint8)
    pixels[:, : size[0] // 2, 0] = 220
    pixels[number % size[1]] = 255
    return pixels


def video(
    path: Path,
    frames: int = 25,
    fps: int = 25,
    size: tuple[int, int] = (64, 48),
    *,
    times: Sequence[int] = (),  # in thousandths of a second, instead of fps
    codec: str = "mpeg4",
    turned: int = 0,
) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(1000 if times else fps))
        stream.width, stream.height = size
        stream.pix_fmt = "bgr24" if codec == "rawvideo" else "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for number in range(len(times) or frames):
            image = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
            if times:
                image.pts, image.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    return path


def sound(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        for number in range(20):
            samples = np.zeros((1, 1024), np.float32)
            image = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            image.rate, image.pts = 8000, number * 1024
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    return path


def absurd(path: Path, side: int = 60_000) -> Path:
    """Says of itself that it is enormous."""
    data = bytearray(video(path, 3, codec="rawvideo").read_bytes())
    at = data.index(b"strf") + 12
    data[at : at + 8] = side.to_bytes(4, "little") * 2
    path.write_bytes(data)
    return path
