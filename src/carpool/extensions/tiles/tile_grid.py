"""Says where the tiles of an image are. Arithmetic only."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from carpool.errors import InvalidInput
from carpool.extensions.tiles.settings import TILE, TileSettings

MOST_TILES = 1024
"""Of one image."""


class Part(NamedTuple):
    """Describes a rectangle of the image, in whole pixels. `own` is the part of it that no other tile has:
    neighbours meet in the middle of what they share."""

    left: int
    top: int
    right: int
    bottom: int
    own: tuple[int, int, int, int]

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top


def along(length: int, size: int, overlap: float) -> list[tuple[int, int]]:
    """Returns where tiles begin and end along one side of an image. The last one ends with the image and is
    as long as the others, so that it may share more with the one before."""
    shared = int(overlap * size)
    found, start = [], 0
    while True:
        end = start + size
        if end >= length:
            found.append((max(0, length - size), length))
            return found
        found.append((start, end))
        start = end - shared


def grid(width: int, height: int, settings: TileSettings) -> list[Part]:
    """Returns the tiles, row by row."""
    columns = along(width, settings.size, settings.overlap)
    rows = along(height, settings.size, settings.overlap)
    if len(columns) * len(rows) > MOST_TILES:
        why = f"{width}×{height} pixels are {len(columns) * len(rows)} tiles of {settings.size} pixels"
        raise InvalidInput(f"{why}, more than the {MOST_TILES} allowed: ask for larger ones", field=TILE)
    return [
        Part(left, top, right, bottom, (own_left, own_top, own_right, own_bottom))
        for (top, bottom), (own_top, own_bottom) in zip(rows, _apart(rows), strict=True)
        for (left, right), (own_left, own_right) in zip(columns, _apart(columns), strict=True)
    ]


def parts_of(width: int, height: int, settings: TileSettings) -> list[Part]:
    """Returns everything that the model is asked about: the whole image, if there is more than one tile and
    it is wanted, and the tiles."""
    tiles = grid(width, height, settings)
    whole = Part(0, 0, width, height, (0, 0, width, height))
    return [whole, *tiles] if settings.whole and len(tiles) > 1 else tiles


def _apart(tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same tiles without what they share."""
    middles = [(end + start) // 2 for (_, end), (start, _) in pairwise(tiles)]
    return list(zip([tiles[0][0], *middles], [*middles, tiles[-1][1]], strict=True))
