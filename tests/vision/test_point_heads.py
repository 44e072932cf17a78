"""Faces with points, keypoints of a crop, and masks per query: recognised, and decoded as their own code
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.errors import ConfigError, ModelError
from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.geometry import Geometry
from carpool.vision.mask_regions import from_run_lengths
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import VisionSettings
from vision.fixed_answers import answering
from vision.test_no_silent_guess import said

RANDOM = np.random.default_rng(21)
SIDE = 64
WHOLE = Geometry(128, 96, SIDE, SIDE, 0.5, SIDE / 96)  # a picture of 128×96, stretched over the input


def vision(file: Path, **choice: Any) -> VisionSettings:
    found = said(file, **choice).vision
    assert found is not None
    return found


def made(folder: Path, outputs: dict[str, Array], height: int = SIDE, width: int = SIDE) -> Path:
    return answering(folder / "m.onnx", outputs, {"input": (1, 3, height, width)}, {})


def answer(
    settings: VisionSettings, outputs: dict[str, Array], geometry: Geometry = WHOLE, **options: Any
) -> Any:
    floats = {name: array.astype(np.float32) for name, array in outputs.items()}
    return tasks.build(settings).answer(floats, geometry, Options(**options))


# ---- SCRFD


def faces(*, points: bool = True) -> dict[str, Array]:
    """As insightface's files have them: scores of three levels, boxes, points, under numbers."""
    outputs: dict[str, Array] = {}
    for first, columns in ((443, 1), (446, 4), (449, 10))[: 3 if points else 2]:
        for level, stride in enumerate((8, 16, 32)):
            rows = 2 * (SIDE // stride) ** 2
            values = (
                RANDOM.random((rows, 1)) ** 8 if columns == 1 else RANDOM.uniform(0.1, 2, (rows, columns))
            )
            outputs[str(first + level)] = values
    return outputs


def by_hand(outputs: dict[str, Array], least: float) -> list[tuple[float, list[float], list[list[float]]]]:
    found = []
    for level, stride in enumerate((8, 16, 32)):
        scores, boxes, points = (outputs[str(first + level)] for first in (443, 446, 449))
        for row, (score,) in enumerate(scores):
            if score < least:
                continue
            y, x = divmod(row // 2, SIDE // stride)
            left, top, right, bottom = boxes[row] * stride
            box = [x * stride - left, y * stride - top, x * stride + right, y * stride + bottom]
            offsets = (points[row].reshape(5, 2) * stride + (x * stride, y * stride)).tolist()
            found.append((score, box, offsets))
    return sorted(found, key=lambda one: -one[0])


def test_scrfd_answers_faces_with_their_points(tmp_path: Path) -> None:
    outputs = faces()
    file = made(tmp_path, outputs)
    found = vision(file, preset="scrfd")
    assert (found.task, found.assumed) == ("pose", ())
    assert (found.image.anchor, found.image.mean, found.image.std, found.image.pad) == (
        "top_left", (127.5,), (128.0,), 0,
    )  # fmt: skip
    unset = vision(file)
    assert (unset.image, unset.assumed) == (found.image, ("mean", "std"))  # others' faces may have this shape
    detections = answer(found, outputs, score=0.5, iou=1.0)["detections"]
    wanted = by_hand(outputs, 0.5)
    assert len(detections) == len(wanted) > 10
    scale = np.array([2, 1.5])
    for one, (score, box, points) in zip(detections, wanted, strict=True):
        around = np.clip(np.array(box) * np.tile(scale, 2), 0, (128, 96, 128, 96))
        assert one["score"] == pytest.approx(score, abs=1e-5)
        assert one["box"] == pytest.approx(around, abs=0.02)
        np.testing.assert_allclose(one["keypoints"], np.array(points) * scale, atol=0.02)
    assert found.table is not None
    assert (found.table.iou, found.table.score) == (0.4, 0.5)  # type: ignore[union-attr]  # insightface's own


def test_scrfd_without_points_is_a_detector(tmp_path: Path) -> None:
    outputs = faces(points=False)
    found = vision(made(tmp_path, outputs))
    assert found.task == "detect"
    assert len(answer(found, outputs)["detections"]) > 3
    outputs["443"] = outputs["443"][:5]
    outputs["446"] = outputs["446"][:5]
    with pytest.raises(ModelError, match="5"):
        answer(found, outputs)


# ---- keypoints of a crop


def test_simcc_is_where_its_bins_are_largest(tmp_path: Path) -> None:
    height, width = 256, 192
    outputs = {"simcc_x": RANDOM.random((17, 2 * width)), "simcc_y": RANDOM.random((17, 2 * height))}
    found = vision(made(tmp_path, outputs, height, width), preset="rtmpose")
    assert (found.task, found.assumed, found.image.pad) == ("pose", (), 0)
    geometry = Geometry(96, 128, width, height, 2.0, 2.0)
    [person] = answer(found, outputs, geometry)["detections"]
    x, y = (outputs[name].argmax(1) / 2 / 2 for name in ("simcc_x", "simcc_y"))
    sure = np.minimum(outputs["simcc_x"].max(1), outputs["simcc_y"].max(1))
    np.testing.assert_allclose(person["keypoints"], np.stack((x, y, sure), 1), atol=0.01)
    assert person["box"] == [0, 0, 96, 128]
    assert person["score"] == pytest.approx(sure.mean(), abs=1e-5)


def bump(x: float, y: float, rows: int, columns: int) -> Array:
    across, down = np.arange(columns) - x, np.arange(rows)[:, None] - y
    return np.asarray(0.9 * np.exp(-(across**2 + down**2) / (2 * 2.0**2)))


def test_heatmaps_have_their_peaks_between_pixels(tmp_path: Path) -> None:
    places = RANDOM.uniform(10, 36, (17, 2))
    maps = np.stack([bump(x, y, 64, 48) for x, y in places])
    found = vision(made(tmp_path, {"heatmaps": maps}, 256, 192))
    assert found.task == "pose"
    [person] = answer(found, {"heatmaps": maps}, Geometry(192, 256, 192, 256, 1.0, 1.0))["detections"]
    points = np.array(person["keypoints"])
    np.testing.assert_allclose(points[:, :2], places * (191 / 47, 255 / 63) + 0.5, atol=0.3)
    assert (points[:, 2] > 0.8).all()


def test_heatmaps_that_nothing_names_are_asked_about(tmp_path: Path) -> None:
    file = made(tmp_path, {"output": RANDOM.random((17, 64, 48))}, 256, 192)
    assert "pose" in said(file).tasks
    found = vision(file, task="pose", preset="rtmpose")
    assert (found.task, found.assumed) == ("pose", ("outputs",))
    with pytest.raises(ConfigError):
        said(
            made(tmp_path, {"simcc_x": RANDOM.random((17, 384)), "simcc_y": RANDOM.random((17, 512))}),
            task="detect",
        )


def test_flat_heatmaps_give_numbers(tmp_path: Path) -> None:
    maps = np.zeros((17, 64, 48))
    found = vision(made(tmp_path, {"heatmaps": RANDOM.random((17, 64, 48))}, 256, 192))
    geometry = Geometry(192, 256, 192, 256, 1.0, 1.0)
    [person] = answer(found, {"heatmaps": maps}, geometry)["detections"]
    assert np.isfinite(np.array(person["keypoints"])).all()


# ---- RF-DETR Seg


def test_each_query_has_its_own_mask(tmp_path: Path) -> None:
    outputs = {
        "dets": RANDOM.uniform(0.2, 0.6, (20, 4)),
        "labels": RANDOM.normal(-2, 2, (20, 91)),
        "masks": RANDOM.normal(0, 1, (20, 16, 16)),
    }
    file = made(tmp_path, outputs)
    found = vision(file, preset="rfdetr")
    assert (found.task, found.assumed) == ("segment", ())
    masks = answer(found, outputs, score=0.5, format="rle")["masks"]
    scores = 1 / (1 + np.exp(-outputs["labels"]))
    best = np.argsort(-scores.ravel(), kind="stable")[:20]
    best = best[scores.ravel()[best] >= 0.5]
    assert len(masks) == len(best) > 5
    for one, at in zip(masks, best, strict=True):
        query, class_id = divmod(int(at), 91)
        assert (one["class_id"], one["score"]) == (class_id, pytest.approx(scores[query, class_id], abs=1e-5))
        pixels = from_run_lengths(one["rle"]["counts"], 96, 128)
        wanted = enlarged(outputs["masks"][query]) > 0
        assert (pixels != wanted).mean() < 0.002
    assert vision(file, task="detect", preset="rfdetr").task == "detect"


def enlarged(values: Array) -> Array:
    """Bilinear without aligned corners, as torch's interpolate has it."""

    def places(length: int, source: int) -> tuple[Array, Array, Array]:
        at = np.clip((np.arange(length) + 0.5) * source / length - 0.5, 0, source - 1)
        low = np.floor(at).astype(int)
        return low, np.minimum(low + 1, source - 1), at - low

    top, bottom, down = places(96, values.shape[0])
    left, right, across = places(128, values.shape[1])
    rows = values[top] * (1 - down[:, None]) + values[bottom] * down[:, None]
    return np.asarray(rows[:, left] * (1 - across) + rows[:, right] * across)
