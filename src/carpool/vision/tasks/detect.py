"""Raw detector outputs → boxes in the picture's pixels: threshold first, then suppress, then map back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import DYNAMIC, KEPT, DetectSettings, Task
from carpool.errors import InvalidInput, ModelError
from carpool.types import Array, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import (
    IOU,
    MOST_BOXES,
    OVERLAY,
    SCORE,
    Detection,
    Detections,
    Option,
    Options,
)
from carpool.vision.tasks.task import (
    BOX_DIGITS,
    FLOATS,
    SCORE_DIGITS,
    LoadedModel,
    Picture,
    Verdict,
    VisionSettings,
    VisionTask,
    in_words,
    read_floats,
    rounded,
    size,
)

_YOLO_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (16, 32))
_FAR = 1e6  # pixels: beyond, areas would overflow

Candidates = tuple[Array, Array, Array]  # boxes [n, 4] by corners, scores [n], classes [n]


class Detect(VisionTask):
    name = Task.DETECT
    route, summary = "/detect", "Find objects"
    form, title = Detections, "Objects and where they are"
    example: ClassVar[Mapping[str, Any]] = {
        "detections": [
            {"label": "dog", "class_id": 16, "score": 0.66112, "box": [131.2, 120.5, 310.4, 402.0]}
        ]
    }
    options: ClassVar[Mapping[str, Option]] = {
        "score": SCORE,
        "iou": IOU,
        "max_detections": MOST_BOXES,
        "overlay": OVERLAY,
    }
    table = DetectSettings
    quick = True

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, DetectSettings)
        self._settings = settings
        self._table = settings.table

    @classmethod
    def recognise(cls, model: LoadedModel) -> Verdict | None:
        outputs = model.outputs
        if boxes_and_scores(outputs):
            return Verdict(50, f"outputs {in_words(outputs)}")
        if len(outputs) == 1 and yolo_format(outputs[0], model.labels, model.picture):
            return Verdict(10, f"one output {list(outputs[0].shape)}{model.counted_labels()}")
        return None

    @classmethod
    def settle(cls, model: LoadedModel) -> tuple[DetectSettings, tuple[TensorSpec, ...]]:
        table = model.config.detect or DetectSettings()
        form = table.format or cls._told_format(model)
        if form == "boxes_scores":
            pair = boxes_and_scores(model.outputs)
            if pair is None:
                raise model.cannot(cls.name, "outputs [anchors, 4] and [anchors, classes] of floats")
            model.note_labels(pair[1].shape[1])
            return replace(table, format=form), pair
        fields = "[4 + classes, anchors]" if form == "yolov8" else "[anchors, 5 + classes]"
        chosen = next((spec for spec in model.outputs if can_be(form, spec)), None)
        if chosen is None:
            raise model.cannot(cls.name, f"for {form} an output {fields} of floats")
        first, extra = (chosen.shape[0], 4) if form == "yolov8" else (chosen.shape[1], 5)
        model.note_labels(first if first == DYNAMIC else first - extra)
        return replace(table, format=form), (chosen,)

    @classmethod
    def _told_format(cls, model: LoadedModel) -> str:
        form = "boxes_scores" if boxes_and_scores(model.outputs) else None
        for spec in model.outputs:
            form = form or yolo_format(spec, model.labels, model.picture)
        for spec in model.outputs:
            form = form or likely_yolo(spec)
        if form is None:
            expected = "[anchors, 4] and [anchors, classes], [4 + classes, anchors] or [anchors, 5 + classes]"
            raise model.cannot(cls.name, f"outputs {expected} of floats")
        model.notes.append(f"detect format {form}: outputs {in_words(model.outputs)}")
        return form

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        return dict(Detections(image=size(geometry), detections=self._detections(outputs, geometry, options)))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        found = self._detections(outputs, geometry, options)
        return draw.detections(pixels, found, (geometry.width, geometry.height))

    def _detections(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> list[Detection]:
        table = self._table
        if table.format == KEPT:
            _check_within(options, table)
        least = table.score if options.score is None else options.score
        most = options.max_detections or table.max_detections
        arrays = [read_floats(outputs, spec) for spec in self._settings.outputs]
        with np.errstate(all="ignore"):  # of what is not a number nothing comes, below
            boxes, scores, classes = self._candidates(arrays, least)
            if table.normalized:
                boxes = boxes * np.array([geometry.input_width, geometry.input_height] * 2, boxes.dtype)
            placed = geometry.to_picture(boxes)
            seen = (placed[:, 2] > placed[:, 0]) & (placed[:, 3] > placed[:, 1])  # beside it there is nothing
        sound = seen & np.isfinite(scores) & np.isfinite(boxes).all(axis=1)
        boxes, placed = np.clip(boxes[sound], -_FAR, _FAR), placed[sound]
        scores, classes = scores[sound], classes[sound]
        overlap = table.iou if options.iou is None else options.iou
        kept = suppress(boxes, scores, overlap, most, classes if table.per_class else None)
        return self._listed(placed[kept], scores[kept], classes[kept])

    def _candidates(self, arrays: list[Array], least: float) -> Candidates:
        if self._table.format == KEPT:
            return kept(arrays[0], least)
        if self._table.format == "boxes_scores":
            boxes, scores = arrays
            if len(boxes) != len(scores):
                raise ModelError(f"the model answered {len(boxes)} boxes and {len(scores)} rows of scores")
            return boxes_scores(boxes, scores, least)
        return (yolov8 if self._table.format == "yolov8" else yolov5)(arrays[0], least)

    def _listed(self, boxes: Array, scores: Array, classes: Array) -> list[Detection]:
        return [
            Detection(label=self._settings.label(class_id), class_id=class_id, score=score, box=box)
            for class_id, score, box in zip(
                classes.tolist(),
                rounded(np.minimum(scores, 1.0), SCORE_DIGITS),
                rounded(boxes, BOX_DIGITS),
                strict=True,
            )
        ]


def boxes_and_scores(outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, TensorSpec] | None:
    """[anchors, 4] and [anchors, classes]; of two alike, the one called …box… holds the boxes."""
    tables = [spec for spec in outputs if len(spec.shape) == 2 and spec.datatype in FLOATS]
    tables.sort(key=lambda spec: "box" not in spec.name.lower())
    for boxes in tables:
        for scores in tables:
            same = boxes.shape[0] == scores.shape[0]
            if scores is not boxes and boxes.shape[1] == 4 and same and scores.shape[1] != DYNAMIC:
                return boxes, scores
    return None


def yolo_format(spec: TensorSpec, labels: Sequence[str], picture: Picture) -> str | None:
    """Told by the number of labels, or by the number of anchors that a picture of this size has."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS:
        return None
    for form, fields, anchors, extra, per_cell in (
        ("yolov8", spec.shape[0], spec.shape[1], 4, 1),
        ("yolov5", spec.shape[1], spec.shape[0], 5, 3),
    ):
        if fields <= extra:
            continue
        if len(labels) == fields - extra or (not labels and anchors in _anchor_counts(picture, per_cell)):
            return form
    return None


