"""Maps become quadrilaterals and characters become text, whatever a model answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from carpool.config.model import MAX_REGIONS, TextRegionsSettings
from carpool.errors import ConfigError, ModelError
from carpool.types import Array
from carpool.vision import draw, text_boxes
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import DEFAULT, Options
from carpool.vision.tasks import kinds
from carpool.vision.tasks.task import VisionTask
from vision import models
from vision.schemas import complaints

SIDE = 64
PLAIN = Geometry(SIDE, SIDE, SIDE, SIDE, 1.0, 1.0)
TWICE = Geometry(2 * SIDE, 2 * SIDE, SIDE, SIDE, 0.5, 0.5)
DB = 'task = "text_regions"\n[text_regions]\nformat = "db"\n'
LINES = 'task = "text_regions"\n[text_regions]\nformat = "lines"\n'
READ = 'task = "read"\n[read]\nactivation = "none"\n'


def finder(toml: str = DB, channels: int = 1) -> VisionTask:
    return models.task({"map": (channels, SIDE, SIDE)}, toml)


def found(
    task: VisionTask, likely: Array, geometry: Geometry = PLAIN, **options: Any
) -> list[dict[str, Any]]:
    answer = task.answer({"map": likely}, geometry, Options(**options))
    assert complaints({"model": "m", "version": "1", **answer}, type(task).schema()) == []
    regions: list[dict[str, Any]] = answer["regions"]
    return regions


def blank(*boxes: tuple[int, int, int, int]) -> Array:
    """Sure inside these boxes: x1, y1, x2, y2."""
    likely = np.zeros((1, SIDE, SIDE), np.float32)
    for x1, y1, x2, y2 in boxes:
        likely[0, y1:y2, x1:x2] = 0.9
    return likely


# ---- text_regions


def test_a_rectangle_grows_by_what_training_took_away() -> None:
    [region] = found(finder(), blank((10, 20, 50, 30)))
    more = 40 * 10 * 1.6 / (2 * (40 + 10))
    expected = [10 - more, 20 - more, 50 + more, 30 + more]
    assert region["box"] == pytest.approx(expected, abs=0.02)
    x1, y1, x2, y2 = expected
    assert np.array(region["polygon"]) == pytest.approx(
        np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]]), abs=0.02
    )
    assert region["score"] == pytest.approx(0.9, abs=1e-6)


def test_regions_are_in_pixels_of_the_picture() -> None:
    [one], [two] = (found(finder(), blank((10, 20, 50, 30)), where) for where in (PLAIN, TWICE))
    assert two["box"] == pytest.approx([2 * side for side in one["box"]], abs=0.02)


@pytest.mark.parametrize("degrees", [-40, -20, -5, 0, 5, 20, 40])
def test_turned_text_is_framed_along_its_lines(degrees: int) -> None:
    import cv2

    likely = np.zeros((SIDE, SIDE), np.float32)
    corners = cv2.boxPoints(((32.0, 32.0), (40.0, 8.0), float(degrees)))
    cv2.fillPoly(likely, [np.rint(corners).astype(np.int32)], 1.0)
    [region] = found(finder(), likely[None])
    first, second = (np.array(corner) for corner in region["polygon"][:2])
    angle = math.degrees(math.atan2(*(second - first)[::-1]))
    assert angle == pytest.approx(degrees, abs=3)
    assert np.linalg.norm(second - first) > 40


def test_the_best_come_first_and_weak_ones_not_at_all() -> None:
    likely = blank((2, 2, 30, 8), (2, 20, 30, 26), (2, 40, 30, 46))
    likely[0, 20:26] *= 1.1
    likely[0, 40:46] *= 0.5
    regions = found(finder(), likely)
    assert [round(region["score"], 2) for region in regions] == [0.99, 0.9]
    assert len(found(finder(), likely, score=0.3)) == 3
    assert len(found(finder(), likely, max_detections=1)) == 1


def test_nothing_and_specks_are_no_text() -> None:
    assert found(finder(), blank()) == []
    likely = blank()
    likely[0, 5, 5] = 1.0
    assert found(finder(), likely) == []


def test_a_region_at_the_edge_leaves_the_picture_and_its_box_does_not() -> None:
    [region] = found(finder(), blank((0, 0, 40, 10)))
    assert min(point[1] for point in region["polygon"]) < 0
    assert region["box"][:2] == [0.0, 0.0]


def test_lines_know_their_edges() -> None:
    maps = np.zeros((3, SIDE, SIDE), np.float32)
    maps[0, 30:34, 10:50] = 0.9
    for row in range(30, 34):
        maps[1, row], maps[2, row] = row + 0.5 - 26, 38 - row - 0.5
    [region] = found(finder(LINES, 3), maps)
    assert region["box"] == pytest.approx([10 - 0.15 * 12, 26, 50 + 0.15 * 12, 38], abs=0.02)
    [wide] = found(finder(LINES + "margin = 0.25\n", 3), maps)
    assert wide["box"] == pytest.approx([10 - 0.4 * 12, 23, 50 + 0.4 * 12, 41], abs=0.02)


def test_lines_of_a_smaller_map_measure_in_pixels_of_the_input() -> None:
    maps = np.zeros((3, SIDE // 2, SIDE // 2), np.float32)
    maps[0, 15:17, 5:25], maps[1:, 15:17, 5:25] = 0.9, 8.0
    task = models.task({"map": (3, SIDE // 2, SIDE // 2)}, LINES)
    [region] = found(task, maps)
    assert region["box"][1::2] == pytest.approx([32 - 8, 32 + 8], abs=0.02)


def test_a_line_may_run_uphill() -> None:
    maps = np.zeros((3, SIDE, SIDE), np.float32)
    for column in range(4, 60):
        middle = 40 - column // 4
        maps[0, middle - 1 : middle + 2, column] = 0.9
        maps[1:, middle - 1 : middle + 2, column] = 5.0
    [region] = found(finder(LINES, 3), maps)
    (x1, y1), (x2, y2) = region["polygon"][:2]
    assert (y2 - y1) / (x2 - x1) == pytest.approx(-0.25, abs=0.03)


@settings(deadline=None, max_examples=60)
@given(
    likely=hnp.arrays(
        np.float32,
        (3, SIDE, SIDE),
        elements=st.sampled_from([0.0, 0.2, 0.6, 1.0, 5.0, -1.0, math.nan, math.inf, -math.inf, 3e38]),
        fill=st.just(0.0),
    )
)
def test_whatever_a_model_answers_is_a_sound_answer(likely: Array) -> None:
    for task, maps in ((finder(), likely[:1]), (finder(LINES, 3), likely)):
        for region in found(task, maps, score=0.0):
            x1, y1, x2, y2 = region["box"]
            assert 0 <= x1 < x2 <= SIDE
            assert 0 <= y1 < y2 <= SIDE
            assert np.isfinite(region["polygon"]).all()
            assert 0 <= region["score"] <= 1


def test_maps_of_noise_and_of_stripes_cost_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in pixels that are looked at, not in seconds."""
    seen: list[int] = []
    part = text_boxes._Regions._part

    def counting(self: Any, number: int) -> Any:
        got = part(self, number)
        seen.append(got[2].size)
        return got

    monkeypatch.setattr(text_boxes._Regions, "_part", counting)
    table = TextRegionsSettings("db", score=0.0)
    noise = np.random.default_rng(0).random((512, 512), np.float32)
    assert len(text_boxes.find_quads(noise, table, MAX_REGIONS).scores) <= MAX_REGIONS
    diagonal = (np.add.outer(np.arange(512), np.arange(512)) % 3 == 0).astype(np.float32)
    quads = text_boxes.find_quads(diagonal, table, MAX_REGIONS)
    assert len(quads.scores) <= MAX_REGIONS
    assert sum(seen) <= 2 * text_boxes._LOOKED_AT * diagonal.size


