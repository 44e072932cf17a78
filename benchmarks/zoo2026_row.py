"""What a row of zoo2026.py is: a family's file, and the family's own code for pixels and for outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from carpool.types import Array

Processor: TypeAlias = Callable[[Image.Image, int, int], Array]
"""Takes a photo, and the input's height and width; returns the input, [channels, height, width]."""
Own: TypeAlias = Callable[[Mapping[str, Array], tuple[int, int], tuple[int, int]], Any]
"""Takes outputs of one picture, the photo's width and height, and the input's height and width."""


@dataclass(frozen=True)
class Row:
    number: int
    family: str
    made: str  # by what
    write: Callable[[Path], Path]  # into a folder
    task: str | None  # None: nothing but tensors can ask it
    processor: Processor | None = None
    own: Own | None = None
    says: str = ""  # of one that tensors ask: what its sentence has in it

    @property
    def decoded(self) -> bool:
        return self.own is not None
