"""One vector of class values → the best classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.config.model import ClassifySettings
from carpool.types import Array
from carpool.vision import draw
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.vision.results import Class, Classes
from carpool.vision.settings import VisionSettings
from carpool.vision.tasks.task import SCORE_DIGITS, read_floats, size


class Classify:
    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, ClassifySettings)
        self._settings = settings
        self._activation = settings.table.activation
        self._output = settings.outputs[0]

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        found = Classes(image=size(geometry), classes=self._classes(outputs, options))
        return dict(found)

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        return draw.classes(pixels, self._classes(outputs, options))

    def _classes(self, outputs: Mapping[str, Array], options: Options) -> list[Class]:
        scores = activate(read_floats(outputs, self._output).reshape(-1), self._activation)
        best = best_first(scores, options.top_k)
        least, label = options.score or 0.0, self._settings.label
        return [
            {"label": label(class_id), "class_id": class_id, "score": round(score, SCORE_DIGITS)}
            for class_id, score in zip(best.tolist(), scores[best].tolist(), strict=True)
            if score >= least
        ]


def best_first(scores: Array, most: int) -> Array:
    """Where the highest scores are, equal ones in the order given; sorting all of them takes much longer."""
    if most >= len(scores):
        return (-scores).argsort(kind="stable")
    parted = scores.copy()
    parted.partition(len(scores) - most)
    near = (scores >= parted[len(scores) - most]).nonzero()[0]
    best: Array = near[(-scores[near]).argsort(kind="stable")[:most]]
    return best


def activate(values: Array, activation: str | None) -> Array:
    """Values over the first dimension → scores; what is not a number scores nothing."""
    wide = values.astype(np.float64)
    if activation == "softmax" and wide.ndim == 1 and len(wide):
        top = wide.max()
        if math.isfinite(top):  # then nothing is out of order; what is −∞ scores nothing by itself
            wide -= top
            scores: Array = np.exp(wide, out=wide)
            scores /= scores.sum()
            return scores
    wide = np.nan_to_num(wide, nan=-1e300, posinf=1e300, neginf=-1e300)
    if activation == "softmax":
        grown: Array = np.exp(wide - wide.max(axis=0, initial=-1e300))
        grown /= grown.sum(axis=0)
        return grown
    if activation == "sigmoid":
        return sigmoid(wide)
    return np.clip(wide, 0.0, 1.0)


def sigmoid(values: Array) -> Array:
    """1 ÷ (1 + e^−x), in the form that never overflows."""
    result: Array = 0.5 * np.tanh(0.5 * values) + 0.5
    return result
