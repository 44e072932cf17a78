"""One vector of class values → the best classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import ClassifySettings, Task
from carpool.types import Array, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import OVERLAY, SCORE, TOP_K, Class, Classes, Option, Options
from carpool.vision.tasks.task import (
    SCORE_DIGITS,
    LoadedModel,
    Verdict,
    VisionSettings,
    VisionTask,
    activate,
    activation_in_words,
    holds_probabilities,
    length,
    read_floats,
    size,
)

_IMAGENET = 1000  # classes


class Classify(VisionTask):
    name = Task.CLASSIFY
    route, summary = "/classify", "Say what a picture shows"
    form, title = Classes, "What the picture shows"
    example: ClassVar[Mapping[str, Any]] = {
        "classes": [
            {"label": "espresso", "class_id": 967, "score": 0.951204},
            {"label": "cup", "class_id": 968, "score": 0.018331},
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {"top_k": TOP_K, "score": SCORE, "overlay": OVERLAY}
    table = ClassifySettings
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, ClassifySettings)
        self._settings = settings
        self._activation = settings.table.activation
        self._output = settings.outputs[0]

    @classmethod
    def recognise(cls, model: LoadedModel) -> Verdict | None:
        if len(model.outputs) != 1 or length(model.outputs[0]) != (len(model.labels) or _IMAGENET):
            return None
        return Verdict(20, f"one output {list(model.outputs[0].shape)}{model.counted_labels()}")

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[ClassifySettings, tuple[TensorSpec, ...]]:
        vectors = [spec for spec in model.outputs if length(spec) is not None]
        vectors.sort(key=lambda spec: length(spec) != len(model.labels))
        if not vectors:
            raise model.cannot(cls.name, "an output [classes] of floats")
        chosen = vectors[0]
        model.note_labels(length(chosen) or 0)
        table = model.config.classify or ClassifySettings()
        if table.activation is None:
            table = replace(table, activation="none" if holds_probabilities(chosen) else "softmax")
            model.notes.append(
                f'scores are {activation_in_words(table.activation)} output "{chosen.name}", by its name'
            )
        return table, (chosen,)

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
        labels = self._settings.labels_of(numbers)
        return [
            {"label": label, "class_id": class_id, "score": round(score, SCORE_DIGITS)}
            for label, class_id, score in zip(labels, numbers, scores[best].tolist(), strict=True)
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
