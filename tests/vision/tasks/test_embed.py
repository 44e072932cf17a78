from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.model import Task
from carpool.errors import InvalidInput, ModelError, TooLarge
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import kinds
from vision.models import task
from vision.schemas import complaints

GEOMETRY = Geometry(200, 100, 64, 64, 0.32, 0.64)


def embedding(values: object, toml: str = "[embed]") -> list[float]:
    array = np.asarray(values, np.float32)
    answer = task({"y": array.shape}, toml).answer({"y": array}, GEOMETRY, Options())
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.EMBED].schema()) == []
    return answer["embedding"]  # type: ignore[no-any-return]


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_the_length_is_one(values: list[float]) -> None:
    found = embedding(values)
    length = math.sqrt(sum(value * value for value in found))
    assert length == pytest.approx(1.0) or not any(values)
    json.dumps(found, allow_nan=False)


def test_it_is_flattened_and_keeps_its_direction() -> None:
    assert embedding([[3.0, 0.0], [0.0, -4.0]]) == pytest.approx([0.6, 0.0, 0.0, -0.8])


def test_it_may_be_left_as_it_is() -> None:
    assert embedding([3.0, -4.0], "[embed]\nnormalize = false") == [3.0, -4.0]


def test_zeros_have_no_direction() -> None:
    assert embedding([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_is_the_models_fault(poison: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        embedding([1.0, poison])


def test_there_is_a_limit() -> None:
    with pytest.raises(TooLarge, match="with the v2 protocol"):
        embedding(np.zeros(100_001))


def test_it_cannot_be_drawn() -> None:
    made = task({"y": (2,)}, "[embed]")
    with pytest.raises(InvalidInput, match="responses of embed cannot be drawn"):
        made.draw(np.zeros((9, 9, 3), np.uint8), {}, GEOMETRY, Options())
