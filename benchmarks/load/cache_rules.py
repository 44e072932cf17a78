"""What tells two frames of a still camera apart, and what does not: three rules, held against each other."""

from __future__ import annotations

import io
from collections.abc import Callable
from statistics import median
from typing import Any

from PIL import Image

from carpool.extensions.cache.similar import perceptual_hash
from carpool.vision.thumbnail import block_change, thumbnail
from load.still_camera import WIDTH, figure, frame

KINDS = ("chelsea.jpg", "wall")
HEIGHTS = (24, 64, 96, 160, 240)
PLACES = (0.2, 0.5, 0.8)  # of the width: where the middle of a figure is
Row = dict[str, Any]


def rows(seeds: int) -> list[Row]:
    """The distance to the frame without anybody, before a photograph and before a plain wall: median, and
    least and most in brackets."""
    cases: dict[str, list[dict[str, float]]] = {
        "noise only": [{}],
        "light 3 % more or less": [{"light": 0.97}, {"light": 1.03}],
    }
    for height in HEIGHTS:
        wide = figure(height).shape[1]
        lefts = [int(place * WIDTH - wide / 2) for place in PLACES]
        cases[f"a person of {height} px"] = [{"height": height, "left": left} for left in lefts]
    found: list[Row] = []
    ways = rules()
    for case, changes in cases.items():
        row: Row = {"part": "rules", "what": case}
        for kind in KINDS:
            empty = frame(kind, 0)
            others = [
                frame(kind, 1 + seed, **change)  # type: ignore[arg-type]
                for change in changes
                for seed in range(seeds)
            ]
            for name, (look, distance) in ways.items():
                before = look(empty)
                seen = [distance(before, look(other)) for other in others]
                short = kind.partition(".")[0]
                row[f"{name}, {short}"] = f"{median(seen):.3g} [{min(seen):.3g}-{max(seen):.3g}]"
        found.append(row)
    return found


def hash_here(data: bytes) -> int:
    small = thumbnail(data)
    assert small is not None
    return perceptual_hash(small)


def rules() -> dict[str, tuple[Callable[[bytes], Any], Callable[[Any, Any], float]]]:
    """How each sees a picture, and how far two of them are from each other."""
    ways: dict[str, tuple[Callable[[bytes], Any], Callable[[Any, Any], float]]] = {
        "block": (thumbnail, block_change),
        "phash here": (hash_here, lambda a, b: (a ^ b).bit_count()),
    }
    try:
        import imagehash
    except ImportError:
        return ways
    for name, way in (("imagehash.phash", imagehash.phash), ("imagehash.dhash", imagehash.dhash)):

        def look(data: bytes, way: Any = way) -> Any:
            return way(Image.open(io.BytesIO(data)))

        ways[name] = look, lambda a, b: a - b
    return ways
