"""What one picture and its answer measure."""

from __future__ import annotations

import math

import cv2
import numpy as np
import orjson
import pytest

from carpool.errors import CarpoolError
from carpool.extensions.drift.measures import ON_THE_PAGE, PROJECTIONS, answer_values
from carpool.extensions.drift.samples import Sampled, directions, measure, picture_values
from carpool.extensions.drift.settings import UncertainSettings
from carpool.extensions.drift.streams import STATES
from carpool.observe import columns
from carpool.types import Array
from carpool.vision.decode import Decoded, decode
from extensions.drift.traffic import blurred, darkened, scene_of


def values_of(pixels: Array, size: int = 10_000) -> tuple[dict[str, object], str, bool]:
    height, width = pixels.shape[:2]
    values, look, black = picture_values(Decoded(pixels, width, height), size)
    return dict(values), look, black


def number(values: dict[str, object], name: str) -> float:
    value = values[name]
    assert isinstance(value, float)
    return value


def test_light_and_blur_are_told_apart() -> None:
    scene = scene_of("chelsea")
    usual, dark, soft = (values_of(change)[0] for change in (scene, darkened(scene), blurred(scene)))
    assert number(dark, "brightness") == pytest.approx(0.45 * number(usual, "brightness"), rel=0.02)
    assert number(dark, "contrast") == pytest.approx(number(usual, "contrast"), rel=0.05)
    assert number(dark, "sharpness") == pytest.approx(number(usual, "sharpness"), rel=0.1)
    assert number(soft, "sharpness") < 0.5 * number(usual, "sharpness")
    assert number(soft, "brightness") == pytest.approx(number(usual, "brightness"), rel=0.02)
    assert (usual["size"], usual["grey"], usual["bytes"]) == ("320x240", "colour", 10_000 / (320 * 240))


def test_black_grey_and_plain() -> None:
    noise = np.random.default_rng(1).integers(0, 6, (240, 320, 3)).astype(np.uint8)
    values, look, black = values_of(noise + np.uint8(16))  # video has its black there
    assert black
    assert "sharpness" not in values
    assert not values_of(scene_of("coffee"))[2]
    assert not values_of(np.full((240, 320, 3), 128, np.uint8))[2]
    assert not values_of(darkened(scene_of("coffee")))[2]
    grey = cv2.cvtColor(cv2.cvtColor(scene_of("coffee"), cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    assert values_of(np.asarray(grey))[0]["grey"] == "grey"
    assert values_of(noise)[1] != look
    assert values_of(noise)[1] == values_of(noise.copy())[1]


def test_the_smallest_pictures() -> None:
    for height, width in ((1, 1), (3, 1), (1, 9), (8, 8)):
        values, look, _ = values_of(np.zeros((height, width, 3), np.uint8))
        assert values["size"] == f"{width}x{height}"
        assert look


def test_answers_of_every_task() -> None:
    image = {"width": 100, "height": 100}
    thing = {"label": "cat", "score": 0.5, "box": [0, 0, 10, 10]}
    values = answer_values({"image": image, "detections": [thing, {**thing, "score": None}]})
    assert values == {"boxes": 3.0, "classes": ["cat", "cat"], "area": [0.01, 0.01], "score": 0.5}
    assert answer_values({"image": image, "detections": []}) == {"boxes": 1.0}
    assert answer_values({"image": image, "masks": [{**thing, "png": "…"}]})["score"] == 0.5
    sure, open_ = ([{"label": "a", "score": s}, {"label": "b", "score": 0.01}] for s in (0.99, 0.3))
    assert answer_values({"classes": sure})["entropy"] < answer_values({"classes": open_})["entropy"]  # type: ignore[operator]
    assert "entropy" not in answer_values({"classes": [{"label": "a", "score": 0.9}] * 3})
    assert answer_values({"classes": [{"label": "a", "score": None}]}) == {"classes": "a"}
    assert answer_values({"depth": {}}) == answer_values({}) == {}


def test_directions_of_an_embedding() -> None:
    draw = np.random.default_rng(3)
    found = [directions(draw.standard_normal(512)) for _ in range(50)]
    assert all(len(one) == PROJECTIONS for one in found)
    spread = np.std([list(one.values()) for one in found])  # type: ignore[arg-type]
    assert 0.8 < spread < 1.2
    assert directions(np.array([0.0, 0.0])) == directions(np.array([math.nan, 1.0])) == {}


def test_a_picture_from_its_file_and_from_its_pixels() -> None:
    file = cv2.imencode(".jpg", scene_of("coffee"))[1].tobytes()
    answer = {"detections": [{"label": "cup", "score": 0.4, "box": [0, 0, 1, 1]}], "image": {}}
    document = orjson.dumps(answer)
    settings = UncertainSettings("x")
    here = measure(Sampled([decode(file)], len(file), file, settings), document)
    there = measure(Sampled([], len(file), file), document)
    assert here.values == there.values
    assert (here.doubt, here.form, there.doubt) == ("cup at 0.40", "JPEG", "")
    assert here.seconds > 0.0
    assert measure(Sampled([], len(file), file), b"").answer == {}
    with pytest.raises(CarpoolError):
        measure(Sampled([], 3, b"abc"), b"")


def test_the_metrics_have_every_measure_and_state() -> None:
    assert tuple(columns.by_word("drift", "psi")) == ON_THE_PAGE
    assert tuple(columns.by_word("drift", "cameras")) == STATES