def test_giant_maps_and_wrong_shapes_are_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_boxes, "MOST_PIXELS", SIDE * SIDE - 1)
    with pytest.raises(ModelError, match="more than"):
        found(finder(), blank())
    with pytest.raises(ModelError, match="instead of"):
        found(finder(), np.zeros((2, SIDE, SIDE), np.float32))
    free = models.task({"map": (-1, -1, -1)}, DB)
    with pytest.raises(ModelError, match="no map"):
        found(free, np.zeros((2, 4, 4), np.float32))


# ---- read

LETTERS = ("a", "b", "c")


def reader(classes: int = 4, toml: str = READ, labels: tuple[str, ...] = LETTERS) -> VisionTask:
    return models.task({"steps": (-1, classes)}, toml, labels)


def said(task: VisionTask, steps: Array) -> tuple[str, float]:
    answer = task.answer({"steps": steps}, PLAIN, DEFAULT)
    assert complaints({"model": "m", "version": "1", **answer}, type(task).schema()) == []
    return answer["text"], answer["score"]


def sure(*classes: int, among: int = 4, score: float = 0.9) -> Array:
    steps = np.full((len(classes), among), (1 - score) / (among - 1), np.float32)
    steps[np.arange(len(classes)), list(classes)] = score
    return steps


def test_blanks_separate_and_repeats_are_one() -> None:
    assert said(reader(), sure(0, 1, 1, 0, 1, 2, 0)) == ("aab", pytest.approx(0.9, abs=1e-6))
    assert said(reader(), sure(0, 0)) == ("", 0.0)
    assert said(reader(), np.zeros((0, 4), np.float32)) == ("", 0.0)


