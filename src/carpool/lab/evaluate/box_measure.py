"""Boxes against COCO's annotations: mAP by faster-coco-eval. Boxes are matched once more here, so that
the same figure can be had for any weighted choice of the pictures: a bootstrap needs hundreds of those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from carpool.errors import ConfigError, InvalidInput
from carpool.lab.evaluate.labelled_data import Boxes
from carpool.lab.evaluate.scores import Naming, Scored
from carpool.types import Array
from carpool.vision.python_pictures import Answer, Detections

_MOST_BOXES = 100  # of a picture and class that COCO looks at


class Kept(NamedTuple):
    """Holds boxes of a picture in classes of the data: [n, 4] as x, y, width, height, and [n] each."""

    boxes: Array
    scores: Array
    categories: Array


class BoxMeasure:
    task = "detect"

    def __init__(self, data: Boxes, names: Mapping[str, str], score: float, iou: float | None) -> None:
        _library()
        self.files = data.files
        self.options: Mapping[str, Any] = {
            "score": score,
            "max_detections": 3 * _MOST_BOXES,
            **({} if iou is None else {"iou": iou}),
        }
        self._data = data
        self._ids = [one["id"] for one in data.document["categories"]]
        self._naming = Naming([one["name"] for one in data.document["categories"]], names)

    def read(self, place: int, answer: Answer) -> Kept:  # noqa: ARG002
        if not isinstance(answer, Detections):
            raise InvalidInput(f"the model answers {', '.join(answer)}, not boxes", field="data")
        places = [self._naming.place(label) for label in answer.labels]
        known = np.array([place is not None for place in places], np.bool_)
        boxes = answer.boxes.astype(np.float64)[known] if len(places) else np.zeros((0, 4))
        boxes[:, 2:] -= boxes[:, :2]
        ids = np.array([self._ids[place] for place in places if place is not None], np.int64)
        return Kept(boxes, answer.scores.astype(np.float64)[known], ids)

    def scored(self, kept: Sequence[Kept], places: Sequence[int]) -> Scored:
        images = [self._data.image_ids[place] for place in places]
        evaluator = _evaluator(self._data.document, kept, images)
        precision = np.asarray(evaluator.eval["precision"])[:, :, :, 0, -1]  # [thresholds, recalls, classes]
        annotations = self._data.document["annotations"]
        chosen = set(images)
        there = {
            one["category_id"] for one in annotations if one["image_id"] in chosen and not one["iscrowd"]
        }
        names = {one["id"]: one["name"] for one in self._data.document["categories"]}
        per_class = {
            names[category]: float(precision[:, :, column].mean())
            for column, category in enumerate(evaluator.params.catIds)
            if category in there
        }
        sound = precision > -1
        figures = {
            "mAP": _mean(precision[sound]),
            "mAP50": _mean(precision[0][sound[0]]),
            "mAP75": _mean(precision[5][sound[5]]),
        }
        wanted = [place for place, category in enumerate(self._ids) if category in there]
        groups = _grouped(annotations, kept, images)
        matched = [_matched(evaluator, category, images, groups) for category in evaluator.params.catIds]
        rankings = [one for one in matched if one.present.any()]
        return Scored(figures, per_class, self._naming.notes(wanted), partial(_mean_precision, rankings))


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else 0.0


def _library() -> Any:
    try:
        import faster_coco_eval
    except ImportError:
        raise ConfigError(
            "mAP needs the package faster-coco-eval: pip install 'carpool[evaluate]'", field="data"
        ) from None
    return faster_coco_eval


def _evaluator(document: Mapping[str, Any], kept: Sequence[Kept], images: Sequence[int]) -> Any:
    library = _library()
    truth = library.COCO({**document, "annotations": [dict(one) for one in document["annotations"]]})
    found = truth.loadRes(list(_results(kept, images)))
    evaluator = library.COCOeval_faster(truth, found, "bbox")
    evaluator.params.imgIds = list(images)
    evaluator.evaluate()
    evaluator.accumulate()
    return evaluator


def _results(kept: Sequence[Kept], images: Sequence[int]) -> Iterator[dict[str, Any]]:
    for image, (boxes, scores, categories) in zip(images, kept, strict=True):
        for box, score, category in zip(boxes.tolist(), scores.tolist(), categories.tolist(), strict=True):
            yield {"image_id": image, "category_id": category, "bbox": box, "score": score}


# ---- the same figure for a weighted choice of pictures


_Groups: TypeAlias = Mapping[tuple[int, int], tuple[list[bool], list[float]]]
"""By picture and class: of each object whether it is a crowd, and of each box how sure it is."""


def _grouped(
    annotations: Sequence[Mapping[str, Any]], kept: Sequence[Kept], images: Sequence[int]
) -> _Groups:
    groups: defaultdict[tuple[int, int], tuple[list[bool], list[float]]] = defaultdict(lambda: ([], []))
    for one in annotations:
        groups[one["image_id"], one["category_id"]][0].append(bool(one["iscrowd"]))
    for image, found in zip(images, kept, strict=True):
        for score, category in zip(found.scores.tolist(), found.categories.tolist(), strict=True):
            groups[image, category][1].append(score)
    return groups


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Holds the boxes of one class over all pictures, the surest first, and how many are to be found in
    each."""

    pictures: Array  # [n]: which picture
    right: Array  # [thresholds, n]
    wrong: Array  # [thresholds, n]; neither: does not count
    present: Array  # [pictures]


