from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carpool.config.backend_kinds import kinds
from carpool.core.curve import BatchCurve
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import (
    BatchProof,
    Profile,
    StartTimes,
    best_piece,
    choices,
    read_profile,
)
from carpool.engine.profile.run_memory import MUCH_MEMORY, RunMemory
from carpool.link.typed_json import as_json

POINTS = (Point(1, 0.010, 0.1, 5), Point(2, 0.018, 0.1, 5), Point(4, 0.035, 0.1, 5))
PROFILE = Profile(Layout(2, 1), "tried", Measured(POINTS, "the last takes longer than 30 ms"), "2026-01-01")


def test_there_and_back() -> None:
    assert read_profile(json.loads(json.dumps(as_json(PROFILE)))) == PROFILE


@pytest.mark.parametrize(
    "points",
    [
        (),
        (Point(1, -0.01),),
        (Point(0, 0.01),),
        (Point(1 << 30, 0.01),),
        (Point(1, float("nan")),),
        (Point(1, 0.01), Point(1, 0.01)),
        (Point(1, cast(float, "fast")),),
        (Point(1, 0.01, 0.0, True),),
    ],
)
def test_times_that_cannot_be_right_are_not_read(points: tuple[Point, ...]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_profile(as_json(Profile(Layout(2, 1), "tried", Measured(points))))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": as_json(Layout(0, 1))},
        {"layout": as_json(Layout(1, cast(int, "two")))},
        {"measured": {"points": 7}},
        {"measured_at": 3},
        {"colour": "red"},
        {"layout_reason": "\x1b]0;title\x07"},
        {"measured_at": "x" * 30_000},
        {"proof": as_json(BatchProof(1, "\x1b]0;title\x07"))},
        {"proof": as_json(BatchProof(1, untried="x" * 30_000))},
        {"memory": as_json(RunMemory(0, 1 << 60))},
        {"started": as_json(StartTimes(float("inf")))},
    ],
)
def test_what_cannot_be_right_is_not_read(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_profile(as_json(PROFILE) | change)


def test_the_choices_in_words() -> None:
    curve = BatchCurve.parse("1:10,2:12,4:35,8:80")
    said = choices(replace(PROFILE, reused="Used again."), curve, 2, 0.030)
    assert said == (
        "2 instances × 1 thread: tried.",
        "Measured and warm: batches of 1, 2, 4; no larger ones, since the last takes longer than 30 ms.",
        "Largest batch: 3 of 8. A batch of 4 takes 35 ms, longer than the SLO of 30 ms.",
        "Under load, batches of about 2: a request waits for the running batch (12 ms) and then for its own "
        "(12 ms), within the SLO of 30 ms. Sustained throughput: 333 images/s.",
        "Large batches run in pieces of 2: 40% less time for each image.",
        "Used again.",
    )


def test_a_promise_that_is_not_sure_says_so() -> None:
    said = choices(PROFILE, PROFILE.measured.curve(8), 8, 0.015)
    assert "The SLO of 15 ms is not certain under load: one image takes 10 ms" in said[-1]
    assert "An SLO of 22 ms can be kept" in said[-1]


def test_without_a_promise() -> None:
    said = choices(PROFILE, PROFILE.measured.curve(4), 4, None)
    assert said[-1] == "A batch of 2 reaches 90 % of the highest throughput. There is no SLO."


def test_a_model_that_fits_entirely() -> None:
    said = choices(Profile(Layout(1, 1)), BatchCurve.linear(0.004, 0.001, 8), 8, 0.1)
    assert said[0] == "Largest batch: 8. It takes 12 ms, within the SLO of 100 ms."


_WHY = {
    "too long": re.compile(r"takes ([\d.,]+) ms, longer than the SLO of ([\d.,]+) ms"),
    "fits": re.compile(r"takes ([\d.,]+) ms, within the SLO of ([\d.,]+) ms"),
    "two fit": re.compile(r"running batch \(([\d.,]+) ms\) .* own \(([\d.,]+) ms\), .* SLO of ([\d.,]+) ms"),
    "not certain": re.compile(r"SLO of ([\d.,]+) ms is not .* takes ([\d.,]+) ms, .* SLO of ([\d.,]+) ms"),
}


@given(
    st.lists(st.floats(0.0001, 0.05), min_size=4, max_size=4),
    st.floats(0.001, 0.5).map(lambda slo: round(slo, 4)),
)
def test_the_numbers_of_every_reason_justify_it(steps: list[float], slo: float) -> None:
    """Read back from the sentences, as a person would."""
    curve = BatchCurve.measured(list(zip((1, 2, 4, 8), accumulate(steps), strict=True)), 8)
    assume(curve.times[1] <= slo)
    for sentence in choices(Profile(Layout(1, 1)), curve, 8, slo):
        kind, found = next((k, m) for k, p in _WHY.items() if (m := p.search(sentence)))
        numbers = [float(word.rstrip(",.").replace(",", "")) for word in found.groups()]
        if kind == "too long":
            assert numbers[0] > numbers[1], sentence
        elif kind == "fits":
            assert numbers[0] <= numbers[1], sentence
        elif kind == "two fit":
            assert numbers[0] + numbers[1] <= numbers[2], sentence
        else:
            assert 2 * numbers[1] > numbers[0] * 0.9, sentence
            assert numbers[2] > numbers[0], sentence


def test_pieces_where_they_are_clearly_cheaper() -> None:
    dearer, alike = BatchCurve.parse("1:1,2:2,4:8,8:16"), BatchCurve.parse("1:1,2:2,4:4.1,8:8.5")
    assert best_piece(dearer, kinds()["onnxruntime"]) == 1
    assert best_piece(alike, kinds()["onnxruntime"]) == 8
    assert best_piece(dearer, kinds()["python"]) == 8  # its code sees the batch that was formed


def test_smaller_pieces_where_large_batches_take_much_memory() -> None:
    onnx, python = kinds()["onnxruntime"], kinds()["python"]
    alike = BatchCurve.parse("1:1.02,2:2,4:4,8:8")
    assert best_piece(alike, onnx, MUCH_MEMORY) == 1
    assert best_piece(alike, onnx, MUCH_MEMORY - 1) == 8
    assert best_piece(alike, python, MUCH_MEMORY) == 8
    assert best_piece(BatchCurve.parse("1:1.1,2:2.02,4:4,8:8"), onnx, MUCH_MEMORY) == 2
    assert best_piece(BatchCurve.parse("1:4,2:5,4:7,8:11"), onnx, MUCH_MEMORY) == 8
    assert best_piece(BatchCurve.parse("1:10,2:17,4:32,8:78"), onnx, MUCH_MEMORY) == 4


def test_memory_in_words() -> None:
    said = choices(
        replace(PROFILE, memory=RunMemory(900 << 20, 500_000_000)), BatchCurve.parse("1:1,8:8"), 1, None
    )
    assert said[-2:] == (
        "Large batches run in pieces of 1: less memory, about the same time.",
        "Batches take 500 MB beside the weights while all instances run. It is kept from batch to batch, and "
        "given back after 5 s without requests.",
    )


def test_one_alone_is_copied_nowhere_and_need_not_be_the_very_best() -> None:
    nearly, clearly = BatchCurve.parse("1:1,2:1.8,4:8,8:16"), BatchCurve.parse("1:1,2:1.6,4:8,8:16")
    assert best_piece(nearly, kinds()["onnxruntime"]) == 1
    assert best_piece(clearly, kinds()["onnxruntime"]) == 2
    hardly = BatchCurve.parse("1:1,2:1.8,4:4.4,8:8.8")  # two are clearly cheaper than the whole, one is not
    assert best_piece(hardly, kinds()["onnxruntime"]) == 2
