"""Finds the layers that lose most in lower precision: each is quantized alone, and the error of the whole
network's outputs is what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from carpool.backends.agreement import how_far
from carpool.errors import CarpoolError
from carpool.extensions.optimize.lower_precision import OnnxQuantizer
from carpool.types import Array

Answers: TypeAlias = Sequence[Mapping[str, Array]]
Run: TypeAlias = Callable[[Path], Answers]
"""Returns what the file answers to a few pictures."""

_LEVELS = (0.7, 0.45, 0.25)
"""Shares of the error of a network that is quantized whole: each is one form with some layers kept."""


def error(right: Answers, found: Answers) -> float:
    """Returns the error of the output that is furthest off, in the mean of the pictures."""
    names = right[0].keys() if right else ()
    off = [
        sum(how_far(one[name], other[name]) for one, other in zip(right, found, strict=True)) / len(right)
        for name in names
        if right[0][name].dtype.kind == "f"
    ]
    return max(off, default=0.0)


class LayerSearch:
    """Searches the layers of one network. `run` opens a file and answers a few pictures with it."""

    def __init__(
        self,
        quantizer: OnnxQuantizer,
        right: Answers,
        run: Run,
        file: Path,
        *,
        seconds: float,
        now: Callable[[], float] = monotonic,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._quantizer, self._right, self._run, self._file = quantizer, right, run, file
        self._seconds, self._now, self._tell = seconds, now, tell
        self.searched = 0  # layers that were tried before the time was over

    def sensitive(self) -> list[tuple[str, float]]:
        """Returns the layers with the error that each alone makes, the worst first. Those for which there was
        no time are left out. The last ones are tried first: outputs are more often spoilt near the end."""
        found: list[tuple[str, float]] = []
        end = self._now() + self._seconds
        layers = self._quantizer.layers
        for number, layer in enumerate(reversed(layers), 1):
            if self._now() > end:
                break
            self._tell(f"searching sensitive layers: {number} of {len(layers)}")
            found.append((layer, self._error_of(only=(layer,))))
            self.searched = number
        return sorted(found, key=lambda one: -one[1])

    def levels(self, worst: Sequence[str]) -> list[tuple[str, ...]]:
        """Returns choices of layers to keep, each with clearly less error than the one before."""
        whole = self._error_of()
        chosen: list[tuple[str, ...]] = []
        left = list(_LEVELS)
        most, count = len(worst) // 2, 1
        while left and count <= most and whole > 0:
            self._tell(f"keeping {count} sensitive layers")
            off = self._error_of(kept=worst[:count])
            # Where all layers lose alike, no few of them stand out: half of them are tried all the same.
            if off <= left[0] * whole or count == most:
                chosen.append(tuple(worst[:count]))
                while left and off <= left[0] * whole:
                    left.pop(0)
            count = count + 1 if count == most else min(2 * count, most)
        return chosen

    def _error_of(self, *, kept: Sequence[str] = (), only: Sequence[str] = ()) -> float:
        try:
            self._quantizer.write(self._file, kept=kept, only=only)
            return error(self._right, self._run(self._file))
        except CarpoolError:  # it cannot be quantized so, or not be opened: the layer is kept
            return inf
