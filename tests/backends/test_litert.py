"""TensorFlow Lite files: their names, numbers that stand for others, and how they fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends import tflite_models
from backends.cases import load, load_file, settings
from carpool.backends import Backend
from carpool.config.repository import find_models
from carpool.errors import ModelError, Unsupported

Opened = Callable[[Backend], Backend]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.tflite"


def test_a_file_alone_is_enough(file: Path) -> None:
    tflite_models.arithmetic(file)
    [source], warnings = find_models([file])
    assert (source.config.backend, source.config.file, warnings) == ("litert", "model.tflite", [])


def test_names_come_from_the_signature_where_there_is_one(file: Path, opened: Opened) -> None:
    signature = opened(load_file(tflite_models.brightness(file), backend="litert")).signature
    assert [(t.name, t.datatype, t.shape) for t in signature.inputs] == [("image", "FP32", (-1, 8, 8, 3))]
    assert [(t.name, t.datatype, t.shape) for t in signature.outputs] == [("scores", "FP32", (-1, 3))]


def test_whole_numbers_are_answered_as_what_they_stand_for(file: Path, opened: Opened) -> None:
    backend = opened(load_file(tflite_models.brightness(file, scale=0.5), backend="litert"))
    assert (backend.signature.inputs[0].datatype, backend.signature.outputs[0].datatype) == ("UINT8", "FP32")
    picture = np.zeros((2, 8, 8, 3), np.uint8)
    picture[1] = (10, 20, 30)
    scores = backend.run({"image": picture}, [])["scores"]
    np.testing.assert_array_equal(scores, [[0, 0, 0], [5, 10, 15]])


def test_or_left_as_they_are(file: Path, opened: Opened) -> None:
    tflite_models.brightness(file, scale=0.5)
    backend = opened(load(replace(settings("litert", file), parameters={"quantized": "raw"}), file))
    scores = backend.run({"image": np.full((1, 8, 8, 3), 10, np.uint8)}, [])["scores"]
    assert (scores.dtype, scores.tolist()) == (np.uint8, [[10, 10, 10]])


def test_openvino_runs_the_same_file(file: Path, opened: Opened) -> None:
    backend = opened(load_file(tflite_models.arithmetic(file), backend="openvino"))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(backend.run({"x": x}, ["total"])["total"], x.sum(axis=1, keepdims=True))


def test_what_is_no_model_is_told_in_one_sentence(file: Path) -> None:
    file.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"model\.tflite cannot be loaded: .*not a valid Flatbuffer"):
        load_file(file, backend="litert")


def test_a_batch_that_does_not_fit_leaves_the_instance_ready(file: Path, opened: Opened) -> None:
    backend = opened(load_file(tflite_models.arithmetic(file), backend="litert"))
    with pytest.raises(ModelError):
        backend.run({"x": np.ones((2, 4), np.float32)}, [])
    assert len(backend.run({"x": np.ones((2, 3), np.float32)}, ["double"])["double"]) == 2


def test_what_to_install_is_said_before_a_process_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(Unsupported, match=r"needs ai-edge-litert.* pip install 'carpool\[litert\]'"):
        load_file(tflite_models.arithmetic(file), backend="litert")
