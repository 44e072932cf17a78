from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.model import KEPT, DetectSettings, Task
from carpool.errors import InvalidInput, ModelError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision import tasks
from carpool.vision.boxes import boxes_scores, yolov5, yolov8
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import describe
from carpool.vision.tasks import kinds
from carpool.vision.tasks.task import VisionTask
from later import many
from vision.encoders import ANCHORS, FORMATS, GEOMETRIES, Thing, encode
from vision.models import config, signature, task
from vision.schemas import complaints

CLASSES = 7
LABELS = [f"label {number}" for number in range(CLASSES)]
SHAPES = {
    "yolov5": {"out": (ANCHORS, 5 + CLASSES)},
    "yolov8": {"out": (4 + CLASSES, ANCHORS)},
    "boxes_scores": {"boxes": (ANCHORS, 4), "scores": (ANCHORS, CLASSES)},
}
SQUARE = Geometry(64, 64, 64, 64, 1.0, 1.0)


def detector(form: str, more: str = "") -> VisionTask:
    return task(SHAPES[form], f'[detect]\nformat = "{form}"\n{more}', LABELS)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, int, list[Thing]]:
    """A picture of any size with at most one thing in each cell of a 3 × 3 grid, so that none overlap."""
    width, height = draw(st.integers(30, 5000)), draw(st.integers(30, 5000))
    cells = draw(st.lists(st.integers(0, 8), unique=True, max_size=9))
    scores = draw(st.permutations([0.3 + 0.07 * number for number in range(9)]))
    things = []
    for cell, score in zip(cells, scores, strict=False):
        x, y = cell % 3 * width / 3, cell // 3 * height / 3
        left, top = draw(st.floats(0.02, 0.4)), draw(st.floats(0.02, 0.4))
        right, bottom = draw(st.floats(0.6, 0.98)), draw(st.floats(0.6, 0.98))
        box = (x + left * width / 3, y + top * height / 3, x + right * width / 3, y + bottom * height / 3)
        things.append(Thing(box, draw(st.integers(0, CLASSES - 1)), score))
    return width, height, things


@settings(deadline=None, max_examples=many(60))
@given(
    scenes(),
    st.sampled_from(FORMATS),
    st.sampled_from(sorted(GEOMETRIES)),
    st.sampled_from([(640, 640), (416, 320)]),
    st.booleans(),
)
def test_what_was_put_in_comes_out_in_the_pictures_pixels(
    scene: tuple[int, int, list[Thing]], form: str, mode: str, size: tuple[int, int], normalized: bool
) -> None:
    width, height, things = scene
    geometry = GEOMETRIES[mode](width, height, *size)
    made = detector(form, f"normalized = {str(normalized).lower()}")
    answer = made.answer(
        encode(form, things, geometry, CLASSES, normalized=normalized), geometry, Options(score=0.25)
    )
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.DETECT].schema()) == []
    assert answer["image"] == {"width": width, "height": height}
    found = answer["detections"]
    expected = sorted(things, key=lambda thing: -thing.score)
    assert [one["class_id"] for one in found] == [thing.class_id for thing in expected]
    assert [one["label"] for one in found] == [LABELS[thing.class_id] for thing in expected]
    for one, thing in zip(found, expected, strict=True):
        assert one["score"] == pytest.approx(thing.score, abs=1e-3)
        assert one["box"] == pytest.approx(thing.box, abs=1.0)


@settings(deadline=None, max_examples=many(50))
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_the_formats_find_the_same_candidates_as_the_slow_way(seed: int, least: float) -> None:
    random = np.random.default_rng(seed)
    scores = random.choice(np.array([0.0, 0.2, 0.3, 0.5, 0.9, 1.0], np.float32), (40, 3))
    boxes = random.uniform(1, 50, (40, 4)).astype(np.float32)
    rows = [row for row in range(40) if scores[row].max() >= least]
    best = [int(scores[row].argmax()) for row in rows]
    for found in (
        boxes_scores(boxes, scores, least),
        yolov8(np.concatenate((boxes, scores), axis=1).T, least),
        yolov5(np.concatenate((boxes, np.ones((40, 1), np.float32), scores), axis=1), least),
    ):
        assert found[1].tolist() == [scores[row].max() for row in rows]
        assert found[2].tolist() == best
        assert len(found[0]) == len(rows)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_a_number_is_left_out(form: str, poison: float) -> None:
    things = [Thing((5, 5, 20, 20), 1, 0.9), Thing((30, 30, 50, 50), 2, 0.8)]
    outputs = encode(form, things, SQUARE, CLASSES)
    random = np.random.default_rng(1)
    for array in outputs.values():
        array[random.random(array.shape) < 0.2] = poison
    answer = detector(form).answer(outputs, SQUARE, Options(score=0.0))
    json.dumps(answer, allow_nan=False)
    for one in answer["detections"]:
        assert 0.0 <= one["score"] <= 1.0
        assert 0 <= one["box"][0] <= one["box"][2] <= 64


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_found_is_an_empty_list(form: str) -> None:
    outputs = encode(form, [], SQUARE, CLASSES)
    assert detector(form).answer(outputs, SQUARE, Options())["detections"] == []
    assert len(detector(form).answer(outputs, SQUARE, Options(score=0.0, iou=1.0))["detections"]) > 50


