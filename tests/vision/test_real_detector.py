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
from carpool.vision.decode import Decoded, decode
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import VisionSettings, describe
from carpool.vision.transforms import Transform
from later import first, later
from vision.photos import PHOTOS, encoded, enlarged_photo, photo

FOLDER = Path(carpool.demo.__file__).parent / "models" / "nanodet"


@cache
def settings() -> VisionSettings:
    inputs = (TensorSpec("images", Datatype.FP32, (3, 416, 416)),)
    outputs = (
        TensorSpec("boxes", Datatype.FP32, (3549, 4)),
        TensorSpec("scores", Datatype.FP32, (3549, 80)),
    )
    labels = (FOLDER / "coco_labels.txt").read_text("utf-8").splitlines()
    found, notes, *_ = describe(
        read_toml(FOLDER / "model.toml"), Signature("nanodet", inputs, outputs, 8), {"boxes": labels}
    )
    assert found is not None
    assert notes == []
    return found


@cache
def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(FOLDER / "1" / "model.onnx"))


@cache
def transform() -> Transform:
    return Transform(settings().image, settings().input, "nanodet")


def run(decoded: Decoded) -> tuple[dict[str, Array], Geometry]:
    batch = np.empty((1, *transform().shape), transform().dtype)
    geometry = transform().prepare(decoded, batch[0])
    boxes, scores = session().run(["boxes", "scores"], {"images": batch})
    return {"boxes": boxes[0], "scores": scores[0]}, geometry


@cache
def outputs(name: str) -> tuple[dict[str, Array], Geometry, Array]:
    decoded = decode(encoded(photo(name), "JPEG", quality=95))
    return *run(decoded), decoded.pixels


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


@pytest.mark.parametrize("name", first(2, PHOTOS))
@pytest.mark.parametrize(("enlarged", "factor"), [(4, 2), later(8, 4)])
def test_a_reduced_decode_finds_the_same_boxes(name: str, enlarged: int, factor: int) -> None:
    """Everything that is clearly found in the whole picture, in the same place."""
    sent = encoded(enlarged_photo(name, enlarged), "JPEG", quality=90)
    in_full, reduced = decode(sent), decode(sent, reduction=transform().reduction)
    assert reduced.pixels.shape[1] * factor == in_full.pixels.shape[1]
    task = tasks.build(settings())
    clear = task.answer(*run(in_full), Options(score=0.3))["detections"]
    found = task.answer(*run(reduced), Options(score=0.25))["detections"]
    for one in clear:
        alike = [other["box"] for other in found if other["label"] == one["label"]]
        assert max((overlap(box, one["box"]) for box in alike), default=0.0) >= 0.95, (one, found)
    assert clear or name not in ("astronaut", "chelsea", "coffee")


def test_the_answer_drawn() -> None:
    raw, geometry, pixels = outputs("astronaut")
    drawn = tasks.build(settings()).draw(pixels, raw, geometry, Options())
    assert drawn.shape == pixels.shape
    assert 0.005 < (drawn != pixels).any(axis=2).mean() < 0.2
    assert decode(draw.encode(drawn, "jpeg")).pixels.shape == pixels.shape
