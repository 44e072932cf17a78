from __future__ import annotations

import json

import numpy as np
import pytest

from carpool.config.model import Task
from carpool.errors import InvalidInput, TooLarge
from carpool.types import Array, Datatype
from carpool.vision import tasks
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import describe
from carpool.vision.tasks import kinds
from vision.models import config, signature, task
from vision.schemas import complaints

GEOMETRY = Geometry(200, 100, 64, 64, 0.32, 0.64)


def output(array: Array, datatype: Datatype) -> dict[str, object]:
    made, *_ = describe(config('task = "raw"'), signature({"y": array.shape}, datatype=datatype))
    assert made is not None
    answer = tasks.build(made).answer({"y": array}, GEOMETRY, Options())
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.RAW].schema()) == []
    json.dumps(answer, allow_nan=False)
    return answer["outputs"][0]  # type: ignore[no-any-return]


def test_every_output_as_it_is() -> None:
    made = task({"a": (2, 2), "b": (3,)}, 'task = "raw"')
    arrays = {"a": np.arange(4, dtype=np.float32).reshape(2, 2), "b": np.zeros(3, np.float32)}
    assert made.answer(arrays, GEOMETRY, Options()) == {
        "image": {"width": 200, "height": 100},
        "outputs": [
            {"name": "a", "datatype": "FP32", "shape": [2, 2], "data": [[0.0, 1.0], [2.0, 3.0]]},
            {"name": "b", "datatype": "FP32", "shape": [3], "data": [0.0, 0.0, 0.0]},
        ],
    }


def test_integers_booleans_texts_and_bfloat16() -> None:
    assert output(np.array([1, -2]), Datatype.INT64)["data"] == [1, -2]
    assert output(np.array([True, False]), Datatype.BOOL)["data"] == [True, False]
    texts = np.array(["ü".encode(), b"\xff"], object)
    assert output(texts, Datatype.BYTES)["data"] == ["ü", "\ufffd"]
    assert output(np.array([0x3FC0, 0x7FC0], np.uint16), Datatype.BF16)["data"] == [1.5, None]


def test_what_is_not_finite_is_null() -> None:
    found = output(np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32), Datatype.FP32)
    assert found["data"] == [[1.5, None], [None, None]]


def test_there_is_a_limit() -> None:
    made = task({"a": (-1,), "b": (-1,)}, 'task = "raw"')
    zeros = np.zeros(60_000, np.float32)
    with pytest.raises(TooLarge, match="the response has 120000 numbers, more than the 100000"):
        made.answer({"a": zeros, "b": zeros}, GEOMETRY, Options())


def test_it_cannot_be_drawn() -> None:
    with pytest.raises(InvalidInput, match="responses of raw cannot be drawn"):
        task({"y": (2,)}, 'task = "raw"').draw(np.zeros((9, 9, 3), np.uint8), {}, GEOMETRY, Options())
