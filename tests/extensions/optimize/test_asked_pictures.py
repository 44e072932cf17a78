"""What is asked of every form: recorded requests, and which pictures are held back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backends import onnx_models
from backends.cases import settings
from carpool.config.repository import ModelVersion
from carpool.engine.loading.trial import Examined, examine
from carpool.errors import InvalidInput
from carpool.extensions.optimize.asked_pictures import picture_plan, read_requests, split


@pytest.fixture(name="found")
def a_model_that_takes_tensors(tmp_path: Path) -> Examined:
    file = onnx_models.arithmetic(tmp_path / "model.onnx")
    return examine(settings("onnxruntime", file), ModelVersion(1, file))


def test_no_held_picture_is_calibrated_with() -> None:
    found = split(400, 300)
    assert (len(found.calibrating), len(found.held)) == (100, 300)
    assert not {*found.calibrating} & {*found.held}
    assert split(400, 300) == found
    assert [len(part) for part in (split(2000, 300).calibrating, split(2000, 300).held)] == [128, 300]
    assert [len(part) for part in (split(100, 300).calibrating, split(100, 300).held)] == [25, 75]


def test_pictures_for_calibration_alone_are_never_held() -> None:
    found = split(130, 300, 30)
    assert found.calibrating == tuple(range(100, 130))
    assert found.held == tuple(range(100))


@pytest.mark.parametrize(("count", "apart"), [(10, None), (27, None), (30, 5), (30, 20)])
def test_too_few_are_rejected(count: int, apart: int | None) -> None:
    with pytest.raises(InvalidInput, match="at least 8 and 20 are needed"):
        split(count, 300, apart)


def test_recorded_tensors(found: Examined, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", x=np.arange(12, dtype=np.float64).reshape(4, 3))
    asked = read_requests(tmp_path / "r.npz", found)
    assert asked.count == 4
    feed = asked.feed(1)
    assert feed["x"].tolist() == [[3.0, 4.0, 5.0]]
    assert feed["x"].dtype == np.float32
    assert asked.answer(1, {"a": np.ones((1, 2)), "b": np.zeros((1, 1))})["embedding"].tolist() == [1, 1, 0]


def test_recorded_requests_of_the_protocol(found: Examined, tmp_path: Path) -> None:
    one = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(one)}\n{json.dumps(one)}\n")
    asked = read_requests(tmp_path / "r.jsonl", found)
    assert [asked.feed(place)["x"].tolist() for place in range(asked.count)] == [[[1, 2, 3]]] * 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("r.csv", "", "must be an .npz file"),
        ("r.npz", "no arrays", "cannot be read"),
        ("r.jsonl", "[]", "no v2 request"),
        ("r.jsonl", '{"inputs": []}', "has the inputs ; m takes x"),
        (
            "r.jsonl",
            '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}]}',
            "must have a batch of one",
        ),
    ],
)
def test_wrong_recordings(found: Examined, tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_requests(tmp_path / name, found)
    assert said in caught.value.message.replace(found.config.name, "m")


def test_a_model_of_tensors_needs_a_recording(found: Examined) -> None:
    with pytest.raises(InvalidInput, match="for tensors, give --recording"):
        picture_plan(found)