def likely_yolo(spec: TensorSpec) -> str | None:
    """For an output known to be a detector's: the shorter side holds the fields of one anchor."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS or DYNAMIC in spec.shape:
        return None
    rows, columns = spec.shape
    if 4 < rows < columns:
        return "yolov8"
    return "yolov5" if 5 < columns < rows else None


def can_be(form: str, spec: TensorSpec) -> bool:
    """Whether this output may hold what a declared YOLO format says."""
    if len(spec.shape) != 2 or spec.datatype not in FLOATS:
        return False
    fields, least = (spec.shape[0], 5) if form == "yolov8" else (spec.shape[1], 6)
    return fields == DYNAMIC or fields >= least


def _anchor_counts(picture: Picture, per_cell: int) -> set[int]:
    if DYNAMIC in (picture.height, picture.width):
        return set()
    return {
        per_cell * sum(-(-picture.height // stride) * -(-picture.width // stride) for stride in strides)
        for strides in _YOLO_STRIDES
    }


def _check_within(options: Options, table: DetectSettings) -> None:
    """What the device has dropped nobody can bring back: better no answer than one that hides it."""
    if options.score is not None and options.score < table.score:
        raise _beyond("score", f"at least {table.score:g}")
    if options.max_detections is not None and options.max_detections > table.max_detections:
        raise _beyond("max_detections", f"at most {table.max_detections}")
    if options.iou not in (None, table.iou):
        raise _beyond("iou", f"only {table.iou:g}")


def _beyond(name: str, allowed: str) -> InvalidInput:
    return InvalidInput(
        f"{name} can be {allowed} for this model, whose device has chosen the boxes by its settings; "
        'those can be changed, or nms = "cpu" leaves the choice to each request',
        field=name,
    )


def kept(rows: Array, least: float) -> Candidates:
    """[most, 6]; a class below 0 marks a row without a box."""
    rows = rows[(rows[:, 5] >= 0) & (rows[:, 4] >= least)]
    return rows[:, :4], rows[:, 4], rows[:, 5].astype(np.intp)


def boxes_scores(boxes: Array, scores: Array, least: float) -> Candidates:
    """Boxes [anchors, 4] by corners and scores [anchors, classes]; an anchor counts for its best class."""
    rows = rows_above(scores, least)
    chosen = scores[rows]
    best = chosen.argmax(axis=1) if len(rows) else np.empty(0, np.intp)
    return boxes[rows], chosen[np.arange(len(rows)), best], best


def rows_above(scores: Array, least: float) -> Array:
    """Rows with any number so large. To look for the numbers is several times faster than for the maxima."""
    places = np.flatnonzero(np.ascontiguousarray(scores).reshape(-1) >= least) // max(1, scores.shape[1])
    first = np.empty(len(places), bool)
    first[:1] = True
    np.not_equal(places[1:], places[:-1], out=first[1:])
    rows: Array = places[first]
    return rows


def columns_above(scores: Array, least: float) -> Array:
    """The same for columns, where the maxima are the fastest."""
    return np.flatnonzero(scores.max(axis=0, initial=-np.inf) >= least)


def yolov8(output: Array, least: float) -> Candidates:
    """[4 + classes, anchors]: centre x, centre y, width, height, then a score per class."""
    scores = output[4:]
    columns = columns_above(scores, least)
    chosen = scores[:, columns]
    best = chosen.argmax(axis=0) if len(columns) else np.empty(0, np.intp)
    boxes = from_centres(output[:4, columns].T)
    return boxes, chosen[best, np.arange(len(columns))], best


def yolov5(output: Array, least: float) -> Candidates:
    """[anchors, 5 + classes]: as above with objectness before the classes. A score is the product of both,
    so that what lacks objectness need not be looked at."""
    rows = np.flatnonzero(output[:, 4] >= least)
    chosen = output[rows]
    best = chosen[:, 5:].argmax(axis=1) if len(rows) else np.empty(0, np.intp)
    scores = chosen[:, 4] * chosen[np.arange(len(rows)), 5 + best]
    enough = np.flatnonzero(scores >= least)
    return from_centres(chosen[enough, :4]), scores[enough], best[enough]


# ---- boxes [n, 4] as x1, y1, x2, y2: how they overlap, and which of them to keep

_BLOCK = 128  # boxes settled at a time: more compare in vain, fewer pay for more calls
_LARGEST_BLOCK = 1024


def from_centres(boxes: Array) -> Array:
    """Centre x, centre y, width, height → corners."""
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1)


def iou(one: Array, other: Array) -> Array:
    """[n, 4] and [m, 4] → [n, m]: the shared area over the area of both. Boxes without area share none."""
    inter, union = _shares(one.T, _areas(one.T), other.T, _areas(other.T))
    return np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)


def suppress(boxes: Array, scores: Array, limit: float, most: int, classes: Array | None = None) -> Array:
    """Greedy non-maximum suppression: indices of the boxes to keep, the best first, `most` at most.

    A box goes when it overlaps a better one that stays by more than `limit`, of the same class where
    `classes` are given. Equal scores count in the order given.

    Blocks in order of score are compared with what was kept so far, then within themselves. So the work ends
    with the last box kept, and memory does not grow with the square of the boxes. Where little is left of a
    block, the next one is larger.
    """
    order = np.argsort(-scores, kind="stable")
    sides = np.ascontiguousarray(boxes[order].T)
    areas = _areas(sides)
    kinds = None if classes is None else classes[order]
    kept = np.empty(0, np.intp)
    start, size = 0, _BLOCK
    while start < len(order) and len(kept) < most:
        block = np.arange(start, min(start + size, len(order)))
        start += size
        if len(kept):
            block = block[~_covers(sides, areas, kinds, kept, block, limit).any(axis=0)]
        size = min(2 * size, _LARGEST_BLOCK) if len(block) < _BLOCK // 2 else _BLOCK
        survivors = _settle(_covers(sides, areas, kinds, block, block, limit))
        kept = np.concatenate((kept, block[survivors]))
    return order[kept[:most]]


def _areas(sides: Array) -> Array:
    areas: Array = np.maximum(sides[2] - sides[0], 0) * np.maximum(sides[3] - sides[1], 0)
    return areas


def _shares(one: Array, one_areas: Array, other: Array, other_areas: Array) -> tuple[Array, Array]:
    """Of every pair, the area that both cover and the area that either covers."""
    inter = np.minimum(one[2][:, None], other[2]) - np.maximum(one[0][:, None], other[0])
    np.maximum(inter, 0, out=inter)
    height = np.minimum(one[3][:, None], other[3]) - np.maximum(one[1][:, None], other[1])
    np.maximum(height, 0, out=height)
    inter *= height
    union = one_areas[:, None] + other_areas
    union -= inter
    return inter, union


def _covers(sides: Array, areas: Array, kinds: Array | None, one: Array, other: Array, limit: float) -> Array:
    """Which of `one` would suppress which of `other`."""
    inter, union = _shares(sides[:, one], areas[one], sides[:, other], areas[other])
    union *= np.asarray(limit, union.dtype)
    covers: Array = inter > union
    if kinds is not None:
        covers &= kinds[one][:, None] == kinds[other]
    return covers


def _settle(covers: Array) -> list[int]:
    """Who stays within a block, best first; a row of bits as one integer makes this a short loop."""
    rows = [int.from_bytes(row, "little") for row in np.packbits(covers, axis=1, bitorder="little")]
    gone, stay = 0, []
    for index, row in enumerate(rows):
        if not gone >> index & 1:
            stay.append(index)
            gone |= row
    return stay
