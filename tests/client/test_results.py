"""Answers of the client as other packages take them."""

from __future__ import annotations

import base64
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from carpool.errors import ConfigError
from carpool.vision.python_pictures import Classes, Detections, Masks, Poses, RotatedBoxes

IMAGE = {"width": 4, "height": 3}
THING: dict[str, Any] = {"label": "cat", "class_id": 7, "score": 0.5, "box": [1.0, 0.0, 3.0, 2.0]}
RUNS = {"size": [3, 4], "counts": [3, 2, 1, 2, 4]}


def png() -> str:
    pixels = np.zeros((3, 4), np.uint8)
    pixels[0:2, 1:3] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


DETECTIONS = Detections({"image": IMAGE, "detections": [THING, THING | {"label": "dog", "class_id": 2}]})
MASKS = Masks({"image": IMAGE, "masks": [THING | {"rle": RUNS}]})
POSES = Poses({"image": IMAGE, "detections": [THING | {"keypoints": [[1.0, 2.0, 0.25], [3.0, 0.0, 0.75]]}]})
CORNERS = [[0.0, 0.0], [2.0, 0.0], [2.0, 1.0], [0.0, 1.0]]
ROTATED = RotatedBoxes({"image": IMAGE, "detections": [THING | {"corners": CORNERS, "angle": 0.0}]})
CLASSES = Classes({"image": IMAGE, "classes": [{"label": "cat", "class_id": 7, "score": 0.5}]})


def test_coco_results() -> None:
    first, second = DETECTIONS.to_coco(3)
    assert first == {"image_id": 3, "category_id": 7, "score": 0.5, "bbox": [1.0, 0.0, 2.0, 2.0]}
    assert second["category_id"] == 2
    assert [one["category_id"] for one in DETECTIONS.to_coco(categories={"dog": 18})] == [18]
    assert POSES.to_coco()[0]["keypoints"] == [1.0, 2.0, 2, 3.0, 0.0, 2]
    assert ROTATED.to_coco()[0]["segmentation"] == [[0.0, 0.0, 2.0, 0.0, 2.0, 1.0, 0.0, 1.0]]


def test_coco_masks_are_run_lengths_whatever_was_asked_for() -> None:
    as_png = Masks({"image": IMAGE, "masks": [THING | {"png": png()}]})
    assert MASKS.to_coco()[0]["segmentation"] == RUNS
    assert as_png.to_coco()[0]["segmentation"] == RUNS


@pytest.fixture
def supervision(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("supervision")
    for name in ("Detections", "KeyPoints", "Classifications"):
        package.__dict__[name] = SimpleNamespace
    monkeypatch.setitem(sys.modules, "supervision", package)


@pytest.mark.usefixtures("supervision")
def test_supervisions_objects() -> None:
    found = DETECTIONS.to_supervision()
    assert found.xyxy.tolist() == [THING["box"]] * 2
    assert found.class_id.tolist() == [7, 2]
    assert found.data["class_name"].tolist() == ["cat", "dog"]
    assert MASKS.to_supervision().mask[0].sum() == 4
    points = POSES.to_supervision()
    assert points.xy.tolist() == [[[1.0, 2.0], [3.0, 0.0]]]
    assert points.keypoint_confidence.tolist() == [[0.25, 0.75]]
    assert ROTATED.to_supervision().data["xyxyxyxy"].tolist() == [CORNERS]
    assert CLASSES.to_supervision().confidence.tolist() == [0.5]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(ConfigError, match="pip install 'supervision"):
        DETECTIONS.to_supervision()
