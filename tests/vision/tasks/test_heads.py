"""Every head against a decoding written here, slowly and apart: one anchor at a time, in plain numpy."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
import pytest

from carpool.types import Array
from carpool.vision.mask_regions import from_run_lengths
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import kinds
from carpool.vision.tasks.task import VisionTask
from vision.encoders import letterbox
from vision.models import task
from vision.schemas import complaints

SIDE = 64  # of the input
GEOMETRY = letterbox(200, 100, SIDE, SIDE)
RANDOM = np.random.default_rng(3)
LABELS = ["a", "b", "c"]
SCORE, IOU = 0.5, 0.45
PIXELS = np.full((100, 200, 3), 90, np.uint8)


def back(x: float, y: float) -> tuple[float, float]:
    """From the input to the picture: 200 × 100 pixels lie in 64 × 32, sixteen from the top."""
    return x * 200 / SIDE, (y - 16) * 200 / SIDE


def boxes(count: int) -> Array:
    """Centres and sizes, inside the picture's part of the input."""
    centres = RANDOM.uniform((12, 22), (52, 42), (count, 2))
    return np.concatenate((centres, RANDOM.uniform(4, 10, (count, 2))), axis=1)


def corners(box: Array) -> list[float]:
    x, y, w, h = box.tolist()
    (x1, y1), (x2, y2) = back(x - w / 2, y - h / 2), back(x + w / 2, y + h / 2)
    return [x1, y1, x2, y2]


def overlap(one: Array, other: Array) -> float:
    a, b = ([x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in (one.tolist(), other.tolist()))
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, wide) * max(0.0, high)
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def survivors(found: Array, scores: Array, limit: float = IOU) -> list[int]:
    """Of centres and sizes with scores per class: anchors that stay, the best first."""
    best, classes = scores.max(axis=1), scores.argmax(axis=1)
    kept: list[int] = []
    for index in sorted(range(len(found)), key=lambda i: -best[i]):
        rivals = (k for k in kept if classes[k] == classes[index])
        if best[index] >= SCORE and all(overlap(found[k], found[index]) <= limit for k in rivals):
            kept.append(index)
    return kept


def scores_of(count: int, classes: int = 3) -> Array:
    return RANDOM.uniform(0, 1, (count, classes)) ** 2


def asked(made: VisionTask, outputs: Mapping[str, Array], **more: object) -> list[dict[str, Any]]:
    """The answer's list, after its form was checked and it was drawn."""
    options = Options(score=SCORE, **more)  # type: ignore[arg-type]
    floats = {name: array.astype(np.float32) for name, array in outputs.items()}
    answer = made.answer(floats, GEOMETRY, options)
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[made.name].schema()) == []
    drawn = made.draw(PIXELS, floats, GEOMETRY, options)
    assert drawn.dtype == np.uint8
    assert drawn.shape[2] == 3
    found = answer.get("detections", answer.get("masks"))
    assert isinstance(found, list)
    if found:
        assert (drawn != drawn[0, 0]).any(), "of one colour"
    return found


def check_boxes(found: list[dict[str, Any]], centres: Array, scores: Array, kept: list[int]) -> None:
    assert kept, "a test that finds nothing shows nothing"
    assert [one["class_id"] for one in found] == [int(scores[k].argmax()) for k in kept]
    assert [one["label"] for one in found] == [LABELS[int(scores[k].argmax())] for k in kept]
    for one, k in zip(found, kept, strict=True):
        assert one["score"] == pytest.approx(float(scores[k].max()), abs=1e-5)
        assert one["box"] == pytest.approx(corners(centres[k]), abs=0.02)


# ---- boxes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["yolov8", "yolov5"])
def test_yolo(form: str) -> None:
    centres, scores = boxes(40), scores_of(40)
    if form == "yolov8":
        output = np.concatenate((centres, scores), axis=1).T
    else:
        there = RANDOM.uniform(0.5, 1, (40, 1))
        output = np.concatenate((centres, there, scores), axis=1)
        scores = scores * there
    made = task({"y": output.shape}, f'[detect]\nformat = "{form}"', LABELS)
    check_boxes(asked(made, {"y": output}), centres, scores, survivors(centres, scores))


