from __future__ import annotations

import base64
import json

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.model import Task
from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.geometry import Geometry
from carpool.vision.mask_regions import from_run_lengths
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import kinds
from carpool.vision.tasks.task import activate
from later import many
from vision.encoders import GEOMETRIES
from vision.models import settings as made_settings
from vision.models import task
from vision.schemas import complaints

SQUARE = Geometry(64, 64, 64, 64, 1.0, 1.0)


def masks(
    outputs: dict[str, Array], toml: str, geometry: Geometry, labels: tuple[str, ...] = (), **options: object
) -> list[tuple[dict[str, object], Array]]:
    """Each mask as answered, and its pixels; PNG and run lengths must agree."""
    made = task({name: array.shape for name, array in outputs.items()}, f"[segment]\n{toml}", labels)
    answered = {
        form: made.answer(outputs, geometry, Options(format=form, **options))  # type: ignore[arg-type]
        for form in ("png", "rle")
    }
    for answer in answered.values():
        assert complaints({"model": "m", "version": "1", **answer}, kinds()[Task.SEGMENT].schema()) == []
        json.dumps(answer, allow_nan=False)
    decoded = []
    for one, other in zip(answered["png"]["masks"], answered["rle"]["masks"], strict=True):
        picture = np.frombuffer(base64.b64decode(one["png"]), np.uint8)
        pixels = cv2.imdecode(picture, cv2.IMREAD_UNCHANGED) > 0
        assert other["rle"]["size"] == [geometry.height, geometry.width] == list(pixels.shape)
        assert np.array_equal(from_run_lengths(other["rle"]["counts"], *pixels.shape), pixels)
        assert [one[key] for key in ("label", "score", "box")] == [
            other[key] for key in ("label", "score", "box")
        ]
        decoded.append((one, pixels))
    return decoded


def blob(geometry: Geometry, box: tuple[float, float, float, float]) -> Array:
    """A map of the input, 1 inside this box of the picture, at the input's resolution."""
    x1, y1, x2, y2 = box
    left, right = (x * geometry.scale_x + geometry.left for x in (x1, x2))
    top, bottom = (y * geometry.scale_y + geometry.top for y in (y1, y2))
    across = np.arange(geometry.input_width) + 0.5
    down = np.arange(geometry.input_height) + 0.5
    inside = ((down > top) & (down < bottom))[:, None] & ((across > left) & (across < right))
    return inside.astype(np.float32)


@settings(deadline=None, max_examples=many(60))
@given(st.integers(40, 900), st.integers(40, 900), st.sampled_from(sorted(GEOMETRIES)), st.booleans())
def test_a_mask_comes_back_where_it_was(width: int, height: int, mode: str, flat: bool) -> None:
    """Within the pixels that one of the map covers; what was cropped away is in no mask."""
    geometry = GEOMETRIES[mode](width, height, 320, 256)
    box = (0.2 * width, 0.25 * height, 0.7 * width, 0.8 * height)
    maps = blob(geometry, box)
    ((mask, pixels),) = masks({"y": maps if flat else maps[None]}, "", geometry)
    assert mask["label"] == "foreground"
    x1, y1, x2, y2 = geometry.to_picture(np.array([[0, 0, 320, 256]], np.float32))[0].tolist()
    expected = (max(box[0], x1), max(box[1], y1), min(box[2], x2), min(box[3], y2))
    slack = 1.0 + max(1 / geometry.scale_x, 1 / geometry.scale_y)
    assert mask["box"] == pytest.approx(expected, abs=slack)
    assert not pixels[:, : max(0, int(expected[0] - slack))].any()
    area = (expected[2] - expected[0]) * (expected[3] - expected[1])
    around = 2 * slack * (expected[2] - expected[0] + expected[3] - expected[1]) + 4 * slack * slack
    assert abs(int(pixels.sum()) - area) <= around
    columns, rows = np.flatnonzero(pixels.any(axis=0)), np.flatnonzero(pixels.any(axis=1))
    assert mask["box"] == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def test_classes_share_the_picture() -> None:
    maps = np.zeros((3, 64, 64), np.float32)
    maps[0] = 1.0
    maps[1, 10:30, 10:30] = 5.0
    maps[2, 40:60, 20:50] = 9.0
    found = masks({"y": maps}, "", SQUARE, ("background", "cat", "dog"))
    assert [mask["label"] for mask, _ in found] == ["dog", "cat"]
    assert [mask["class_id"] for mask, _ in found] == [2, 1]
    assert found[0][0]["box"] == [20.0, 40.0, 50.0, 60.0]
    assert found[1][0]["box"] == [10.0, 10.0, 30.0, 30.0]
    assert found[0][1].sum() == 600
    assert not (found[0][1] & found[1][1]).any()
    every = masks({"y": maps}, "", SQUARE)
    assert sum(int(pixels.sum()) for _, pixels in every) == 64 * 64
    assert len(masks({"y": maps}, "background = 2", SQUARE)) == 2


