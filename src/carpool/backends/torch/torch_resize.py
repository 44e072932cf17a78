"""Pictures of any size into rows of the input, in plain torch: on a CPU, or without the fused kernel.

Every kernel is a weighted sum along each side, so that resizing is two matrix products. The sums are exact:
the results differ from those of the CPU's way only where the two round to neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from carpool.backends.picture_form import PictureForm, Place, Placed
from carpool.types import Array

_MOST_WEIGHT_BYTES = 64 << 20  # kept for sizes that come again
_MOST_PIXELS = 1 << 24  # held as floats at a time


def weights(kernel: str, source: int, target: int) -> Array:
    """[target, source]: how much each pixel of one side counts in each of the other."""
    step = source / target
    index, pixel = np.arange(target)[:, None], np.arange(source)[None, :]
    if kernel == "area":
        shares = np.minimum((index + 1) * step, pixel + 1) - np.maximum(index * step, pixel)
        shares = np.maximum(shares, 0.0)
        table: Array = shares / shares.sum(axis=1, keepdims=True)
        return table.astype(np.float32)
    centre = (index + 0.5) * step - 0.5
    if kernel == "bilinear":
        near = np.clip(centre, 0, source - 1)
        table = np.maximum(1.0 - np.abs(near - pixel), 0.0)
        return table.astype(np.float32)
    table = np.zeros((target, source))
    first = np.floor(centre).astype(np.int64)
    for tap in range(-1, 3):
        at = np.clip(first + tap, 0, source - 1)
        np.add.at(table, (index, at), _cubic(np.abs(centre - (first + tap))))
    return table.astype(np.float32)


def _cubic(distance: Array) -> Array:
    """Cubic convolution with a = −0.75."""
    a, d = -0.75, distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


class PlainResize:
    """Pictures of one size go together."""

    def __init__(self, form: PictureForm, device: torch.device, place: Place) -> None:
        self._form = form
        self._device = device
        self._place = place
        self._weights: dict[tuple[str, int, int], torch.Tensor] = {}
        self._held = 0

    def __call__(self, sources: Sequence[torch.Tensor], rows: Sequence[int], into: torch.Tensor) -> None:
        """Sources are uint8 [3, h, w], each for the row of `into` with its number."""
        alike: dict[torch.Size, list[int]] = defaultdict(list)
        for number, source in enumerate(sources):
            alike[source.shape].append(number)
        for shape, numbers in alike.items():
            place = self._place(shape[2], shape[1])
            together = max(1, _MOST_PIXELS // (shape[1] * shape[2]))
            for start in range(0, len(numbers), together):
                some = numbers[start : start + together]
                pictures = torch.stack([sources[number] for number in some])
                self._fill(pictures, place, [rows[number] for number in some], into)

    def _fill(self, pictures: torch.Tensor, place: Placed, rows: Sequence[int], into: torch.Tensor) -> None:
        bottom, right = place.top + place.height, place.left + place.width
        part = pictures[:, :, place.top : bottom, place.left : right].float()
        high = self._weight(place.kernel, place.height, place.into_height)
        wide = self._weight(place.kernel, place.width, place.into_width)
        small = (high @ part @ wide.T).round_().clamp_(0, 255).to(torch.uint8)
        form = self._form
        if form.bgr:
            small = small.flip(1)
        whole = torch.full(
            (len(rows), 3, form.height, form.width), form.pad, dtype=torch.uint8, device=self._device
        )
        bottom, right = place.into_top + place.into_height, place.into_left + place.into_width
        whole[:, :, place.into_top : bottom, place.into_left : right] = small
        chosen = torch.tensor(rows, device=self._device)
        into[chosen] = whole if form.planar else whole.permute(0, 2, 3, 1)

    def _weight(self, kernel: str, source: int, target: int) -> torch.Tensor:
        key = (kernel, source, target)
        found = self._weights.get(key)
        if found is None:
            if self._held > _MOST_WEIGHT_BYTES:
                self._weights.clear()
                self._held = 0
            found = torch.from_numpy(weights(*key)).to(self._device)
            self._weights[key] = found
            self._held += found.nbytes
        return found
