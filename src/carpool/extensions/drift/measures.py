"""Defines what is measured of a picture and its answer, in which bins; and counts how much of each was seen
in a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from carpool.core.histogram import Bins, Histogram, Tally

Value: TypeAlias = "float | str | Sequence[float] | Sequence[str]"
Values: TypeAlias = Mapping[str, Value]
"""Of one picture, by measure. Several of one measure share the weight of their picture: what stands together
in a picture is alike, and would look like more evidence than it is."""

PROJECTIONS = 32
_PART = Bins(0.0, 1.0)
_EMBEDDING = {f"embedding-{number:02}": Bins(-4.0, 4.0) for number in range(1, PROJECTIONS + 1)}

MEASURES: Mapping[str, Bins | None] = {
    "size": None,
    "grey": None,
    "brightness": _PART,
    "sharpness": Bins(0.01, 4.0, logarithmic=True),
    "contrast": Bins(0.0, 1.5),
    "bytes": Bins(0.01, 4.0, logarithmic=True),
    "classes": None,
    "boxes": Bins(1.0, 301.0, logarithmic=True),  # one more than there are
    "area": Bins(1e-5, 1.0, logarithmic=True),
    "score": _PART,
    "entropy": _PART,
    **_EMBEDDING,
}
"""Bins, or None for names. In the order of cause and effect: what is dark has fewer bytes and other scores,
but what has other scores need not be dark. An alarm is named by the first of those that are beyond."""

WORDS: Mapping[str, str] = {
    "size": "width × height",
    "grey": "images without colour",
    "brightness": "brightness",
    "contrast": "contrast",
    "sharpness": "sharpness",
    "bytes": "bytes per pixel",
    "classes": "classes answered",
    "boxes": "boxes per image",
    "area": "area of boxes",
    "score": "best score",
    "entropy": "entropy of the classes",
    "embedding": "directions of the embedding",
}

ON_THE_PAGE = (*(name for name in MEASURES if name not in _EMBEDDING), "embedding")
"""Those of the metrics, where the directions of an embedding are one."""

_MOST_VALUES = 100
_LONGEST_NAME = 80


def family(measure: str) -> str:
    return measure.partition("-")[0]


class MeasureCounts:
    """Holds all measures of the pictures of a stretch of time."""

    __slots__ = ("began", "measures", "pictures")

    def __init__(self, began: float) -> None:
        self.began = began
        self.pictures = 0
        self.measures: dict[str, Histogram | Tally] = {}

    def add(self, values: Values) -> None:
        """What is not known, or has no number, is left out."""
        self.pictures += 1
        for measure, value in values.items():
            if measure not in MEASURES:
                continue
            several = value if isinstance(value, list | tuple) else (value,)
            counted = self._of(measure)
            for one in several[:_MOST_VALUES]:
                weight = 1.0 / min(len(several), _MOST_VALUES)
                if isinstance(counted, Tally):
                    counted.add(str(one)[:_LONGEST_NAME], weight)
                elif isinstance(one, int | float):
                    counted.add(one, weight)

    def _of(self, measure: str) -> Histogram | Tally:
        counted = self.measures.get(measure)
        if counted is None:
            bins = MEASURES[measure]
            counted = self.measures[measure] = Tally() if bins is None else Histogram(bins)
        return counted

    def against(self, reference: MeasureCounts, least: int) -> dict[str, float]:
        """How far each measure is from the reference, of those that both have enough pictures for."""
        found = {}
        for measure, counted in self.measures.items():
            before = reference.measures.get(measure)
            if before is None or min(before.total, counted.total) < least:
                continue
            if isinstance(counted, Tally):
                found[measure] = counted.against(before) if isinstance(before, Tally) else 0.0
            elif isinstance(before, Histogram):
                found[measure] = counted.against(before)
        return found

    def fell(self, reference: MeasureCounts, measure: str) -> bool:
        """Returns whether it is lower than in the reference."""
        now, before = self.measures.get(measure), reference.measures.get(measure)
        return isinstance(now, Histogram) and isinstance(before, Histogram) and now.middle < before.middle

    def written(self) -> dict[str, Any]:
        measures = {name: counted.written() for name, counted in self.measures.items()}
        return {"began": self.began, "pictures": self.pictures, "measures": measures}


def read_counts(document: Mapping[str, Any]) -> MeasureCounts:
    """ValueError where it is nothing of that kind; measures that are not known here are left out."""
    try:
        counts = MeasureCounts(float(document["began"]))
        counts.pictures = int(document["pictures"])
        for name, given in dict(document["measures"]).items():
            bins = MEASURES.get(name)
            if bins is not None and isinstance(given, list):
                if len(given) == bins.count:
                    counts.measures[name] = Histogram(bins, given)
            elif name in MEASURES and isinstance(given, dict):
                counts.measures[name] = Tally(given)
        return counts
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the counts of a window: {error}") from None


# ---- what an answer says


def answer_values(answer: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the values of the JSON of an image route, whatever its task."""
    image = answer.get("image") or {}
    area = float(image.get("width") or 0) * float(image.get("height") or 0)
    objects = answer.get("detections", answer.get("masks"))
    if objects is not None:
        shares = [_area(found["box"]) / area for found in objects if area and found.get("box")]
        values: dict[str, Value] = {"boxes": 1.0 + len(objects)}
        if objects:
            values |= {"classes": [str(found.get("label")) for found in objects], "area": shares}
            values |= _scores(objects)
        return values
    classes = answer.get("classes")
    if classes:
        return {"classes": str(classes[0].get("label")), **_scores(classes), **_entropy(classes)}
    return {}


def _area(box: Sequence[float]) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def numbers_of(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """The scores that are numbers: JSON has null for what is none."""
    return [float(one["score"]) for one in found if isinstance(one.get("score"), int | float)]


def _scores(found: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    scores = numbers_of(found)
    return {"score": max(scores)} if scores else {}


_BEST = 5


def _entropy(classes: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Returns the entropy of the best classes and all the others as one, from 0 to 1."""
    scores = [score for score in numbers_of(classes[:_BEST]) if score > 0.0]
    rest = 1.0 - math.fsum(scores)
    if not scores or rest < -0.01:
        return {}  # scores that are no shares of one
    parts = [*scores, rest] if rest > 0.0 else scores
    return {"entropy": -math.fsum(part * math.log(part) for part in parts) / math.log(_BEST + 1)}