def test_the_score_is_the_mean_probability_inside() -> None:
    maps = np.zeros((1, 64, 64), np.float32)
    maps[0, :, 32:] = 0.75
    ((mask, pixels),) = masks({"y": maps}, "threshold = 0.7", SQUARE)
    assert mask["score"] == 0.75
    assert pixels.sum() == 32 * 64


def test_thresholds_of_the_model_and_of_the_request() -> None:
    maps = np.full((1, 64, 64), 0.4, np.float32)
    assert masks({"y": maps}, "", SQUARE) == []
    assert len(masks({"y": maps}, "", SQUARE, threshold=0.3)) == 1
    assert len(masks({"y": maps}, "threshold = 0.2", SQUARE)) == 1
    assert masks({"y": maps}, "threshold = 0.2", SQUARE, score=0.5) == []


def test_maps_that_do_not_exclude_each_other_need_the_threshold() -> None:
    maps = np.full((2, 64, 64), -3.0, np.float32)
    maps[1, :10] = 3.0
    ((mask, pixels),) = masks({"y": maps}, 'activation = "sigmoid"', SQUARE)
    assert (mask["class_id"], int(pixels.sum())) == (1, 640)
    assert len(masks({"y": maps}, 'activation = "softmax"', SQUARE)) == 2


def test_minmax_spreads_what_there_is() -> None:
    maps = np.linspace(0.1, 0.2, 64 * 64, dtype=np.float32).reshape(1, 64, 64)
    ((_, pixels),) = masks({"y": maps}, 'activation = "minmax"', SQUARE)
    assert int(pixels.sum()) == pytest.approx(2048, abs=64)
    assert masks({"y": np.full((1, 64, 64), 0.7, np.float32)}, 'activation = "minmax"', SQUARE) == []


def test_where_channels_come_last_so_do_classes() -> None:
    maps = np.zeros((64, 64, 2), np.float32)
    maps[:20, :, 1] = 1.0
    made = made_settings({"y": (64, 64, 2)}, "[segment]", (), (64, 64, 3))
    answer = tasks.build(made).answer({"y": maps}, SQUARE, Options())
    assert sorted(mask["box"] for mask in answer["masks"]) == [
        [0.0, 0.0, 64.0, 20.0],
        [0.0, 20.0, 64.0, 64.0],
    ]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "minmax", "none"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_does_no_harm(activation: str, poison: float) -> None:
    random = np.random.default_rng(5)
    maps = random.normal(0, 3, (3, 64, 64)).astype(np.float32)
    maps[random.random(maps.shape) < 0.1] = poison
    probabilities = activate(maps, activation, np.float32)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    masks({"y": maps}, f'activation = "{activation}"', SQUARE)


@pytest.mark.parametrize("activation", ["sigmoid", None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_that_is_not_a_number_changes_none_of_the_others(activation: str | None, dtype: type) -> None:
    """All of them are put in order then; without it they are taken as they are, to the last bit."""
    values = np.float32([-0.0, 0.0, 0.25, 1.5, -3.0, 1e38, -1e38, 1e-40])
    alone = activate(values, activation, dtype)
    for poison in (np.nan, np.inf, -np.inf):
        beside = activate(np.append(values, np.float32(poison)), activation, dtype)
        assert beside[:-1].tobytes() == alone.tobytes()


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 3000), (5000, 2), (3000, 2500)])
def test_odd_and_large_pictures(width: int, height: int) -> None:
    geometry = GEOMETRIES["stretch"](width, height, 64, 64)
    maps = np.ones((1, 64, 64), np.float32)
    ((mask, pixels),) = masks({"y": maps}, "", geometry)
    assert mask["box"] == [0.0, 0.0, width, height]
    assert pixels.all()
