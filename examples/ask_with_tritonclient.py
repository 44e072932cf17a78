"""Ask the demo detector about a picture, with NVIDIA's own client.

    carpool serve                                       # in another terminal
    python examples/ask_with_tritonclient.py street.jpg

Without a picture it takes the photograph of an astronaut that comes with Carpool. Needs tritonclient[http].
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput

from carpool.demo import bundled_models, pictures

SIDE = 416
MEAN, STD = (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)  # of blue, green, red

Floats = NDArray[np.float32]


def to_tensor(picture: Image.Image) -> tuple[Floats, float]:
    """The picture in the top left of a grey square, as the model wants it, and how much it was scaled."""
    scale = min(SIDE / picture.width, SIDE / picture.height)
    size = (round(picture.width * scale), round(picture.height * scale))
    square = Image.new("RGB", (SIDE, SIDE), (114, 114, 114))
    square.paste(picture.convert("RGB").resize(size))
    bgr = np.asarray(square, np.float32)[:, :, ::-1]
    planes = ((bgr - MEAN) / STD).transpose(2, 0, 1)
    return np.ascontiguousarray(planes[np.newaxis], np.float32), scale


def best_boxes(boxes: Floats, scores: Floats, least: float = 0.4) -> list[tuple[int, float, Floats]]:
    """Class, score and box of each object: the strongest first, without those that repeat a stronger one."""
    classes, best = scores.argmax(axis=1), scores.max(axis=1)
    kept: list[tuple[int, float, Floats]] = []
    for index in np.argsort(-best)[: int((best >= least).sum())]:
        found = (int(classes[index]), float(best[index]), boxes[index])
        if all(found[0] != other[0] or overlap(found[2], other[2]) < 0.6 for other in kept):
            kept.append(found)
    return kept


def overlap(a: Floats, b: Floats) -> float:
    """Intersection over union of two boxes x1, y1, x2, y2."""
    width, height = np.maximum(0, np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]))
    both = width * height
    return float(both / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - both))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the demo detector about a picture.")
    parser.add_argument("picture", nargs="?", type=Path, default=None)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("--labels", type=Path, default=None, help="a file with one class name per line")
    given = parser.parse_args()
    tensor, scale = to_tensor(Image.open(given.picture or pictures()[0]))

    with InferenceServerClient(given.url) as client:
        images = InferInput("images", tensor.shape, "FP32")
        images.set_data_from_numpy(tensor)
        answer: Any = client.infer("nanodet", [images])

    labels = (given.labels or bundled_models() / "nanodet" / "coco_labels.txt").read_text().splitlines()
    for kind, score, box in best_boxes(answer.as_numpy("boxes")[0], answer.as_numpy("scores")[0]):
        x1, y1, x2, y2 = (round(float(edge) / scale) for edge in box)
        print(f"{labels[kind]:<12} {score:.2f}   x {x1}–{x2}, y {y1}–{y2}")


if __name__ == "__main__":
    main()
