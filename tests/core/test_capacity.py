from __future__ import annotations

from math import inf

import pytest

from carpool.core.curve import (
    BatchCurve,
    expected_p99,
    fluid_bound,
    promised_batch,
    slo_capacity,
    steady_batch,
)
from core.playing import named


@pytest.mark.parametrize(
    ("name", "capacity", "bound"),
    [("4+1/50", 840, 889), ("resnet/30", 640, 762), ("resnet/100", 845, 865), ("yolo/100", 2046, 2133)],
)
def test_known_answers(name: str, capacity: float, bound: float) -> None:
    curve, slo = named(name)
    assert slo_capacity(curve, slo) == pytest.approx(capacity, abs=1)
    assert fluid_bound(curve, slo, 3 * slo_capacity(curve, slo)) == pytest.approx(bound, abs=1.5)


def test_a_promise_shorter_than_two_batches_of_one_has_no_capacity() -> None:
    assert promised_batch(BatchCurve.parse("4+1"), 0.0099) == 0
    assert slo_capacity(BatchCurve.parse("4+1"), 0.0099) == 0.0
    assert fluid_bound(BatchCurve.parse("4+1"), 0.004, 100) == 0.0


def test_the_batch_that_forms_by_itself() -> None:
    images, seconds = steady_batch(BatchCurve.parse("4+1"), 500)
    assert (images, seconds) == (pytest.approx(4), pytest.approx(0.008))
    assert steady_batch(BatchCurve.parse("4+1"), 2000) == (inf, inf)


def test_p99_of_the_exercise() -> None:
    assert expected_p99(BatchCurve.parse("4+1"), 500) == pytest.approx(0.0253, abs=0.0005)
    assert expected_p99(BatchCurve.parse("4+1"), 2000) == inf