def _mean_precision(rankings: Sequence[_Ranking], weights: Array) -> float:
    found = [average_precision(one, weights) for one in rankings if weights @ one.present > 0]
    return float(np.mean(found)) if found else 0.0


_RECALLS = np.linspace(0.0, 1.0, 101)


def average_precision(ranking: _Ranking, weights: Array) -> float:
    """Returns it as COCO defines it: the best precision at or beyond each of 101 recalls, over all
    thresholds. Weights are whole numbers, so that few recalls are possible: how many of the 101 each has
    reached is looked up."""
    if not ranking.pictures.size:
        return 0.0
    each = weights[ranking.pictures]
    right = np.cumsum(ranking.right * each, axis=1)
    seen = right + np.cumsum(ranking.wrong * each, axis=1)
    precision = right / np.maximum(seen, 1.0)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    present = round(float(weights @ ranking.present))
    reached = np.searchsorted(_RECALLS, np.arange(present + 1) / present, side="right")
    gained = np.diff(reached[right.astype(np.int64)], axis=1, prepend=0)
    return float(np.vdot(best, gained)) / (len(_RECALLS) * len(best))


def _matched(evaluator: Any, category: int, images: Sequence[int], groups: _Groups) -> _Ranking:
    """Matches by COCO's rule: from the surest box on, each takes the free object that it overlaps most."""
    thresholds = np.minimum(np.asarray(evaluator.params.iouThrs), 1 - 1e-10).tolist()
    scores, rows, rights, wrongs = [], [], [], []
    present = np.zeros(len(images))
    for row, image in enumerate(images):
        crowd, sure = groups[image, category]
        present[row] = len(crowd) - sum(crowd)
        if not sure:
            continue
        ranked = np.sort(np.array(sure))[::-1][:_MOST_BOXES]  # as the library's overlaps are
        overlaps = np.asarray(evaluator.ious[image, category]).reshape(len(ranked), len(crowd)).tolist()
        matches = np.array([_match(overlaps, crowd, least) for least in thresholds])  # −1: none
        counts = ~np.append(np.array(crowd, np.bool_), False)[matches]  # the last one is for −1
        scores.append(ranked)
        rows.append(np.full(len(ranked), row))
        rights.append((matches >= 0) & counts)
        wrongs.append((matches < 0) & counts)
    if not scores:
        nothing = np.zeros((len(thresholds), 0))
        return _Ranking(np.zeros(0, np.int64), nothing, nothing, present)
    order = np.argsort(-np.concatenate(scores), kind="mergesort")
    right, wrong = (np.concatenate(parts, axis=1)[:, order].astype(np.float64) for parts in (rights, wrongs))
    return _Ranking(np.concatenate(rows)[order], right, wrong, present)


def _match(overlaps: Sequence[Sequence[float]], crowd: Sequence[bool], least: float) -> list[int]:
    """Returns, for each box, the object that it is, or −1. A crowd may be taken often, by what has no other.
    Of objects that overlap as much the last is taken, as COCO's own loop does."""
    taken: set[int] = set()
    matches = []
    for row in overlaps:
        found = -1
        for of_crowds in (False, True):
            best = least
            for place, overlap in enumerate(row):
                if overlap >= best and crowd[place] is of_crowds and place not in taken:
                    best, found = overlap, place
            if found >= 0:
                break
        if found >= 0 and not crowd[found]:
            taken.add(found)
        matches.append(found)
    return matches