def found(toml: str, things: list[Thing], **options: object) -> list[int]:
    outputs = encode("boxes_scores", things, SQUARE, CLASSES)
    made = detector("boxes_scores", toml)
    answer = made.answer(outputs, SQUARE, Options(**options))  # type: ignore[arg-type]
    return [one["class_id"] for one in answer["detections"]]


OVERLAPPING = [Thing((5, 5, 25, 25), 1, 0.9), Thing((6, 5, 26, 25), 2, 0.8), Thing((5, 6, 25, 26), 1, 0.7)]


def test_boxes_are_compared_within_their_class_or_all() -> None:
    assert found("", OVERLAPPING) == [1, 2]
    assert found("per_class = false", OVERLAPPING) == [1]


def test_a_request_may_ask_otherwise() -> None:
    assert found("", OVERLAPPING, iou=0.99) == [1, 2, 1]
    assert found("", OVERLAPPING, score=0.85) == [1]
    assert found("", OVERLAPPING, max_detections=1) == [1]
    assert found("max_detections = 1", OVERLAPPING) == [1]
    assert found("score = 0.85\niou = 1", OVERLAPPING) == [1]


def test_boxes_beside_the_picture_are_left_out() -> None:
    things = [Thing((-50, -50, -5, -5), 1, 0.9), Thing((60, 60, 90, 90), 2, 0.8)]
    outputs = encode("yolov8", things, SQUARE, CLASSES)
    answer = detector("yolov8").answer(outputs, SQUARE, Options())
    assert [one["box"] for one in answer["detections"]] == [[60.0, 60.0, 64.0, 64.0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_kinds_of_floats(dtype: type) -> None:
    outputs = encode("yolov8", [Thing((8, 8, 24, 24), 3, 0.9)], SQUARE, CLASSES)
    made: dict[str, Array] = {name: array.astype(dtype) for name, array in outputs.items()}
    assert detector("yolov8").answer(made, SQUARE, Options())["detections"][0]["box"] == [
        8.0,
        8.0,
        24.0,
        24.0,
    ]


def test_bfloat16() -> None:
    made, *_ = describe(config("[detect]"), signature(SHAPES["yolov8"], datatype=Datatype.BF16))
    assert made is not None
    wide = encode("yolov8", [Thing((8, 8, 24, 24), 3, 0.875)], SQUARE, CLASSES)["out"]
    bits = (np.ascontiguousarray(wide).view(np.uint32) >> 16).astype(np.uint16)
    answer = tasks.build(made).answer({"out": bits}, SQUARE, Options())
    assert answer["detections"] == [
        {"label": "3", "class_id": 3, "score": 0.875, "box": [8.0, 8.0, 24.0, 24.0]}
    ]


def test_rows_that_do_not_match_are_the_models_fault() -> None:
    made = task({"boxes": (-1, 4), "scores": (-1, 3)}, "[detect]")
    with pytest.raises(ModelError, match="returned 5 boxes and 6 rows of scores"):
        made.answer({"boxes": np.zeros((5, 4)), "scores": np.zeros((6, 3))}, SQUARE, Options())


# ---- boxes that the device has chosen ---------------------------------------------------------------------


def chosen(*rows: tuple[float, ...], **options: object) -> list[dict[str, object]]:
    toml = "[detect]\nformat = 'boxes_scores'\nscore = 0.3\niou = 0.5\nmax_detections = 4\n"
    made = describe(config(toml), signature(SHAPES["boxes_scores"]), {"boxes": LABELS})[0]
    assert made is not None
    assert isinstance(made.table, DetectSettings)
    spec = TensorSpec("detections", Datatype.FP32, (4, 6))
    made = replace(made, outputs=(spec,), table=replace(made.table, format=KEPT))
    nobody = (0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
    array = np.array([*rows, *[nobody] * (4 - len(rows))], np.float32)
    answer = tasks.build(made).answer({"detections": array}, SQUARE, Options(**options))  # type: ignore[arg-type]
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.DETECT].schema()) == []
    return answer["detections"]  # type: ignore[no-any-return]


FIRST, SECOND, OVER_FIRST = (1, 1, 20, 20, 0.9, 2), (30, 30, 60, 60, 0.6, 0), (1, 1, 20, 19, 0.5, 2)


def test_boxes_that_the_device_has_chosen_are_answered() -> None:
    one, two = chosen(FIRST, SECOND)
    assert (one["label"], one["box"]) == ("label 2", [1.0, 1.0, 20.0, 20.0])
    assert (two["class_id"], two["score"]) == (0, pytest.approx(0.6, abs=1e-6))
    assert chosen() == []


def test_what_the_device_left_to_suppress_is_suppressed() -> None:
    assert [found["score"] for found in chosen(FIRST, SECOND, OVER_FIRST)] == pytest.approx([0.9, 0.6])


def test_a_request_may_want_fewer_boxes_than_the_device_chose() -> None:
    assert len(chosen(FIRST, SECOND, score=0.7)) == 1
    assert len(chosen(FIRST, SECOND, max_detections=1)) == 1
    assert len(chosen(FIRST, SECOND, iou=0.5, score=0.3, max_detections=4)) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("score", 0.2), ("max_detections", 5), ("iou", 0.6), ("iou", 0.4)]
)
def test_a_request_that_wants_what_the_device_has_dropped_is_told_so(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=name) as error:
        chosen(FIRST, **{name: value})
    assert error.value.field == name