def test_end_to_end_boxes_are_not_suppressed_again() -> None:
    centres = np.array([[30.0, 30, 10, 10], [31, 30, 10, 10], [20, 30, 6, 6]])
    rows = np.array([[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in centres])
    scores = np.array([[0.0, 0.9, 0], [0, 0.8, 0], [0, 0, 0.3]])
    output = np.concatenate((rows, scores.max(1, keepdims=True), scores.argmax(1)[:, None]), axis=1)
    made = task({"y": (3, 6)}, '[detect]\nformat = "end2end"', LABELS)
    check_boxes(asked(made, {"y": output}), centres, scores, [0, 1])
    assert len(asked(made, {"y": output}, iou=0.5)) == 1


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_detr(activation: str) -> None:
    centres = boxes(30)
    logits = RANDOM.normal(0, 3, (30, 3 if activation == "sigmoid" else 4))
    if activation == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        scores = np.where(scores.argmax(1, keepdims=True) == 3, 0, scores)[
            :, :3
        ]  # the last stands for nothing
    outputs = {"logits": logits, "pred_boxes": centres / SIDE}
    shapes = {name: array.shape for name, array in outputs.items()}
    made = task(shapes, f'[detect]\nformat = "detr"\nactivation = "{activation}"', LABELS)
    if activation == "sigmoid":  # each class of a query counts for itself, the best 30 of all
        best = np.argsort(-scores.ravel())[:30]
        each = np.zeros((30, 3))
        each[np.arange(30), best % 3] = scores.ravel()[best]
        centres, scores = centres[best // 3], each
    kept = sorted((k for k in range(30) if scores[k].max() >= SCORE), key=lambda k: -scores[k].max())
    check_boxes(asked(made, outputs), centres, scores, kept)


def test_rtdetr_in_one_table() -> None:
    centres, scores = boxes(30), scores_of(30)
    output = np.concatenate((centres / SIDE, scores), axis=1)
    made = task({"y": output.shape}, '[detect]\nformat = "rtdetr"', LABELS)
    kept = sorted((k for k in range(30) if scores[k].max() >= SCORE), key=lambda k: -scores[k].max())
    check_boxes(asked(made, {"y": output}), centres, scores, kept)


@pytest.mark.parametrize("form", ["corners", "corners_yx"])
def test_boxes_with_labels(form: str) -> None:
    centres, scores = boxes(20), scores_of(20)
    rows = np.array([[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in centres])
    if form == "corners_yx":
        rows = rows[:, [1, 0, 3, 2]] / SIDE
    outputs = {"boxes": rows, "labels": scores.argmax(1), "scores": scores.max(1)}
    shapes: dict[str, tuple[int, ...]] = {"boxes": (-1, 4), "labels": (-1,), "scores": (-1,)}
    said = f'[detect]\nformat = "boxes_labels_scores"\nboxes = "{form}"\n'
    made = task(shapes, said + f"normalized = {str(form == 'corners_yx').lower()}", LABELS)
    kept = sorted((k for k in range(20) if scores[k].max() >= SCORE), key=lambda k: -scores[k].max())
    check_boxes(asked(made, outputs), centres, scores, kept)


def test_a_background_is_no_object() -> None:
    centres = boxes(12)
    scores = RANDOM.dirichlet((1, 1, 1), 12)
    rows = np.array([[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in centres]) / SIDE
    said = '[detect]\nformat = "boxes_scores"\nbackground = 0\nnormalized = true'
    made = task({"boxes": (12, 4), "scores": (12, 3)}, said, LABELS)
    objects = np.where(np.arange(3) == 0, 0.0, scores)
    check_boxes(asked(made, {"boxes": rows, "scores": scores}), centres, objects, survivors(centres, objects))


# ---- keypoints and angles ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "each"), [("yolov8", 3), ("yolov8", 2), ("end2end", 3)])
def test_keypoints(form: str, each: int) -> None:
    centres, scores = boxes(25), scores_of(25)
    points = RANDOM.uniform(14, 50, (25, 5, each))
    points[:, :, 2:] /= 64
    flat = points.reshape(25, -1)
    kept = survivors(centres, scores)
    if form == "yolov8":
        output = np.concatenate((centres, scores, flat), axis=1).T
    else:
        rows = np.array([[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in centres[kept]])
        told = np.stack((scores[kept].max(1), scores[kept].argmax(1)), axis=1)
        output = np.concatenate((rows, told, flat[kept]), axis=1)
    made = task({"y": output.shape}, f'[pose]\nformat = "{form}"\nkeypoints = [5, {each}]', LABELS)
    found = asked(made, {"y": output})
    check_boxes(found, centres, scores, kept)
    for one, k in zip(found, kept, strict=True):
        for point, (x, y, *sure) in zip(one["keypoints"], points[k].tolist(), strict=True):
            assert point == pytest.approx([*back(x, y), *sure], abs=0.02)


def alike(one: Array, other: Array) -> float:
    """The probabilistic overlap of two turned boxes, from their covariances."""

    def spread(box: Array) -> Array:
        _, _, w, h, angle = box.tolist()
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        return turn @ np.diag([w * w / 12, h * h / 12]) @ turn.T

    a, b = spread(one), spread(other)
    apart = one[:2] - other[:2]
    both = (a + b) / 2
    distance = apart @ np.linalg.inv(both) @ apart / 8
    distance += 0.5 * math.log(np.linalg.det(both) / math.sqrt(np.linalg.det(a) * np.linalg.det(b)))
    return 1 - math.sqrt(1 - math.exp(-distance))


@pytest.mark.parametrize("form", ["yolov8", "end2end"])
def test_turned_boxes(form: str) -> None:
    turned = np.concatenate((boxes(25), RANDOM.uniform(-0.7, 2.3, (25, 1))), axis=1)
    scores = scores_of(25)
    kept: list[int] = []
    for index in sorted(range(25), key=lambda i: -scores[i].max()):
        rivals = (k for k in kept if scores[k].argmax() == scores[index].argmax())
        if scores[index].max() >= SCORE and all(alike(turned[k], turned[index]) <= IOU for k in rivals):
            kept.append(index)
    if form == "yolov8":
        output = np.concatenate((turned[:, :4], scores, turned[:, 4:]), axis=1).T
    else:
        told = np.stack((scores[kept].max(1), scores[kept].argmax(1)), axis=1)
        output = np.concatenate((turned[kept, :4], told, turned[kept, 4:]), axis=1)
    made = task({"y": output.shape}, f'[obb]\nformat = "{form}"', LABELS)
    found = asked(made, {"y": output})
    assert len(found) == len(kept) > 3
    for one, k in zip(found, kept, strict=True):
        x, y, w, h, angle = turned[k].tolist()
        cos, sin = math.cos(angle), math.sin(angle)
        places = [(w / 2, h / 2), (w / 2, -h / 2), (-w / 2, -h / 2), (-w / 2, h / 2)]
        expected = [back(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in places]
        assert np.array(one["corners"]) == pytest.approx(np.array(expected), abs=0.02)
        assert math.cos(one["angle"] - angle) == pytest.approx(1, abs=1e-4)
        xs, ys = zip(*expected, strict=True)
        inside = [max(0, min(xs)), max(0, min(ys)), min(200, max(xs)), min(100, max(ys))]
        assert one["box"] == pytest.approx(inside, abs=0.02)


# ---- maps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["yolov8", "yolov5", "end2end"])
def test_masks_from_prototypes(form: str) -> None:
    """Prototypes are smooth, so that where exactly an edge is sampled makes no difference worth a word."""
    centres, scores = boxes(20), scores_of(20)
    steps = np.linspace(-1, 1, SIDE // 4)
    prototypes = np.stack(
        [steps[None, :] + 0 * steps[:, None], steps[:, None] + 0 * steps[None, :], np.ones((16, 16))]
    )
    weights = RANDOM.normal(0, 1, (20, 3))
    kept = survivors(centres, scores)
    outputs = {"p": prototypes}
    if form == "yolov8":
        outputs["y"] = np.concatenate((centres, scores, weights), axis=1).T
    elif form == "yolov5":
        outputs["y"] = np.concatenate((centres, np.ones((20, 1)), scores, weights), axis=1)
    else:
        rows = np.array([[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in centres[kept]])
        told = np.stack((scores[kept].max(1), scores[kept].argmax(1)), axis=1)
        outputs["y"] = np.concatenate((rows, told, weights[kept]), axis=1)
    made = task({"y": outputs["y"].shape, "p": (3, 16, 16)}, f'[segment]\nformat = "{form}"', LABELS)
    found = asked(made, outputs, format="rle")
    check_boxes(found, centres, scores, kept)
    for one, k in zip(found, kept, strict=True):
        mask = from_run_lengths(one["rle"]["counts"], *one["rle"]["size"])
        expected = np.zeros((100, 200), np.uint8)
        x1, y1, x2, y2 = corners(centres[k])
        for y in range(max(0, math.floor(y1)), min(100, math.ceil(y2))):
            for x in range(max(0, math.floor(x1)), min(200, math.ceil(x2))):
                across, down = (x + 0.5) * SIDE / 200 / 4 - 0.5, ((y + 0.5) * SIDE / 200 + 16) / 4 - 0.5
                values = [-1 + 2 * across / 15, -1 + 2 * down / 15, 1.0]
                expected[y, x] = weights[k] @ values >= 0
        assert (mask != expected).mean() < 0.002


def test_segmentation_at_a_lower_stride() -> None:
    logits = np.full((3, 16, 16), -4.0)
    logits[0] = 0
    logits[1, 6:10, 4:8] = 9  # of cells of 4 pixels: the input's 16–32 across, 24–40 down
    made = task({"y": (3, 16, 16)}, "[segment]\nbackground = 0", LABELS)
    found = asked(made, {"y": logits}, format="rle")
    assert [one["label"] for one in found] == ["b"]
    (x1, y1), (x2, y2) = back(16, 24), back(32, 40)
    assert found[0]["box"] == pytest.approx([x1, y1, x2, y2], abs=7)  # half a cell and a bit


def test_depth() -> None:
    steps = np.linspace(2.0, 10.0, 32)
    values = (steps[None, :] + 0 * steps[:, None]).astype(np.float32)
    made = task({"y": (1, 32, 32)}, "[depth]")
    answer = made.answer({"y": values[None]}, GEOMETRY, Options())
    assert complaints({"model": "m", "version": "1", **answer}, kinds()["depth"].schema()) == []
    told = answer["depth"]
    assert (told["low"], told["high"]) == (2.0, 10.0)
    pixels = cv2.imdecode(np.frombuffer(base64.b64decode(told["png"]), np.uint8), cv2.IMREAD_UNCHANGED)
    assert (pixels.shape, pixels.dtype) == ((100, 200), np.uint16)
    metres = told["low"] + pixels[50].astype(float) / 65535 * (told["high"] - told["low"])
    assert metres[100] == pytest.approx(6.0, abs=0.1)
    assert (np.diff(metres) >= -1e-3).all()
    drawn = made.draw(PIXELS, {"y": values[None]}, GEOMETRY, Options())
    assert drawn[50, 5].sum() > drawn[50, 195].sum()  # the near is bright


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("none", [0.9, 0.8]), ("sigmoid", [1 / (1 + math.exp(-0.9)), 1 / (1 + math.exp(-0.8))])],
)
def test_several_labels_at_once(activation: str, expected: list[float]) -> None:
    made = task({"y": (3,)}, f'[classify]\nactivation = "{activation}"', LABELS)
    answer = made.answer({"y": np.array([0.9, 0.1, 0.8], np.float32)}, GEOMETRY, Options(top_k=2))
    assert [one["score"] for one in answer["classes"]] == pytest.approx(expected, abs=1e-5)
    assert [one["label"] for one in answer["classes"]] == ["a", "c"]


@pytest.mark.parametrize(
    ("toml", "shapes"),
    [
        ('[pose]\nformat = "yolov8"\nkeypoints = [5, 3]', {"y": (22, 30)}),
        ('[obb]\nformat = "yolov8"', {"y": (8, 30)}),
        ('[segment]\nformat = "yolov8"', {"y": (10, 30), "p": (3, 16, 16)}),
        ('[detect]\nformat = "end2end"', {"y": (30, 6)}),
    ],
)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_a_number_is_left_out(
    toml: str, shapes: dict[str, tuple[int, ...]], poison: float
) -> None:
    made = task(shapes, toml, LABELS)
    outputs = {name: RANDOM.uniform(0, 60, shape) for name, shape in shapes.items()}
    for array in outputs.values():
        array[RANDOM.random(array.shape) < 0.2] = poison
    for one in asked(made, outputs):
        assert 0 <= one["score"] <= 1
        assert 0 <= one["box"][0] <= one["box"][2] <= 200
