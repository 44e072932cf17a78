"""Drawn pictures: what must show does, nothing else changes, and no size is too odd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision import draw
from carpool.vision.draw import Canvas, colour, ink_on
from carpool.vision.geometry import Geometry
from carpool.vision.mask_regions import find
from carpool.vision.picture_answers import Class, Detection
from later import many

GREY = 128


def grey(width: int, height: int) -> Array:
    return np.full((height, width, 3), GREY, np.uint8)


def detection(box: list[float], class_id: int = 3, label: str = "dog") -> Detection:
    return Detection(label=label, class_id=class_id, score=0.5, box=box)


def shows(pixels: Array, own: tuple[int, int, int]) -> bool:
    return bool((np.abs(pixels.astype(int) - np.array(own)).max(axis=2) < 12).any())


def test_a_box_is_framed_in_its_colour_and_left_empty() -> None:
    before = grey(640, 480)
    drawn = draw.detections(before, [detection([200, 150, 400, 300])], (640, 480))
    assert (before == GREY).all()
    assert drawn.shape == before.shape
    for part in (drawn[150:300, 196:205], drawn[150:300, 396:405], drawn[296:305, 200:400]):
        assert shows(part, colour(3))
    assert (drawn[200:290, 210:390] == GREY).all()
    assert (drawn[310:] == GREY).all()
    assert (drawn[:110] == GREY).all()


def test_hundreds_of_boxes_are_all_framed() -> None:
    corners = [[10.0 + 30 * (n % 40), 10.0 + 30 * (n // 40)] for n in range(1000)]
    found = [detection([x, y, x + 20, y + 20], 5) for x, y in corners]
    drawn = draw.detections(grey(1300, 800), found, (1300, 800))
    assert all(
        shows(drawn[int(y) + 15 : int(y) + 26, int(x) : int(x) + 20], colour(5)) for x, y in corners[500:]
    )


def test_boxes_follow_a_picture_that_was_decoded_smaller() -> None:
    drawn = draw.detections(grey(640, 480), [detection([800, 600, 1600, 1200])], (2560, 1920))
    assert shows(drawn[150:300, 196:205], colour(3))


def test_tags_avoid_each_other() -> None:
    canvas = Canvas(grey(640, 480))
    for number in range(4):
        canvas.tag_box([200, 200, 400, 300], f"label {number}", colour(number))
    taken = canvas._taken
    assert len(taken) == len(set(taken)) == 4
    for place in taken:
        others = [other for other in taken if other != place]
        assert all(
            o[2] <= place[0] or place[2] <= o[0] or o[3] <= place[1] or place[3] <= o[1] for o in others
        )


def test_classes_are_listed_in_a_corner() -> None:
    found = [Class(label=f"class {n}", class_id=n, score=1 / (n + 1)) for n in range(5)]
    drawn = draw.classes(grey(640, 480), found)
    assert shows(drawn[:150, :320], colour(0))
    assert (drawn[200:, 400:] == GREY).all()
    assert np.array_equal(draw.classes(grey(640, 480), []), grey(640, 480))


def test_masks_are_tinted_and_the_rest_is_darker() -> None:
    maps = np.zeros((2, 48, 64), np.float32)
    maps[0, :24], maps[1, :, 48:] = 0.8, 0.9
    found = find(maps, Geometry(640, 480, 640, 480, 1.0, 1.0), 0.5)
    drawn = draw.regions(grey(640, 480), found, lambda class_id: f"class {class_id}")
    assert drawn[400, 100].tolist() == [58, 58, 58]
    assert drawn[20, 20].tolist() != drawn[400, 600].tolist()
    assert shows(drawn[230:250, :400], colour(0))


def test_colours_are_stable_distinct_and_readable() -> None:
    colours = [colour(number) for number in range(80)]
    assert colours == [colour(number) for number in range(80)]
    assert len(set(colours)) == 80
    for one, other in pairwise(colours):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 80
    assert ink_on((255, 255, 0)) != ink_on((0, 0, 80))


SIZES = st.integers(1, 700)
LABELS = st.sampled_from(["dog", "", "ünïcödé 猫 🐈", "a\nb\x00", "long " * 60])


@settings(deadline=None, max_examples=many(40))
@given(SIZES, SIZES, LABELS, st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_any_size_and_any_label_can_be_drawn(width: int, height: int, label: str, x: float, y: float) -> None:
    box = [x * width, y * height, x * width + width / 3, y * height + height / 3]
    drawn = draw.detections(grey(width, height), [detection(box, label=label)], (width, height))
    assert drawn.shape[0] * width == drawn.shape[1] * height
    draw.classes(grey(width, height), [Class(label=label, class_id=1, score=0.7)] * 4)
    found = find(np.ones((1, 8, 8), np.float32), Geometry(width, height, 8, 8, 8 / width, 8 / height), 0.5)
    draw.regions(grey(width, height), found, lambda _: label)


@pytest.mark.parametrize(("width", "height"), [(1, 9000), (9000, 1)])
def test_absurd_proportions(width: int, height: int) -> None:
    drawn = draw.detections(grey(width, height), [detection([0, 0, width, height])], (width, height))
    assert drawn.shape == (height, width, 3)


def test_tiny_pictures_are_enlarged_so_that_text_can_be_read() -> None:
    drawn = draw.detections(grey(60, 40), [detection([5, 5, 30, 30])], (60, 40))
    assert drawn.shape == (320, 480, 3)


@pytest.mark.parametrize(("kind", "tolerance"), [("png", 0), ("jpeg", 3), ("webp", 3)])
def test_pictures_as_files(kind: str, tolerance: int) -> None:
    pixels = grey(64, 48)
    pixels[:, 32:] = (200, 30, 40)
    with Image.open(BytesIO(draw.encode(pixels, kind))) as image:
        assert image.format == kind.upper()
        back = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(back - pixels)[:, [8, 56]].max() <= tolerance


def test_what_cannot_be_written() -> None:
    with pytest.raises(InvalidInput, match='not written as "jpg"; did you mean "jpeg"'):
        draw.encode(grey(8, 8), "jpg")
    with pytest.raises(InvalidInput, match="20000 × 1 pixels do not fit into a webp file; ask for png"):
        draw.encode(grey(20_000, 1), "webp")


def test_threads_draw_the_same() -> None:
    found = [detection([200, 150, 400, 300], number, f"thing {number}") for number in range(5)]
    alone = draw.detections(grey(640, 480), found, (640, 480))
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: draw.detections(grey(640, 480), found, (640, 480)), range(12)))
    assert all(np.array_equal(one, alone) for one in drawn)
