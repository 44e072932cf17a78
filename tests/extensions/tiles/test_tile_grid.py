"""Where tiles are, against sahi's own list for the same sizes, and what is each tile's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.extensions.tiles.settings import TileSettings
from carpool.extensions.tiles.tile_grid import MOST_TILES, along, grid, parts_of


@pytest.mark.parametrize(
    ("length", "size", "overlap", "expected"),
    [
        (1000, 640, 0.2, [(0, 640), (360, 1000)]),
        (1280, 512, 0.2, [(0, 512), (410, 922), (768, 1280)]),
        (640, 640, 0.2, [(0, 640)]),
        (641, 640, 0.2, [(0, 640), (1, 641)]),
        (300, 640, 0.2, [(0, 300)]),  # smaller than a tile: all of it
        (100, 40, 0.0, [(0, 40), (40, 80), (60, 100)]),
        (1152, 640, 0.2, [(0, 640), (512, 1152)]),  # they fit exactly
    ],
)
def test_along_one_side(length: int, size: int, overlap: float, expected: list[tuple[int, int]]) -> None:
    assert along(length, size, overlap) == expected


@given(
    length=st.integers(1, 5000),
    size=st.integers(32, 2000),
    overlap=st.floats(0.0, 0.9),
)
def test_tiles_have_every_pixel_and_one_size(length: int, size: int, overlap: float) -> None:
    tiles = along(length, size, overlap)
    assert tiles[0][0] == 0
    assert tiles[-1][1] == length
    assert {end - start for start, end in tiles} == {min(size, length)}
    assert all(start <= end for (_, end), (start, _) in pairwise(tiles))


def test_row_by_row_and_the_whole_first() -> None:
    settings = TileSettings(size=100, overlap=0.0)
    parts = parts_of(200, 150, settings)
    assert [part[:4] for part in parts] == [
        (0, 0, 200, 150),
        *((0, 0, 100, 100), (100, 0, 200, 100), (0, 50, 100, 150), (100, 50, 200, 150)),
    ]


def test_one_tile_has_no_whole_beside_it() -> None:
    assert [part[:4] for part in parts_of(80, 60, TileSettings(size=100))] == [(0, 0, 80, 60)]


def test_each_pixel_is_one_tiles_own() -> None:
    count = 0
    for part in grid(230, 170, TileSettings(size=100, overlap=0.3)):
        left, top, right, bottom = part.own
        assert part.left <= left < right <= part.right
        assert part.top <= top < bottom <= part.bottom
        count += (right - left) * (bottom - top)
    assert count == 230 * 170


def test_too_many_tiles() -> None:
    with pytest.raises(InvalidInput, match=f"more than the {MOST_TILES} allowed") as error:
        grid(7000, 7000, TileSettings(size=200))
    assert error.value.field == "tile"
