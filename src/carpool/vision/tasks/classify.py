"""One vector of class values → the best classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import ClassifySettings, Task
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import OVERLAY, SCORE, TOP_K, Class, Classes, Option, Options
from carpool.vision.tasks.task import SCORE_DIGITS, VisionTask, activate, read_floats, size
from carpool.vision.vision_settings import VisionSettings


class Classify(VisionTask):
    name = Task.CLASSIFY
    route, summary = Task.CLASSIFY.route, "Classify an image"
    form, title = Classes, "Classes of the image"
    example: ClassVar[Mapping[str, Any]] = {
        "classes": [
            {"label": "espresso", "class_id": 967, "score": 0.951204},
            {"label": "cup", "class_id": 968, "score": 0.018331},
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {"top_k": TOP_K, "score": SCORE, "overlay": OVERLAY}
    table = ClassifySettings
    needs = "an output [classes] of floats"
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, ClassifySettings)
        self._settings = settings
        self._activation = settings.table.activation
        self._output = settings.outputs[0]

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(Classes(image=size(geometry), classes=self._classes(outputs, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        return draw.classes(pixels, self._classes(outputs, options))

    def _classes(self, outputs: Mapping[str, Array], options: Options) -> list[Class]:
        scores = activate(read_floats(outputs, self._output).reshape(-1), self._activation, np.float64)
        best = best_first(scores, options.top_k)
        least, numbers = options.score or 0.0, best.tolist()
        names = self._settings.labels  # a class without one is called by its number
        known = len(names)
        found: list[Class] = []
        for class_id, score in zip(numbers, scores[best].tolist(), strict=True):
            if score >= least:
                label = (names[class_id] if class_id < known else "") or str(class_id)
                found.append({"label": label, "class_id": class_id, "score": round(score, SCORE_DIGITS)})
        return found


def best_first(scores: Array, most: int) -> Array:
    """Where the highest scores are, equal ones in the order given; sorting all of them takes much longer."""
    if most >= len(scores):
        return (-scores).argsort(kind="stable")
    parted = scores.copy()
    parted.partition(len(scores) - most)
    near = (scores >= parted[len(scores) - most]).nonzero()[0]
    best: Array = near[(-scores[near]).argsort(kind="stable")[:most]]
    return best
