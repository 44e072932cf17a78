"""Boxes chosen on the device are those that the CPU chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.extensions.torch.torch_pictures import NOBODY, BoxForm, KeptBoxes
from carpool.types import Array
from carpool.vision import boxes as detect

CLASSES, MOST = 3, 40
Detections = list[tuple[int, float, list[float]]]


def form(kind: str, **changes: Any) -> BoxForm:
    sources = ("boxes", "scores") if kind == "boxes_scores" else ("raw",)
    given_form = {"score": 0.25, "iou": 0.45, "per_class": True, "most": MOST, **changes}
    return BoxForm(kind, sources, "detections", **given_form)


def outputs_of(kind: str, centres: Array, scores: Array) -> dict[str, Array]:
    """Boxes [n, anchors, 4] by centre and size, scores [n, anchors, classes], as each format has them."""
    if kind == "yolov8":
        return {"raw": np.concatenate((centres, scores), axis=2).transpose(0, 2, 1)}
    if kind == "yolov5":
        sure = np.full((*scores.shape[:2], 1), 0.9, np.float32)
        return {"raw": np.concatenate((centres, sure, scores), axis=2)}
    corners = np.stack([detect.from_centres(one) for one in centres])
    return {"boxes": corners, "scores": scores}


def by_the_cpu(kind: str, outputs: dict[str, Array], number: int, asked: BoxForm) -> Detections:
    arrays = [outputs[name][number] for name in asked.sources]
    reader = {"yolov8": detect.yolov8, "yolov5": detect.yolov5, "boxes_scores": detect.boxes_scores}[kind]
    boxes, scores, classes, _ = reader(*arrays, asked.score)
    sound = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    boxes, scores, classes = boxes[sound], scores[sound], classes[sound]
    kept = detect.suppress(boxes, scores, asked.iou, asked.most, classes if asked.per_class else None)
    return listed(boxes[kept], scores[kept], classes[kept])


def by_the_device(rows: Array, asked: BoxForm) -> Detections:
    """As the front end reads it: what is left is suppressed once more."""
    boxes, scores, classes, _ = detect.kept(rows, asked.score)
    kinds = classes if asked.per_class else None
    again = detect.suppress(boxes, scores, asked.iou, asked.most, kinds)
    return listed(boxes[again], scores[again], classes[again])


def listed(boxes: Array, scores: Array, classes: Array) -> Detections:
    rounded = np.round(boxes.astype(float), 3).tolist()
    return list(zip(classes.tolist(), np.round(scores.astype(float), 5).tolist(), rounded, strict=True))


def run(asked: BoxForm, outputs: dict[str, Array]) -> Array:
    found = KeptBoxes(asked)({name: torch.from_numpy(np.array(array)) for name, array in outputs.items()})
    assert set(found) == {*outputs, "detections"}
    rows: Array = found["detections"].numpy()
    return rows


def crowd(seed: int, pictures: int, anchors: int) -> tuple[Array, Array]:
    """Boxes in clusters, so that many overlap, with scores of which some are equal."""
    random = np.random.default_rng(seed)
    places = random.uniform(20, 80, (pictures, 6, 2))
    which = random.integers(0, 6, (pictures, anchors))
    centres = np.take_along_axis(places, which[:, :, None], axis=1) + random.normal(
        0, 6, (pictures, anchors, 2)
    )
    sizes = random.uniform(5, 30, (pictures, anchors, 2))
    scores = np.round(random.uniform(0, 1, (pictures, anchors, CLASSES)) ** 2, 2)
    return np.concatenate((centres, sizes), axis=2).astype(np.float32), scores.astype(np.float32)


@pytest.mark.parametrize("kind", ["yolov5", "yolov8", "boxes_scores"])
@given(
    st.integers(0, 10_000),
    st.integers(1, 9),
    st.integers(1, 150),
    st.booleans(),
    st.sampled_from([0.1, 0.45, 0.7]),
)
@settings(max_examples=12, deadline=None)
def test_the_device_chooses_what_the_cpu_chooses(
    kind: str, seed: int, pictures: int, anchors: int, per_class: bool, iou: float
) -> None:
    outputs = outputs_of(kind, *crowd(seed, pictures, anchors))
    asked = form(kind, per_class=per_class, iou=iou, most=150)
    rows = run(asked, outputs)
    assert rows.shape == (pictures, 150, 6)
    for number in range(pictures):
        assert by_the_device(rows[number], asked) == by_the_cpu(kind, outputs, number, asked)


def test_chains_longer_than_the_rounds_lose_nothing() -> None:
    """Each box hides the next, which would have hidden the one behind it."""
    count = 90
    corners = np.zeros((1, count, 4), np.float32)
    corners[0, :, 0] = np.arange(count) * 3
    corners[0, :, 2] = corners[0, :, 0] + 10
    corners[0, :, 3] = 10
    scores = np.linspace(0.9, 0.3, count, dtype=np.float32).reshape(1, count, 1)
    outputs, asked = {"boxes": corners, "scores": scores}, form("boxes_scores", most=count)
    expected = by_the_cpu("boxes_scores", outputs, 0, asked)
    assert len(expected) == count / 2
    assert by_the_device(run(asked, outputs)[0], asked) == expected


def test_the_best_come_first_and_the_rest_is_nobody() -> None:
    outputs = outputs_of("yolov8", *crowd(5, 2, 100))
    rows = run(form("yolov8", most=100), outputs)
    for one in rows:
        there = one[:, 5] != NOBODY
        count = int(there.sum())
        assert 0 < count < 100
        assert there[:count].all()
        assert (np.diff(one[:count, 4]) <= 0).all()
        assert (one[count:, 4] == 0).all()


def test_only_so_many_as_there_is_room_for() -> None:
    outputs = outputs_of("boxes_scores", *crowd(6, 1, 100))
    asked = form("boxes_scores", most=2)
    assert by_the_device(run(asked, outputs)[0], asked) == by_the_cpu("boxes_scores", outputs, 0, asked)


def test_what_is_no_number_is_no_box() -> None:
    centres, scores = crowd(7, 1, 60)
    centres[0, 0] = np.nan
    centres[0, 1, 2] = np.inf
    centres[0, 2, 2:] = -4
    scores[0, 3] = np.nan
    scores[0, :3] = 1.0
    rows = run(form("yolov8"), outputs_of("yolov8", centres, scores))
    assert np.isfinite(rows).all()
    assert (rows[0, :, 4] < 1.0).all()


def test_boxes_from_0_to_1_become_pixels() -> None:
    centres = np.array([[[0.5, 0.25, 0.5, 0.5]]], np.float32)
    scores = np.array([[[0.1, 0.9, 0.2]]], np.float32)
    rows = run(form("yolov8", scale=(100.0, 40.0)), outputs_of("yolov8", centres, scores))
    assert rows[0, 0].tolist() == pytest.approx([25, 0, 75, 20, 0.9, 1])


def test_half_precision_is_read_as_well() -> None:
    outputs = {name: torch.from_numpy(a).half() for name, a in outputs_of("yolov8", *crowd(8, 1, 50)).items()}
    assert KeptBoxes(form("yolov8"))(outputs)["detections"].dtype is torch.float32
