"""What the decoder on a device has to know of a model's input and of one picture. Numbers only: no pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from carpool.types import Array


class Placed(NamedTuple):
    """A rectangle of the picture fills one of the input, its pixels mixed by `kernel`."""

    left: int
    top: int
    width: int
    height: int
    into_left: int
    into_top: int
    into_width: int
    into_height: int
    kernel: str  # area, bilinear or bicubic


Place: TypeAlias = Callable[[int, int], Placed]
"""Takes the width and height of a picture."""

Decode: TypeAlias = Callable[[Array], Array]
"""A file's bytes to upright RGB pixels [h, w, 3], on the CPU; raises what is wrong with the file."""


@dataclass(frozen=True, slots=True)
class PictureForm:
    """The input as a picture of three channels."""

    height: int
    width: int
    planar: bool  # [3, h, w], else [h, w, 3]
    bgr: bool = False
    pad: int = 114  # what is left free
