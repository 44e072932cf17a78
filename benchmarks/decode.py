"""What a picture costs before the model sees it: JPEG decoders beside each other, then the whole way.

Files are made from a real photo. CPU time is the process's own, the best of several rounds in turn, so that a
busy machine disturbs all candidates alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from time import perf_counter, process_time

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from carpool.config.model import ImageSettings
from carpool.types import Datatype, TensorSpec
from carpool.vision.decode import decode
from carpool.vision.transforms import Transform

SIZES = ((640, 480), (1920, 1080), (4000, 3000))
INPUTS = (224, 416, 640)
QUALITY = 88


@dataclass(frozen=True)
class Row:
    what: str
    picture: str
    candidate: str
    cpu_us: float
    two_threads: float | None = None  # pictures per second with two threads over one


def photo() -> Image.Image:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise SystemExit("the photo is in scikit-learn: pip install 'carpool[dev]'")
    with Image.open(Path(spec.origin).parent / "datasets" / "images" / "china.jpg") as image:
        return image.convert("RGB")


def made(size: tuple[int, int], form: str = "JPEG") -> bytes:
    file = BytesIO()
    photo().resize(size, Image.Resampling.LANCZOS).save(file, form, quality=QUALITY)
    return file.getvalue()


def with_pillow(data: bytes, factor: int) -> object:
    with Image.open(BytesIO(data)) as image:
        if factor > 1:
            image.draft("RGB", (image.width // factor, image.height // factor))
        return np.asarray(image.convert("RGB"))


def with_opencv(data: bytes, factor: int) -> object:
    flag = {1: cv2.IMREAD_COLOR_RGB, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}[factor]
    return cv2.imdecode(np.frombuffer(data, np.uint8), flag)


def with_simplejpeg(data: bytes, factor: int) -> object:
    if factor == 1:
        return simplejpeg.decode_jpeg(data, "RGB")
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    return simplejpeg.decode_jpeg(data, "RGB", min_height=height // factor, min_width=width // factor)


def with_carpool(data: bytes, factor: int) -> object:
    return decode(data, reduction=lambda _width, _height: factor)


def candidates() -> dict[str, Callable[[bytes, int], object]]:
    found = {
        "carpool (simplejpeg + checks)": with_carpool,
        "simplejpeg": with_simplejpeg,
        "opencv": with_opencv,
        "Pillow": with_pillow,
    }
    try:
        from turbojpeg import TurboJPEG

        turbo = TurboJPEG()
    except (ImportError, RuntimeError):  # it brings no library of its own
        return found
    found["PyTurboJPEG"] = lambda data, factor: turbo.decode(data, scaling_factor=(1, factor))
    return found


def cpu_us(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best of the rounds, taken in turn; short work is repeated within one."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            repeats, start = 0, process_time()
            while repeats == 0 or process_time() - start < 0.02:
                work()
                repeats += 1
            if number:  # the first warms up
                times[name].append((process_time() - start) / repeats * 1e6)
    return {name: min(taken) for name, taken in times.items()}


def two_threads(work: Callable[[], object], rounds: int) -> float:
    """How much more two threads do than one, in wall time: 2 where the work holds no lock."""

    def wall(threads: int, repeats: int) -> float:
        started = [threading.Thread(target=lambda: [work() for _ in range(repeats)]) for _ in range(threads)]
        start = perf_counter()
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return perf_counter() - start

    repeats = max(2, int(0.05 / max(wall(1, 1), 1e-6)))
    walls = [(wall(1, repeats), wall(2, repeats)) for _ in range(rounds)]
    return 2 * min(one for one, _ in walls) / min(two for _, two in walls)  # the least disturbed of each


def decoders(sizes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    rows = []
    for size in sizes:
        data = made(size)
        picture = f"JPEG {size[0]}×{size[1]}, {len(data) // 1000} kB"
        for factor in (1, 2, 4):
            what = "full" if factor == 1 else f"1/{factor}"
            works = {name: partial(call, data, factor) for name, call in candidates().items()}
            for name, taken in cpu_us(works, rounds).items():
                ratio = two_threads(works[name], rounds) if factor == 1 else None
                rows.append(Row(what, picture, name, taken, ratio))
    return rows


def other_formats(size: tuple[int, int], rounds: int) -> list[Row]:
    rows = []
    for form in ("PNG", "WebP"):
        data = made(size, form)
        works: dict[str, Callable[[], object]] = {
            "carpool (Pillow + checks)": partial(decode, data),
            "opencv": partial(with_opencv, data, 1),
        }
        picture = f"{form} {size[0]}×{size[1]}, {len(data) // 1000} kB"
        for name, taken in cpu_us(works, rounds).items():
            rows.append(Row("full", picture, name, taken, two_threads(works[name], rounds)))
    return rows


def whole_way(sizes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    """Bytes to a normalised FP32 input, letterboxed, as a front end does it."""
    rows = []
    for size in sizes:
        data = made(size)
        for side in INPUTS:
            works: dict[str, Callable[[], object]] = {}
            for kernel, reduce in (("auto", True), ("auto", False), ("area", False), ("bilinear", False)):
                chosen = ImageSettings(kernel=kernel, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))
                transform = Transform(chosen, TensorSpec("images", Datatype.FP32, (3, side, side)), "bench")
                factor = transform.reduction(*size) if reduce else 1
                if reduce and factor == 1:
                    continue
                works[f"{kernel}, decoded {'in full' if factor == 1 else f'1/{factor}'}"] = prepared(
                    data, transform, reduce
                )
            for name, taken in cpu_us(works, rounds).items():
                rows.append(Row(f"to {side}×{side}", f"JPEG {size[0]}×{size[1]}", name, taken))
    return rows


def prepared(data: bytes, transform: Transform, reduce: bool) -> Callable[[], object]:
    out = np.empty(transform.shape, transform.dtype)
    reduction = transform.reduction if reduce else None
    return lambda: transform.prepare(decode(data, reduction=reduction), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small pictures and few rounds: within a minute")
    parser.add_argument("--json", action="store_true", help="rows for machines")
    given = parser.parse_args()
    cv2.setNumThreads(1)
    sizes, rounds = (SIZES[:2], 3) if given.quick else (SIZES, 9)
    rows = decoders(sizes, rounds) + other_formats(sizes[0], rounds) + whole_way(sizes, rounds)
    if given.json:
        print(json.dumps({"machine": platform.machine(), "rows": [asdict(row) for row in rows]}))
        return
    print(f"{'picture':<26} {'what':<12} {'candidate':<30} {'CPU µs':>9} {'two threads':>12}")
    for row in rows:
        threads = "" if row.two_threads is None else f"{row.two_threads:.2f}×"
        print(f"{row.picture:<26} {row.what:<12} {row.candidate:<30} {row.cpu_us:>9,.0f} {threads:>12}")


if __name__ == "__main__":
    main()
