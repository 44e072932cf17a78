"""Videos as still cameras would have recorded them, to try `carpool watch` without a camera.

A background that does not move, somebody who walks through it now and then, and the noise of a sensor in
every frame. Backgrounds and the figure are the demo's pictures; the same seed makes the same videos.

    python tools/make_camera_videos.py videos                      # 20 cameras, 20 seconds each
    python tools/make_camera_videos.py videos --cameras 3 --seconds 5 --fps 10 --size 320x240
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import av
import cv2
import numpy as np

import carpool

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

PICTURES = Path(carpool.__file__).parent / "demo" / "pictures"
FIGURE = (slice(14, 508), slice(14, 364))  # of astronaut.jpg: a person, half-length
NOISE = 3.0  # grey levels of 255
FIGURE_HEIGHT = (0.4, 0.9)  # of the picture's, from one camera to the next
WALKS = (0.25, 0.75)  # when somebody is there: shares of a round
ROUND_S = 16.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cameras", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--fps", type=int, default=5)
    parser.add_argument("--size", default="640x480", metavar="WIDTHxHEIGHT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--still", action="store_true", help="nobody walks through")
    args = parser.parse_args()
    try:
        width, height = (int(side) for side in args.size.split("x"))
    except ValueError:
        parser.error("--size must be like 640x480")
    size, people = (width, height), not args.still
    for path in make_videos(
        args.folder, args.cameras, args.seconds, args.fps, size, args.seed, people=people
    ):
        print(path)
    return 0


def make_videos(
    folder: Path,
    cameras: int,
    seconds: float,
    fps: int,
    size: tuple[int, int] = (640, 480),
    seed: int = 1,
    *,
    people: bool = True,
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(cameras):
        path = folder / f"camera-{number + 1:02}.mp4"
        write_video(path, frames(number, round(seconds * fps), fps, size, seed, people=people), fps)
        made.append(path)
    return made


def frames(
    number: int, count: int, fps: int, size: tuple[int, int], seed: int, *, people: bool = True
) -> Iterator[Pixels]:
    """Of one camera; people come to each at another time."""
    random = np.random.default_rng((seed, number))
    background = scene(number, size, random)
    low, high = FIGURE_HEIGHT
    figure = person(round(size[1] * random.uniform(low, high)))
    # Noise costs more than everything else here: a few fields, of which each frame takes one, shifted.
    noise = [random.normal(0.0, NOISE, (size[1], size[0], 3)).astype(np.float32) for _ in range(4)]
    start, heading = random.uniform(), random.choice((-1, 1))
    for index in range(count):
        pixels = background.astype(np.float32)
        at = (start + index / fps / ROUND_S) % 1.0
        if people and WALKS[0] <= at < WALKS[1]:
            share = (at - WALKS[0]) / (WALKS[1] - WALKS[0])
            paste(pixels, figure, share if heading > 0 else 1.0 - share)
        field = noise[index % len(noise)]
        pixels += np.roll(field, int(random.integers(0, size[0])), 1)
        yield np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def scene(number: int, size: tuple[int, int], random: np.random.Generator) -> Pixels:
    """In turn a plain wall with a floor, and a part of a photograph."""
    width, height = size
    if number % 2:
        photo = cv2.cvtColor(cv2.imread(str(PICTURES / "coffee.jpg")), cv2.COLOR_BGR2RGB)
        top, left = (int(random.integers(0, side // 3)) for side in photo.shape[:2])
        part = photo[top : top + 2 * photo.shape[0] // 3, left : left + 2 * photo.shape[1] // 3]
        return np.asarray(cv2.resize(part, size, interpolation=cv2.INTER_AREA), np.uint8)
    wall = np.empty((height, width, 3), np.uint8)
    wall[:] = random.integers(90, 200, 3)
    wall[round(0.8 * height) :] = random.integers(40, 90, 3)
    light = np.linspace(0.8, 1.1, width)[None, :, None]
    return np.clip(wall * light, 0, 255).astype(np.uint8)


def person(height: int) -> Pixels:
    photo = cv2.cvtColor(cv2.imread(str(PICTURES / "astronaut.jpg")), cv2.COLOR_BGR2RGB)[FIGURE]
    width = max(1, round(photo.shape[1] * height / photo.shape[0]))
    return np.asarray(cv2.resize(photo, (width, max(1, height)), interpolation=cv2.INTER_AREA), np.uint8)


def paste(pixels: np.ndarray[Any, Any], figure: Pixels, share: float) -> None:
    """Standing on the lower edge, on its way from outside the one side to outside the other."""
    height, width = figure.shape[:2]
    left = round(-width + share * (pixels.shape[1] + width))
    first, last = max(0, left), min(pixels.shape[1], left + width)
    if last > first:
        pixels[-height:, first:last] = figure[-pixels.shape[0] :, first - left : last - left]


def write_video(path: Path, images: Iterator[Pixels], fps: int) -> None:
    with av.open(str(path), "w") as container:
        stream = None
        for image in images:
            if stream is None:
                stream = container.add_stream("mpeg4", rate=Fraction(fps), options={"qscale": "3"})
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.bit_rate = 4_000_000
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        if stream is not None:
            container.mux(stream.encode(None))


if __name__ == "__main__":
    sys.exit(main())
