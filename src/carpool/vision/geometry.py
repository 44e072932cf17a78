"""How a picture was laid into the model's input, and the way back to its own pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from carpool.types import Array


@dataclass(frozen=True, slots=True)
class Geometry:
    """A point (x, y) of the upright picture lies at (x × scale_x + left, y × scale_y + top) in the input.

    `left` and `top` are negative where the picture was cropped. Coordinates are of edges, not of centres: the
    picture reaches from 0 to its width.
    """

    width: int  # of the picture, upright, before any reduced decoding
    height: int
    input_width: int
    input_height: int
    scale_x: float
    scale_y: float
    left: float = 0.0
    top: float = 0.0

    def to_picture(self, boxes: Array) -> Array:
        """Boxes [n, 4] as x1, y1, x2, y2 in input pixels → in the picture's pixels, cut at its edges."""
        offset = np.array([self.left, self.top] * 2, np.float32)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        limits = np.array([self.width, self.height] * 2, np.float32)
        moved: Array = np.clip((boxes - offset) / scale, 0.0, limits)
        return moved

    @property
    def area(self) -> tuple[float, float, float, float]:
        """Where the whole picture lies in the input: x1, y1, x2, y2, beyond its edges where cropped."""
        right = self.left + self.width * self.scale_x
        bottom = self.top + self.height * self.scale_y
        return self.left, self.top, right, bottom
