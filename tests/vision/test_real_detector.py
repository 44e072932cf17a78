"""The demo detector on real photos, from bytes to an answer and to a drawn picture."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import carpool.demo
from carpool.config.toml import read_toml
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision import draw, tasks
from carpool.vision.decode import decode
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.settings import VisionSettings, describe
from carpool.vision.transforms import Transform
from vision.photos import encoded, photo

FOLDER = Path(carpool.demo.__file__).parent / "models" / "nanodet"


@cache
def settings() -> VisionSettings:
    inputs = (TensorSpec("images", Datatype.FP32, (3, 416, 416)),)
    outputs = (
        TensorSpec("boxes", Datatype.FP32, (3549, 4)),
        TensorSpec("scores", Datatype.FP32, (3549, 80)),
    )
    labels = (FOLDER / "coco_labels.txt").read_text("utf-8").splitlines()
    found, notes = describe(
        read_toml(FOLDER / "model.toml"), Signature("nanodet", inputs, outputs, 8), {"boxes": labels}
    )
    assert found is not None
    assert notes == []
    return found


@cache
def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(FOLDER / "1" / "model.onnx"))


@cache
def outputs(name: str) -> tuple[dict[str, Array], Geometry, Array]:
    decoded = decode(encoded(photo(name), "JPEG", quality=95))
    transform = Transform(settings().image, settings().input, "nanodet")
    batch = np.empty((1, *transform.shape), transform.dtype)
    geometry = transform.prepare(decoded, batch[0])
    boxes, scores = session().run(["boxes", "scores"], {"images": batch})
    return {"boxes": boxes[0], "scores": scores[0]}, geometry, decoded.pixels


def overlap(one: list[float], other: tuple[float, ...]) -> float:
    width = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / (areas - width * height)


@pytest.mark.parametrize(
    ("name", "label", "box"),
    [
        ("astronaut", "person", (15, 14, 364, 508)),
        ("chelsea", "cat", (2, 2, 440, 297)),
        ("coffee", "cup", (170, 20, 416, 252)),
    ],
)
def test_things_are_found_where_they_are(name: str, label: str, box: tuple[float, ...]) -> None:
    raw, geometry, _ = outputs(name)
    answer = tasks.build(settings()).answer(raw, geometry, Options(score=0.3))
    assert answer["image"] == dict(zip(("width", "height"), photo(name).size, strict=True))
    found = [one for one in answer["detections"] if one["label"] == label]
    assert any(overlap(one["box"], box) > 0.7 for one in found), answer


def test_the_answer_drawn() -> None:
    raw, geometry, pixels = outputs("astronaut")
    drawn = tasks.build(settings()).draw(pixels, raw, geometry, Options())
    assert drawn.shape == pixels.shape
    assert 0.005 < (drawn != pixels).any(axis=2).mean() < 0.2
    assert decode(draw.encode(drawn, "jpeg")).pixels.shape == pixels.shape
