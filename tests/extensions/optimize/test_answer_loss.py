"""What a form loses: what counts as sure, what as a close call, and between what the share lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.extensions.optimize.answer_loss import Judge, is_sure, unlike, wilson
from carpool.lab.evaluate.labelled_data import NamedPictures
from carpool.lab.evaluate.scores import Accuracy


def classes(best: int, score: float = 0.9, others: float = 0.05) -> dict[str, Any]:
    both = [(best, score), (1 - best, others)]
    return {"classes": [{"label": f"c{at}", "class_id": at, "score": value} for at, value in both]}


def boxes(*scores: float, shift: float = 0.0) -> dict[str, Any]:
    return {
        "detections": [
            {
                "label": "cat",
                "class_id": 0,
                "score": score,
                "box": [100.0 * at + shift, 0, 100 * at + 50 + shift, 50],
            }
            for at, score in enumerate(scores)
        ]
    }


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 200, 0.0, 0.0188), (1, 200, 0.0009, 0.0278), (5, 10, 0.2366, 0.7634)],
)
def test_wilsons_interval(hits: int, trials: int, low: float, high: float) -> None:
    assert wilson(hits, trials) == pytest.approx((low, high), abs=1e-4)


def test_sure_answers_and_close_calls_are_counted_apart() -> None:
    right = [*[classes(0)] * 98, classes(0, 0.50, 0.45), classes(0, 0.50, 0.45)]
    found = [*[classes(0)] * 97, classes(1), classes(1, 0.50, 0.49), classes(0, 0.50, 0.45)]
    loss = Judge("classify", right).loss(found, 0.5)
    assert (loss.sure, loss.sure_changed, loss.close, loss.close_changed) == (98, 1, 2, 1)
    assert loss.points == pytest.approx(100 / 98, abs=1e-4)
    assert (loss.low, loss.high) == pytest.approx(tuple(100 * end for end in wilson(1, 98)), abs=1e-4)
    assert loss.by == "sure answers that changed"
    assert not loss.within(0.5)
    assert loss.within(1.1)


def test_of_a_detector_the_boxes_count() -> None:
    right = [boxes(0.9, 0.8, 0.55)] * 10
    same = Judge("detect", right).loss(right, 0.5)
    assert (same.sure, same.sure_changed, same.close, same.close_changed, same.points) == (40, 0, 20, 0, 0.0)
    found = [*right[:9], boxes(0.9, 0.1, 0.1)]  # one sure box and one close call are gone
    loss = Judge("detect", right).loss(found, 0.5)
    assert (loss.sure_changed, loss.close_changed, loss.by) == (1, 1, "sure boxes that changed")
    assert loss.sure == 39
    elsewhere = Judge("detect", right).loss([*right[:9], boxes(0.9, 0.8, 0.55, shift=40.0)], 0.5)
    assert elsewhere.sure_changed == 4  # those that are gone, and those that have come
    assert Judge("detect", right).loss([boxes(0.85, 0.8, 0.55)] * 10, 0.5).means["score_shift"] > 0


def test_labels_decide_where_there_are_some() -> None:
    names = ("c0",) * 20 + ("c1",) * 20
    data = NamedPictures(tuple(Path(f"{at}.jpg") for at in range(40)), names)
    right = [classes(0)] * 20 + [classes(1)] * 20
    worse = [*right[:-2], classes(0), classes(0)]
    judge = Judge("classify", right, Accuracy(data, {}), range(40))
    loss = judge.loss(worse, 0.5)
    assert (loss.points, loss.by) == (5.0, "labels: top1")
    assert loss.low <= 5.0 <= loss.high
    better = Judge("classify", worse, Accuracy(data, {}), range(40)).loss(right, 0.5)
    assert better.points == -5.0
    assert better.within(0.5)
    assert judge.doubts() == ""


def test_pictures_that_the_model_does_not_know_prove_nothing() -> None:
    doubtful = Judge("classify", [classes(0, 0.5, 0.45)] * 100).doubts()
    assert "sure of 0 answers in 100 images" in doubtful
    assert Judge("detect", [boxes()] * 100).doubts()
    assert Judge("classify", [classes(0)] * 100).doubts() == ""
    assert not is_sure(boxes(0.55))
    assert is_sure({"embedding": [1.0]})


def test_calibration_pictures_that_are_something_else_are_reported() -> None:
    held = [classes(0)] * 60 + [classes(0, 0.5, 0.45)] * 40
    assert unlike(held[30:], held) == ""
    assert "unlike the held ones: the model is sure of 0% of them, and of 60%" in unlike(held[60:], held)
