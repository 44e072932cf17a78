"""Maps over the input become masks over the picture exactly as the slow way says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.mask_regions import NOTHING, find
from later import many
from vision.encoders import GEOMETRIES


def sample(one: Array, geometry: Geometry, x: float, y: float) -> float:
    """Bilinear, at a point of the picture; beyond the map its edge goes on."""
    height, width = one.shape
    across = (x * geometry.scale_x + geometry.left) * width / geometry.input_width - 0.5
    down = (y * geometry.scale_y + geometry.top) * height / geometry.input_height - 0.5
    left, top = int(np.floor(across)), int(np.floor(down))
    right_share, bottom_share = across - left, down - top
    total = 0.0
    for row, row_share in ((top, 1 - bottom_share), (top + 1, bottom_share)):
        for column, share in ((left, 1 - right_share), (left + 1, right_share)):
            value = one[min(max(row, 0), height - 1), min(max(column, 0), width - 1)]
            total += float(value) * row_share * share
    return total


@settings(deadline=None, max_examples=many(40))
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(sorted(GEOMETRIES)),
    st.integers(1, 4),
    st.integers(0, 999),
)
def test_every_pixel_is_what_the_slow_way_says(
    width: int, height: int, mode: str, classes: int, seed: int
) -> None:
    geometry = GEOMETRIES[mode](width, height, 32, 24)
    maps = np.random.default_rng(seed).uniform(0, 1, (classes, 12, 16)).astype(np.float32)
    found = find(maps, geometry, 0.5)
    present = sorted(set(maps.argmax(axis=0).reshape(-1).tolist()))
    for y in range(height):
        for x in range(width):
            values = {c: sample(maps[c], geometry, x + 0.5, y + 0.5) for c in present}
            best, second = sorted([*values.values(), 0.0], reverse=True)[:2]
            if best - second < 0.03 or abs(best - 0.5) < 0.03:
                continue  # OpenCV places points to a 32nd of a pixel
            inside_x = 0.01 < (x + 0.5) * geometry.scale_x + geometry.left < 31.99
            inside_y = 0.01 < (y + 0.5) * geometry.scale_y + geometry.top < 23.99
            expected = max(values, key=values.__getitem__) if best >= 0.5 else NOTHING
            if inside_x and inside_y:
                assert found.index[y, x] == expected


def test_what_was_cropped_away_belongs_to_none() -> None:
    geometry = GEOMETRIES["crop"](300, 100, 64, 64)
    found = find(np.ones((1, 64, 64), np.float32), geometry, 0.5)
    (region,) = found.found
    assert region.box == (100, 0, 200, 100)
    assert found.mask(region)[:, 100:200].all()
    assert found.mask(region).sum() == 100 * 100


def test_large_pictures_are_decided_on_a_coarser_grid() -> None:
    geometry = GEOMETRIES["stretch"](6000, 5000, 64, 64)
    maps = np.zeros((1, 64, 64), np.float32)
    maps[0, 16:48, 32:] = 1.0
    found = find(maps, geometry, 0.5)
    assert found.index.size <= 1 << 22
    (region,) = found.found
    assert region.box == pytest.approx((3000, 1250, 6000, 3750), abs=5)
    mask = found.mask(region)
    assert mask.shape == (5000, 6000)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    assert region.box == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


def test_the_best_come_first() -> None:
    maps = np.zeros((3, 8, 8), np.float32)
    maps[0, :2], maps[1, 2:5], maps[2, 5:] = 0.6, 0.9, 0.7
    found = find(maps, Geometry(8, 8, 8, 8, 1.0, 1.0), 0.5)
    assert [region.class_id for region in found.found] == [1, 2, 0]
    assert [region.score for region in found.found] == pytest.approx([0.9, 0.7, 0.6])
