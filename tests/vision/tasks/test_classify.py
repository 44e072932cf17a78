from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.model import Task
from carpool.errors import ModelError
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import kinds
from carpool.vision.tasks.classify import best_first
from vision.models import task
from vision.schemas import complaints

GEOMETRY = Geometry(200, 100, 64, 64, 0.32, 0.64)
LABELS = ["cat", "dog", "owl"]
LOGITS = np.array([1.0, 3.0, 2.0], np.float32)


def classes(toml: str, values: object, **options: object) -> list[dict[str, object]]:
    made = task({"y": (3,)}, toml, LABELS)
    answer = made.answer({"y": np.asarray(values, np.float32)}, GEOMETRY, Options(**options))  # type: ignore[arg-type]
    assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.CLASSIFY].schema()) == []
    assert answer["image"] == {"width": 200, "height": 100}
    return answer["classes"]  # type: ignore[no-any-return]


def test_softmax_and_labels() -> None:
    total = sum(math.exp(value) for value in LOGITS)
    found = classes("", LOGITS)
    assert [one["label"] for one in found] == ["dog", "owl", "cat"]
    assert [one["class_id"] for one in found] == [1, 2, 0]
    assert [one["score"] for one in found] == [round(math.exp(v) / total, 6) for v in (3, 2, 1)]


def test_sigmoid_is_for_labels_that_do_not_exclude_each_other() -> None:
    found = classes('[classify]\nactivation = "sigmoid"', [4.0, 3.0, -4.0], score=0.5)
    assert [(one["label"], one["score"]) for one in found] == [("cat", 0.982014), ("dog", 0.952574)]


def test_none_takes_the_values_as_they_are() -> None:
    found = classes('[classify]\nactivation = "none"', [0.25, 1.5, -1.0])
    assert [one["score"] for one in found] == [1.0, 0.25, 0.0]


def test_top_k_and_the_least_score() -> None:
    assert len(classes("", LOGITS, top_k=2)) == 2
    assert len(classes("", LOGITS, top_k=900)) == 3
    assert classes("", LOGITS, score=1.0) == []


def test_ties_keep_the_order_of_the_classes() -> None:
    assert [one["class_id"] for one in classes("", [1, 1, 1])] == [0, 1, 2]


ANY = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(deadline=None)
@given(st.lists(ANY, min_size=3, max_size=3), st.sampled_from(["softmax", "sigmoid", "none"]))
def test_any_numbers_give_scores(values: list[float], activation: str) -> None:
    found = classes(f'[classify]\nactivation = "{activation}"', values)
    scores = [one["score"] for one in found]
    assert all(isinstance(score, float) and 0.0 <= score <= 1.0 for score in scores)
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    json.dumps(found, allow_nan=False)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40), st.integers(1, 50))
def test_the_best_come_first_as_if_all_were_sorted(values: list[float], most: int) -> None:
    scores = np.array(values)
    assert best_first(scores, most).tolist() == np.argsort(-scores, kind="stable")[:most].tolist()


def test_what_is_not_a_number_never_wins() -> None:
    assert classes("", [math.nan, 0.0, -1.0])[0]["label"] == "dog"


def test_dimensions_of_one_around_the_vector() -> None:
    made = task({"y": (3, 1, 1)}, "", LABELS)
    answer = made.answer({"y": LOGITS.reshape(1, 3, 1, 1)}, GEOMETRY, Options(top_k=1))
    assert answer["classes"][0]["label"] == "dog"


def test_outputs_that_do_not_fit_are_the_models_fault() -> None:
    made = task({"y": (3,)}, "", LABELS)
    with pytest.raises(ModelError, match=r'"y" has the shape \[4\] instead of \[3\]'):
        made.answer({"y": np.zeros(4, np.float32)}, GEOMETRY, Options())
    with pytest.raises(ModelError, match='did not return the output "y"'):
        made.answer({}, GEOMETRY, Options())