def test_the_score_is_the_mean_of_what_stays() -> None:
    steps = np.concatenate([sure(1), sure(0, score=0.5), sure(2, score=0.6), sure(2, score=0.99)])
    assert said(reader(), steps)[1] == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "toml", "labels", "steps", "text"),
    [
        (4, READ, LETTERS, (1, 2, 3), "abc"),  # the blank is beside them, first
        (4, READ + 'blank = "last"\n', LETTERS, (0, 1, 2, 3), "abc"),
        (5, READ, LETTERS, (1, 4, 2), "a b"),  # and the space at the end
        (3, READ, ("", "x", "y"), (1, 0, 2), "xy"),  # one of the labels is the blank
        (3, READ + 'alphabet = "xy"\n', LETTERS, (1, 2), "xy"),
    ],
)
def test_alphabets(
    classes: int, toml: str, labels: tuple[str, ...], steps: tuple[int, ...], text: str
) -> None:
    assert said(reader(classes, toml, labels), sure(*steps, among=classes))[0] == text


def test_spaces_at_the_ends_go_and_several_are_one() -> None:
    assert said(reader(5), sure(4, 1, 4, 0, 4, 2, 4, among=5))[0] == "a b"


def test_logits_become_probabilities() -> None:
    task = reader(toml=READ.replace("none", "softmax"))
    steps = np.log(sure(1, 0, 2)) + 7
    assert said(task, steps) == ("ab", pytest.approx(0.9, abs=1e-5))


@settings(deadline=None, max_examples=80)
@given(
    steps=hnp.arrays(
        np.float32, st.tuples(st.integers(0, 9), st.just(4)), elements=st.floats(width=32, allow_nan=True)
    ),
    activation=st.sampled_from(["softmax", "none"]),
)
def test_whatever_it_answers_there_is_a_text_and_a_score(steps: Array, activation: str) -> None:
    text, score = said(reader(toml=READ.replace("none", activation)), steps)
    assert set(text) <= set("abc")
    assert 0 <= score <= 1


def test_as_many_characters_as_values_or_it_is_said() -> None:
    with pytest.raises(ModelError, match="instead of"):
        said(reader(), np.zeros((3, 5), np.float32))
    with pytest.raises(ConfigError, match="9 values for each step, and 3 characters"):
        models.task({"steps": (-1, 9)}, READ, LETTERS)


# ---- both are drawn


def test_text_is_drawn_with_what_it_says_beside_it() -> None:
    pixels = np.full((200, 600, 3), 255, np.uint8)
    region = {"polygon": [[10, 10], [200, 10], [200, 40], [10, 40]], "box": [10, 10, 200, 40], "score": 0.9}
    framed = draw.text(pixels, [region], (600, 200))
    assert framed.shape == pixels.shape
    assert (framed != 255).any()
    beside = draw.text(pixels, [{**region, "text": "Hello"}], (600, 200))
    assert beside.shape == (200, 1200, 3)
    assert (beside[:, 600:] < 100).any()
    assert (pixels == 255).all()
    assert all("overlay" in kinds()[name].options for name in ("text_regions", "read"))
    steps = sure(1, 2)
    assert reader().draw(pixels, {"steps": steps}, PLAIN, DEFAULT).shape[1] == 1200
    assert finder().draw(pixels, {"map": blank((10, 20, 50, 30))}, PLAIN, DEFAULT).shape == pixels.shape
