"""What drift costs: a picture that is measured, one that is not, and a sample in the engine.

CPU time of the thread that does it, the best of several rounds, so that a busy machine disturbs little. Aim:
ten samples a second take at most 1 % of a core of a front end.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from time import thread_time

import cv2
import numpy as np
import orjson

from carpool.extensions.drift.model_drift import ModelDrift, SampledAnswer
from carpool.extensions.drift.samples import Sampled, measure
from carpool.extensions.drift.settings import DriftSettings
from carpool.vision.decode import decode

SIZES = ((640, 480), (1280, 720), (1920, 1080))
INPUT = 416  # a model's side: pictures come decoded to no more than it needs
SAMPLES_A_SECOND = 10
THING = {"label": "person", "class_id": 0, "score": 0.83, "box": [10.0, 20.0, 110.0, 220.0]}


@dataclass(frozen=True)
class Row:
    what: str
    picture: str
    cpu_us: float
    percent_of_a_core: float  # at ten samples a second


def best_us(work: Callable[[], object], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        started = thread_time()
        work()
        times.append(thread_time() - started)
    return min(times) * 1e6


def made(width: int, height: int) -> bytes:
    data = (resources.files("carpool.demo") / "pictures" / "astronaut.jpg").read_bytes()
    photo = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    return bytes(cv2.imencode(".jpg", cv2.resize(photo, (width, height)), [cv2.IMWRITE_JPEG_QUALITY, 88])[1])


def reduction(width: int, height: int) -> int:
    """As a model of that side has its pictures decoded."""
    fitting = (factor for factor in (8, 4, 2) if width % factor == height % factor == 0)
    return next((factor for factor in fitting if min(width, height) // factor >= INPUT), 1)


def rows(rounds: int) -> list[Row]:
    answer = orjson.dumps({"image": {"width": 640, "height": 480}, "detections": [THING] * 10})
    found = []

    def add(what: str, picture: str, cpu_us: float) -> None:
        found.append(Row(what, picture, round(cpu_us, 1), round(cpu_us * SAMPLES_A_SECOND / 1e4, 3)))

    for width, height in SIZES:
        file, name = made(width, height), f"{width}×{height}"
        pixels = decode(file, reduction=reduction)
        add(
            "measured, decoded for the model",
            name,
            best_us(lambda p=pixels: measure(Sampled([p], 60_000), answer), rounds),
        )
        add(
            "measured, decoded for this",
            name,
            best_us(lambda f=file: measure(Sampled([], len(f), f), answer), rounds),
        )
    values = measure(Sampled([decode(made(640, 480))], 60_000), answer).values
    model, now = ModelDrift("m", DriftSettings()), 0.0
    add(
        "a sample in the engine, of a camera",
        "any",
        best_us(
            lambda: model.take("1", "labels", SampledAnswer("door", values, "a", False), now), 10 * rounds
        ),
    )
    add("windows of 64 cameras looked at", "any", best_us(_full_model(values), rounds))
    return found


def _full_model(values: object) -> Callable[[], object]:
    model = ModelDrift("m", DriftSettings())
    for number in range(64 * 20):
        model.take("1", "labels", SampledAnswer(f"camera-{number % 64}", values, "a", False), 1.0)  # type: ignore[arg-type]
    return lambda: model.look(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    asked = parser.parse_args()
    cv2.setNumThreads(1)
    found = rows(20 if asked.quick else 200)
    if asked.json:
        print(
            json.dumps(
                {
                    "machine": platform.processor() or platform.machine(),
                    "rows": [asdict(one) for one in found],
                }
            )
        )
        return
    print(f"{'what':36} {'picture':>10} {'CPU µs':>9} {'% of a core at 10/s':>20}")
    for row in found:
        print(f"{row.what:36} {row.picture:>10} {row.cpu_us:>9.1f} {row.percent_of_a_core:>20.3f}")


if __name__ == "__main__":
    main()
