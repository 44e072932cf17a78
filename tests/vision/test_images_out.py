"""Answers that are images, and scores with a map: recognised, written and drawn."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from carpool.errors import InvalidInput, ModelError
from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import VisionSettings
from vision.fixed_answers import answering
from vision.schemas import complaints
from vision.test_no_silent_guess import said

RANDOM = np.random.default_rng(31)
SIDE = 32
STRETCHED = Geometry(64, 48, SIDE, SIDE, 0.5, SIDE / 48)
LETTERBOXED = Geometry(64, 48, SIDE, SIDE, 0.5, 0.5, 0.0, 4.0)


def made(folder: Path, outputs: dict[str, Array]) -> Path:
    return answering(folder / "m.onnx", outputs, {"input": (1, 3, SIDE, SIDE)}, {})


def vision(file: Path, **choice: Any) -> VisionSettings:
    found = said(file, **choice).vision
    assert found is not None
    return found


def answer(settings: VisionSettings, outputs: dict[str, Array], geometry: Geometry, **options: Any) -> Any:
    found = tasks.build(settings).answer(outputs, geometry, Options(**options))
    assert complaints({"model": "m", "version": "1", **found}, tasks.kinds()[settings.task].schema()) == []
    return found


def pixels_of(text: str) -> Array:
    file = np.frombuffer(base64.b64decode(text), np.uint8)
    found = cv2.imdecode(file, cv2.IMREAD_UNCHANGED)
    assert found is not None
    return found


# ---- an image for an image


def test_an_image_twice_as_large_is_one(tmp_path: Path) -> None:
    output = {"output": RANDOM.random((3, 2 * SIDE, 2 * SIDE)).astype(np.float32)}
    file = made(tmp_path, output)
    found = vision(file, preset="plain")
    assert (found.task, found.assumed) == ("restore", ())
    restored = answer(found, output, LETTERBOXED)["restored"]
    assert (restored["width"], restored["height"], restored["format"]) == (64, 48, "png")
    wanted = np.rint(np.moveaxis(output["output"], 0, -1)[8:56] * 255)
    np.testing.assert_array_equal(pixels_of(restored["data"])[:, :, ::-1], wanted)
    stretched = answer(found, output, STRETCHED, format="webp")["restored"]
    assert (stretched["width"], stretched["height"]) == (64, 48)
    assert base64.b64decode(stretched["data"])[8:12] == b"WEBP"
    drawn = tasks.build(found).draw(np.zeros((48, 64, 3), np.uint8), output, LETTERBOXED, Options())
    np.testing.assert_array_equal(drawn, wanted)


def test_its_values_are_in_the_units_of_the_input(tmp_path: Path) -> None:
    """A network of -1 to 1, blue first."""
    (tmp_path / "model.toml").write_text(
        'file = "m.onnx"\n[image]\nresize = "stretch"\nscale = 0.00784313725490196\nmean = 1\nstd = 1\n'
        'channels = "bgr"\n'
    )
    output = {"output": RANDOM.uniform(-1, 1, (3, 2 * SIDE, 2 * SIDE)).astype(np.float32)}
    found = vision(made(tmp_path, output))
    restored = answer(found, output, Geometry(32, 32, SIDE, SIDE, 1.0, 1.0))["restored"]
    wanted = np.rint(np.clip((np.moveaxis(output["output"], 0, -1) + 1) * 127.5, 0, 255))
    np.testing.assert_allclose(pixels_of(restored["data"]), wanted, atol=1)


def test_an_image_of_the_same_size_is_one_only_if_it_is_said(tmp_path: Path) -> None:
    output = {"output": RANDOM.random((3, SIDE, SIDE)).astype(np.float32)}
    file = made(tmp_path, output)
    assert said(file).vision is None
    found = vision(file, task="restore", preset="plain")
    assert (found.task, found.assumed) == ("restore", ("outputs",))
    with pytest.raises(InvalidInput, match="png or webp or jpeg"):
        tasks.read_options({"format": "rle"}, "restore")
    with pytest.raises(ModelError, match=r"has the shape \[3, 0, 32\]"):
        answer(found, {"output": np.zeros((3, 0, SIDE), np.float32)}, STRETCHED)


# ---- a score with a map


def anomalies() -> dict[str, Array]:
    heat = np.zeros((1, SIDE, SIDE), np.float32)
    heat[0, 8:16, 4:12] = 0.9
    return {
        "pred_score": np.array([0.8], np.float32),
        "pred_label": np.array([1], np.int64),
        "anomaly_map": heat,
        "pred_mask": (heat > 0.5).astype(np.uint8),
    }


def test_anomalib_answers_a_score_a_label_a_map_and_a_mask(tmp_path: Path) -> None:
    outputs = anomalies()
    found = vision(made(tmp_path, outputs), preset="anomalib")
    assert (found.task, found.assumed, found.image.resize) == ("anomaly", (), "stretch")
    anomaly = answer(found, outputs, STRETCHED)["anomaly"]
    assert (anomaly["score"], anomaly["anomalous"]) == (pytest.approx(0.8), True)
    assert (anomaly["map"]["low"], anomaly["map"]["high"]) == (0.0, pytest.approx(0.9))
    heat = pixels_of(anomaly["map"]["png"])
    assert heat.shape == (48, 64)
    assert (heat[18, 16], heat[40, 50]) == (65535, 0)
    mask = pixels_of(anomaly["mask"])
    assert mask[12:24, 8:24].all()
    assert mask.astype(bool).sum() == 12 * 16
    drawn = tasks.build(found).draw(np.zeros((48, 64, 3), np.uint8), outputs, STRETCHED, Options())
    assert drawn[18, 16].sum() > 200 > drawn[40, 50].sum()


def test_a_score_alone_is_compared_with_the_threshold(tmp_path: Path) -> None:
    outputs = {name: array for name, array in anomalies().items() if name in ("pred_score", "anomaly_map")}
    file = made(tmp_path, outputs)
    assert answer(vision(file), outputs, STRETCHED)["anomaly"]["anomalous"]
    (tmp_path / "model.toml").write_text('file = "m.onnx"\n[anomaly]\nthreshold = 0.81\n')
    found = answer(vision(file), outputs, STRETCHED)["anomaly"]
    assert not found["anomalous"]
    assert "mask" not in found
    with pytest.raises(ModelError, match="not finite"):
        answer(vision(file), {**outputs, "pred_score": np.array([np.nan], np.float32)}, STRETCHED)
