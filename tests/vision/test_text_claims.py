"""PP-OCR's files are known by what is in them, or by their names; and only where their outputs fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from carpool.config.file_metadata import FileMetadata, read_metadata
from carpool.config.model import ReadSettings, TextRegionsSettings
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision.claims import read_claims
from carpool.vision.output_facts import NO_CLAIMS
from carpool.vision.plans.settings import Described, ModelFacts, describe
from vision import models

ALPHABET = "'\na\nb\nc"


def described(metadata: FileMetadata, shape: tuple[int, ...], sample: Array, channels: int = 3) -> Described:
    signature = Signature(
        "m",
        (TensorSpec("x", Datatype.FP32, (channels, -1, -1)),),
        (TensorSpec("y", Datatype.FP32, shape),),
        8,
    )
    return describe(models.config(), signature, {}, ModelFacts(read_claims(metadata), {"y": sample}))


def steps(classes: int) -> Array:
    values = np.random.default_rng(0).random((80, classes), np.float32)
    return values / values.sum(axis=1, keepdims=True)


def test_a_reader_brings_its_alphabet() -> None:
    vision = described(FileMetadata({"character": ALPHABET}), (-1, 6), steps(6)).vision
    assert vision is not None
    assert vision.task == "read"
    assert vision.labels == ("'", "a", "b", "c")
    assert vision.table == ReadSettings(activation="none")
    assert vision.image.size == (48, 640)
    assert (vision.image.resize, vision.image.channels) == ("line", "bgr")


def test_a_height_that_the_model_has_counts() -> None:
    signature = Signature(
        "m",
        (TensorSpec("x", Datatype.FP32, (3, 32, -1)),),
        (TensorSpec("y", Datatype.FP32, (-1, 6)),),
        8,
    )
    seen = ModelFacts(read_claims(FileMetadata({"character": ALPHABET})), {"y": steps(6)})
    vision = describe(models.config(), signature, {}, seen).vision
    assert vision is not None
    assert vision.image.size == (32, 640)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ch_PP-OCRv4_det_infer", True),
        ("PP-OCRv6_det_small", True),
        ("ppocr4_det", True),
        ("en_ppocr_mobile_v2.0_det_infer", True),
        ("ch_PP-OCRv4_rec_infer", False),
        ("ch_ppocr_mobile_v2.0_cls_infer", False),
        ("detector", False),
        ("text_detector", False),
        ("ocr_det" * 1000, False),
    ],
)
def test_finders_are_known_by_name(name: str, known: bool) -> None:
    assert (read_claims(FileMetadata(name=name)).task == "text_regions") is known


def test_a_finder_needs_no_settings() -> None:
    likely = np.zeros((1, 960, 960), np.float32)
    vision = described(FileMetadata(name="ch_PP-OCRv4_det_infer"), (1, -1, -1), likely).vision
    assert vision is not None
    assert vision.task == "text_regions"
    assert vision.table == TextRegionsSettings("db")
    assert vision.image.size == (960, 960)
    assert vision.image.anchor == "top_left"


def test_claims_that_the_outputs_do_not_fit_are_said() -> None:
    found = described(FileMetadata(name="ch_PP-OCRv4_det_infer"), (-1, 6), steps(6))
    assert found.vision is None
    assert "text_regions" in found.ask
    found = described(FileMetadata({"character": ALPHABET}), (-1, 9), steps(9))
    assert found.vision is None
    assert "read" in found.ask


def test_sidecars(tmp_path: Path) -> None:
    folder = tmp_path / "reader" / "1"
    folder.mkdir(parents=True)
    graph = onnx.helper.make_graph([], "g", [], [])
    onnx.save(onnx.helper.make_model(graph), str(folder / "model.onnx"))
    (folder / "meta.json").write_text(json.dumps({"charset": ["a", "b", " "]}))
    metadata = read_metadata(folder / "model.onnx")
    assert metadata.name == "reader"
    claims = read_claims(metadata)
    assert (claims.task, claims.labels) == ("read", ("a", "b", " "))
    assert read_claims(replace(metadata, meta={"charset": "abc"})) == NO_CLAIMS
    too_many = replace(metadata, meta={"charset": ["a"] * 100_000})
    assert read_claims(too_many) == NO_CLAIMS
