"""What the demo detector should say, computed slowly and plainly: Pillow, numpy loops and onnxruntime."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from PIL import Image

from carpool.demo import bundled_models

_FOLDER = bundled_models() / "nanodet"
_SIDE = 416


class Thing(NamedTuple):
    label: str
    score: float
    box: tuple[float, float, float, float]


@cache
def _session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(_FOLDER / "1" / "model.onnx", providers=["CPUExecutionProvider"])


@cache
def things_in(file: Path) -> list[Thing]:
    """The best first: letterboxed at the top left on grey, blue first, as the model's README says."""
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    scale = min(_SIDE / picture.width, _SIDE / picture.height)
    small = picture.resize(
        (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR
    )
    canvas = Image.new("RGB", (_SIDE, _SIDE), (114, 114, 114))
    canvas.paste(small, (0, 0))
    blue_first = np.asarray(canvas, np.float32)[:, :, ::-1]
    values = (blue_first - np.array([103.53, 116.28, 123.675])) / np.array([57.375, 57.12, 58.395])
    batch = values.transpose(2, 0, 1)[None].astype(np.float32)
    boxes, scores = _session().run(["boxes", "scores"], {"images": batch})
    labels = (_FOLDER / "coco_labels.txt").read_text().splitlines()
    found = []
    for box, row in zip(boxes[0], scores[0], strict=True):
        best = int(row.argmax())
        if row[best] >= 0.4:
            x1, y1, x2, y2 = (float(side) / scale for side in box)
            found.append(Thing(labels[best], float(row[best]), (x1, y1, x2, y2)))
    found.sort(key=lambda thing: -thing.score)
    kept: list[Thing] = []
    for thing in found:
        if all(one.label != thing.label or overlap(one.box, thing.box) <= 0.6 for one in kept):
            kept.append(thing)
    return kept


def overlap(one: Any, other: Any) -> float:
    width = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    both = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / (both - width * height)
