"""Recognises the heads of vision models by what they answer: one rule per family, each giving the readings
that fit.

The formats are facts about exports of Ultralytics, YOLOv5 and its kin, transformers, torchvision, TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from carpool.config.model import (
    DYNAMIC,
    AnomalySettings,
    ClassifySettings,
    DepthSettings,
    DetectSettings,
    EmbedSettings,
    ObbSettings,
    PoseSettings,
    ReadSettings,
    SegmentSettings,
    Task,
    TextRegionsSettings,
)
from carpool.types import Array, Datatype
from carpool.vision.coco_numbers import COCO_NUMBERS
from carpool.vision.known_families import KEYPOINTS_OF_BODIES, in_levels, offsets_of_cells, spread_over
from carpool.vision.output_facts import Facts, OutputFact
from carpool.vision.picture_input import FLOATS
from carpool.vision.recognition import WRITTEN, WRITTEN_END, Reading

_NUMBERS = (Datatype.UINT8, Datatype.INT8, Datatype.INT16, Datatype.INT32, Datatype.INT64, Datatype.UINT16)
_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
_COCO = 80  # classes
_NOTHING = (
    "background",
    "__background__",
    "no object",
    "no-object",
    "n/a",
    "nothing",
)  # the last label of a softmax, maybe
_SIGMOID_DETRS = (80, 91, 365, 366)  # classes of detectors on COCO and Objects365
_SOFTMAX_DETR = 92  # COCO's 91 numbers and one for nothing
_IMAGENETS = (1000, 1001, 21_841, 21_843)
_SCENES = (19, 150, 171)  # classes of Cityscapes, ADE20K, COCO-Stuff; nothing else comes in such numbers
_VOC = 21  # as many as a hand has keypoints: heatmaps are smaller than the picture, though
_MOST_ROWS = 1000  # of a detector that has chosen its boxes
_MOST_FIELDS = 600  # of one of its rows
_SMALLEST_MAP = 8  # a map may be this many times smaller than the picture; deeper ones are features
_FEW = 8  # boxes: corners in order in fewer may be chance
_BEYOND = 1.5  # what is larger is no fraction
_NEAR = 1e-3


def readings(facts: Facts) -> Iterator[Reading]:
    for rule in _RULES:
        yield from rule(facts)


# ---- what samples show


def _between(values: Array | None, low: float, high: float) -> bool:
    """Returns whether all of them, of which there are some, lie between both."""
    if values is None or not values.size:
        return False
    return bool((values >= low - _NEAR).all() and (values <= high + _NEAR).all())


def _fractions(values: Array | None) -> bool:
    return _between(values, 0.0, 1.0)


def _sum_to_one(values: Array | None, axis: int) -> bool:
    return values is not None and _fractions(values) and np.allclose(values.sum(axis), 1.0, atol=1e-2)


def _largest(values: Array | None) -> float:
    """Returns the largest magnitude; 0 of nothing."""
    return 0.0 if values is None else float(np.abs(values).max(initial=0.0))


# ---- YOLO: one table with a column, or a row, for each anchor


def _anchor_counts(facts: Facts, per_cell: int) -> set[int]:
    if DYNAMIC in (facts.height, facts.width):
        return set()
    return {
        per_cell * sum(-(-facts.height // stride) * -(-facts.width // stride) for stride in strides)
        for strides in _STRIDES
    }


def _anchors(facts: Facts, table: OutputFact) -> str | None:
    """The format, where there are as many anchors as the picture has cells."""
    rows, columns = table.shape
    if columns in _anchor_counts(facts, 1) and rows > 4:
        return "yolov8"
    if rows in _anchor_counts(facts, 1) and columns > 5 and spread_over(table, facts):
        return "yolov5"  # YOLOX, decoded
    return "yolov5" if rows in _anchor_counts(facts, 3) and columns > 5 else None


def _dense(facts: Facts) -> Iterator[Reading]:
    for table in facts.floats(2):
        if offsets_of_cells(table, facts):
            yield from _of_cells(facts, table)
            continue
        form = _anchors(facts, table)
        if form is None and facts.insist:
            form = facts.form or _by_the_longer_side(table)
            fields = table.shape[form == "yolov5"]
            if form not in ("yolov8", "yolov5") or DYNAMIC < fields < 5 + (form == "yolov5"):
                continue
        if form is not None:
            yield from _of_anchors(facts, table, form)


def _of_cells(facts: Facts, table: OutputFact) -> Iterator[Reading]:
    """Reads YOLOX without its decoding."""
    assert table.sample is not None
    classes = table.shape[1] - 5
    if _fractions(table.sample[:, 4:]) and facts.form in (None, "yolox"):
        settings = DetectSettings("yolox", normalized=False, boxes="centers")
        why = f"{table} has for each cell of YOLOX's a box as offsets, and {classes} classes"
        yield Reading(Task.DETECT, settings, (table.spec,), why, classes, certain=True)


def _by_the_longer_side(table: OutputFact) -> str | None:
    rows, columns = (side if side != DYNAMIC else 1 << 30 for side in table.shape)
    if 4 < rows < columns:
        return "yolov8"
    return "yolov5" if 5 < columns < rows else None


def _of_anchors(facts: Facts, table: OutputFact, form: str) -> Iterator[Reading]:
    """Four numbers are the box; in the older format one more says whether there is anything at all."""
    before = 4 if form == "yolov8" else 5
    fields = table.shape[form == "yolov5"]
    sample = table.sample if table.sample is None or form == "yolov8" else table.sample.T
    rest = None if sample is None else sample[before:]
    classes = fields - before if fields != DYNAMIC else None
    boxes = None if sample is None else sample[:4]
    if _in_fractions(boxes):
        if _fractions(rest) or facts.insist:
            settings = DetectSettings(form, normalized=True, boxes="centers")
            why = f"{table} has a box from 0 to 1 and {classes} classes per anchor"
            yield Reading(Task.DETECT, settings, (table.spec,), why, classes, classes == _COCO)
        return
    protos = _prototypes(facts)
    if protos is not None and classes is not None and classes > protos.shape[0]:
        classes -= protos.shape[0]
        why = f"{table} has a box, {classes} classes and {protos.shape[0]} parts of {protos} per anchor"
        specs = (table.spec, protos.spec)
        yield Reading(Task.SEGMENT, SegmentSettings(format=form), specs, why, classes, certain=True)
        return
    if rest is None or _fractions(rest) or facts.insist:
        why = f"{table} has a box and {classes} classes per anchor"
        settings = DetectSettings(form, normalized=False, boxes="centers")
        certain = classes == _COCO and _anchors(facts, table) == form
        told = () if _largest(boxes) > 0 else ("normalized",)
        yield Reading(Task.DETECT, settings, (table.spec,), why, classes, certain, assumed=told)
    if classes is not None:
        yield from _with_keypoints(facts, table, form, classes, rest)
        if classes > 1 and form == "yolov8":
            yield from _with_angles(facts, table, classes - 1, rest)


def _in_fractions(boxes: Array | None) -> bool:
    """Returns whether boxes of noise lie within 0 and 1: those in pixels would be spread over the picture."""
    return 0 < _largest(boxes) <= _BEYOND


def _prototypes(facts: Facts) -> OutputFact | None:
    """Returns maps of a quarter of the picture beside a table."""
    quarter = (facts.height // 4, facts.width // 4)
    found = [one for one in facts.floats(3) if one.shape[1:] == quarter]
    return found[0] if len(found) == 1 else None


def _with_angles(facts: Facts, table: OutputFact, classes: int, rest: Array | None) -> Iterator[Reading]:
    raw = facts.claims.form == "obb"  # YOLO26's angles are what the network says, and turn round and round
    fits = rest is None or (_fractions(rest[:-1]) and (raw or _between(rest[-1], -np.pi, np.pi)))
    if fits or facts.insist:
        why = f"{table} has a box, {classes} classes and an angle per anchor"
        certain = rest is not None and fits and not _fractions(rest[-1])
        yield Reading(Task.OBB, ObbSettings("yolov8"), (table.spec,), why, classes, certain)


def _with_keypoints(
    facts: Facts, table: OutputFact, form: str, left: int, rest: Array | None
) -> Iterator[Reading]:
    """Yields readings by their claimed number, else of one class: coordinates in pixels, the rest
    fractions."""
    claimed = facts.claims.keypoints
    for count, each in [claimed] if claimed else [((left - 1) // each, each) for each in (3, 2)]:
        classes = left - count * each
        if count < 1 or classes < 1 or (classes > 1 and not claimed):
            continue
        points = None if rest is None else rest[classes:].reshape(count, each, -1)
        fits = rest is None or points is None or (_fractions(rest[:classes]) and _like_points(points))
        if fits or facts.insist:
            why = f"{table} has a box, {classes} classes and {count} keypoints of {each} numbers per anchor"
            certain = fits and points is not None and count > 1
            yield Reading(Task.POSE, PoseSettings(form, (count, each)), (table.spec,), why, classes, certain)


def _like_points(points: Array) -> bool:
    """Checks [keypoints, 2 or 3, anchors]: every coordinate is somewhere beyond a fraction, what stands third
    never."""
    beyond = np.abs(points[:, :2]).max(axis=2, initial=0.0) > _BEYOND
    return bool(beyond.all()) and (points.shape[1] == 2 or _fractions(points[:, 2]))


# ---- detectors that have chosen their boxes: rows of x1, y1, x2, y2, score, class, and what belongs to it


def _chosen(facts: Facts) -> Iterator[Reading]:
    for table in facts.floats(2):
        rows, columns = table.shape
        if rows > _MOST_ROWS or not 6 <= columns <= _MOST_FIELDS or _anchors(facts, table):
            continue
        like = _like_rows(table.sample) and _largest(table.sample) > 0
        claimed = facts.claims.source == "Ultralytics" and _like_rows(table.sample)
        if like or claimed or facts.insist:
            yield from _of_rows(facts, table, claimed)


def _of_rows(facts: Facts, table: OutputFact, claimed: bool) -> Iterator[Reading]:
    columns, sample = table.shape[1], table.sample
    protos = _prototypes(facts)
    why = f"{table} holds boxes with their scores and classes"
    classes = len(facts.labels) or None  # rows do not show how many there are
    if protos is not None and columns == 6 + protos.shape[0]:
        why += f", and parts of {protos}"
        specs = (table.spec, protos.spec)
        yield Reading(Task.SEGMENT, SegmentSettings(format="end2end"), specs, why, classes, certain=True)
    elif columns == 6:
        fractions = sample is not None and _in_fractions(sample[:, :4])
        settings = DetectSettings("end2end", normalized=fractions, boxes="corners")
        told = () if claimed or (sample is not None and _largest(sample[:, :4]) > 0) else ("normalized",)
        ordered = sample is not None and bool((sample[:, 2:4] >= sample[:, :2]).all())
        certain = ordered and sample is not None and _largest(sample[:, :4]) > _BEYOND
        if certain or claimed or facts.insist:
            yield Reading(Task.DETECT, settings, (table.spec,), why, classes, certain, assumed=told)
    elif columns == 7 and (claimed or facts.insist):
        yield Reading(Task.OBB, ObbSettings("end2end"), (table.spec,), f"{why}, and angles", classes)
    elif claimed or facts.insist:
        count, each = facts.claims.keypoints or ((columns - 6) // 3, 3)
        if columns == 6 + count * each:
            pose = PoseSettings("end2end", (count, each))
            yield Reading(Task.POSE, pose, (table.spec,), f"{why}, and {count} keypoints", classes)


def _like_rows(rows: Array | None) -> bool:
    """Looks for a fraction, then a whole number; also where there is not a row."""
    if rows is None:
        return False
    whole = bool((rows[:, 5] == np.rint(rows[:, 5])).all() and (rows[:, 5] >= 0).all())
    return whole and (not len(rows) or _fractions(rows[:, 4]))


# ---- boxes here, scores there


def _pairs(facts: Facts) -> Iterator[Reading]:
    """Reads [n, 4] and [n, classes]; of two alike, the one called …box… holds the boxes. Boxes of several
    levels are not final boxes, nor all of them in one table."""
    tables = sorted(facts.floats(2), key=lambda one: not one.called("box"))
    named = {one.spec.name: one for one in tables}
    dets, logits = named.get("dets"), named.get("labels")
    if dets is not None and logits is not None and dets.shape == (logits.shape[0], 4):
        boxes = _rfdetr(facts, dets, logits)
        masks = next((one for one in facts.floats(3) if one.shape[0] == dets.shape[0]), None)
        yield replace(boxes, certain=len(facts.outputs) == 2)
        if masks is not None:
            yield _with_masks(boxes, masks)
        return
    if not in_levels(facts):
        yield from _box_tables(facts, tables)


def _box_tables(facts: Facts, tables: Sequence[OutputFact]) -> Iterator[Reading]:
    for boxes in tables:
        for scores in tables:
            if scores is boxes or boxes.shape[1] != 4 or boxes.shape[0] != scores.shape[0]:
                continue
            untold = boxes.shape == scores.shape and not boxes.called("box")
            if scores.shape[1] == DYNAMIC or (untold and not facts.insist):
                continue
            logits = scores.called("logit") or (scores.sample is not None and not _fractions(scores.sample))
            if not logits or facts.insist:
                yield _boxes_and_scores(boxes, scores)
            if logits or scores.sample is None or facts.insist:
                yield _queries(facts, boxes, scores, logits)
            return


def _rfdetr(facts: Facts, boxes: OutputFact, logits: OutputFact) -> Reading:
    """Reads RF-DETR: each class of each query is a sigmoid of its own. The last column is for nothing, but of
    COCO's 91, which are its numbers; with a label for each column all are classes."""
    columns = logits.shape[1]
    every = columns in (COCO_NUMBERS, len(facts.labels))
    settings = DetectSettings(
        "detr",
        normalized=True,
        boxes="centers",
        activation="sigmoid",
        background=None if every else columns - 1,
    )
    why = f"{boxes} and {logits} are called as RF-DETR's boxes and logits are"
    specs = (boxes.spec, logits.spec)
    return Reading(Task.DETECT, settings, specs, why, columns - (not every), certain=True)


def _with_masks(boxes: Reading, masks: OutputFact) -> Reading:
    """Reads RF-DETR Seg: a mask for each query, as logits."""
    assert isinstance(boxes.table, DetectSettings)
    background, activation = boxes.table.background, boxes.table.activation
    settings = SegmentSettings(format="queries", activation=activation, background=background)
    why = f"{boxes.why}, and {masks} are its queries' masks"
    return replace(boxes, task=Task.SEGMENT, table=settings, outputs=(*boxes.outputs, masks.spec), why=why)


def _queries(facts: Facts, boxes: OutputFact, scores: OutputFact, logits: bool) -> Reading:
    """Reads DETR and its kin: logits, and centres with sizes from 0 to 1. One column more than there are
    labels may be for nothing, beside a softmax, or one of sigmoids that is not used."""
    columns, named = scores.shape[1], len(facts.labels)
    activation = facts.claims.activation
    assumed: tuple[str, ...] = ()
    nothing = bool(named) and facts.labels[-1].lower() in _NOTHING
    if activation is None and (columns == _SOFTMAX_DETR or (nothing and columns == named)):
        activation = "softmax"
    if activation is None and (columns in _SIGMOID_DETRS or (named and columns == named)):
        activation = "sigmoid"
    if activation is None and named and columns == named + 1:
        activation, assumed = "softmax", ("activation",)
    classes = columns - (activation == "softmax" and not nothing)
    background = columns - 1 if activation == "softmax" else None
    settings = DetectSettings(
        "detr", normalized=True, boxes="centers", activation=activation, background=background
    )
    ask = "" if activation else 'set activation = "softmax" or "sigmoid" in [detect] of model.toml'
    certain = logits and (_fractions(boxes.sample) or boxes.called("pred_boxes"))
    why = f"{scores} are logits, and {boxes} their boxes"
    specs = (boxes.spec, scores.spec)
    return Reading(Task.DETECT, settings, specs, why, classes, certain, ask, assumed)


def _boxes_and_scores(boxes: OutputFact, scores: OutputFact) -> Reading:
    sample, ask = boxes.sample, ""
    told = sample is not None and len(sample) >= _FEW and _largest(sample) > 0
    ordered = sample is not None and bool((sample[:, 2:] >= sample[:, :2]).all())
    if scores.shape[1] > 1 and _sum_to_one(scores.sample, 1):
        ask = "set background in [detect] of model.toml: one class seems to be the background"
    elif told and not ordered:
        ask = 'set boxes = "corners" or "centers" in [detect] of model.toml'
    settings = DetectSettings(
        "boxes_scores", normalized=told and _largest(sample) <= _BEYOND, boxes="corners"
    )
    why = f"{boxes} are boxes, and {scores} their scores"
    specs = (boxes.spec, scores.spec)
    return Reading(Task.DETECT, settings, specs, why, scores.shape[1], told and not ask, ask)


def _labelled(facts: Facts) -> Iterator[Reading]:
    """Reads torchvision's and TensorFlow's detectors: boxes, and for each a label and a score."""
    boxes = _one(facts, 2, "box")
    scores, labels = _one(facts, 1, "score"), _one(facts, 1, "label", "class")
    if boxes is None or scores is None or labels is None or boxes.shape[1] != 4:
        return
    tensorflow = boxes.called("detection_boxes")
    plain = {one.spec.name for one in (boxes, scores, labels)} == {"boxes", "scores", "labels"}
    ask, normalized = "", tensorflow  # TensorFlow's are fractions, torchvision's are pixels
    if _largest(boxes.sample) > 0:
        normalized = _largest(boxes.sample) <= _BEYOND
    elif not tensorflow and not plain:
        ask = "set normalized = true or false in [detect] of model.toml: the dry run found no box"
    form = "corners_yx" if tensorflow else "corners"
    settings = DetectSettings("boxes_labels_scores", normalized=normalized, boxes=form)
    whole = labels.spec.datatype not in FLOATS or tensorflow
    why = f"{boxes}, {labels} and {scores} are what it found"
    specs = (boxes.spec, labels.spec, scores.spec)
    assumed = _first_number(facts)
    yield Reading(Task.DETECT, settings, specs, why, None, whole, ask, assumed)


def _first_number(facts: Facts) -> tuple[str, ...]:
    """Some detectors count their classes from 0 and others from 1, as torchvision's and TensorFlow's do,
    where 0 is for nothing: only a label for that shows which it is."""
    given = bool(facts.labels) and facts.labels != facts.claims.labels
    return ("labels",) if given and facts.labels[0].strip().lower() not in _NOTHING else ()


def _dets(facts: Facts) -> Iterator[Reading]:
    """Reads what mmdeploy makes of mmdetection's models, RTMDet among them: corners in pixels of the input
    with a score, and the number of a class, from 0."""
    named = {one.spec.name: one for one in facts.outputs}
    rows, labels = named.get("dets"), named.get("labels")
    if rows is None or labels is None or rows.shape[1:] != (5,) or len(labels.shape) != 1:
        return
    if labels.spec.datatype in FLOATS or facts.form not in (None, "dets_labels"):
        return
    settings = DetectSettings("dets_labels", normalized=False, boxes="corners")
    why = f"{rows} and {labels} are called and shaped as mmdeploy's"
    yield Reading(Task.DETECT, settings, (rows.spec, labels.spec), why, None, certain=True)


def _one(facts: Facts, rank: int, *words: str) -> OutputFact | None:
    """The first output of so many dimensions whose name has such a word in it."""
    return next((one for one in facts.outputs if len(one.shape) == rank and one.called(*words)), None)


def _rtdetr(facts: Facts) -> Iterator[Reading]:
    """Reads Ultralytics' RT-DETR: a table of centres and sizes from 0 to 1, and scores."""
    for table in facts.floats(2):
        rows, columns = table.shape
        if rows > _MOST_ROWS or not 4 < columns <= _MOST_FIELDS or _anchors(facts, table):
            continue
        claimed = facts.claims.source == "Ultralytics" and columns == 4 + len(facts.labels)
        fits = _fractions(table.sample) and _largest(table.sample) > 0
        if (claimed and fits) or facts.insist:
            settings = DetectSettings("rtdetr", normalized=True, boxes="centers")
            why = f"{table} has a box and {columns - 4} scores per query"
            yield Reading(Task.DETECT, settings, (table.spec,), why, columns - 4, claimed and fits)


# ---- points: faces in cells, and keypoints of the whole image


def _cells_with_points(facts: Facts) -> Iterator[Reading]:
    """Reads SCRFD: for each level scores, then for each boxes, then for each points, if it has them."""
    if DYNAMIC in (facts.height, facts.width) or len(facts.outputs) not in (6, 9):
        return
    rows = [2 * (facts.height // stride) * (facts.width // stride) for stride in (8, 16, 32)]
    tables = facts.floats(2)
    by_size = {one.shape: one for one in tables}
    levels = [(count, columns) for columns in (1, 4, 10)[: len(facts.outputs) // 3] for count in rows]
    if len(tables) != len(facts.outputs) or set(by_size) != set(levels):
        return
    if not all(_fractions(one.sample) for one in tables if one.sample is not None and one.shape[1] == 1):
        return
    specs = tuple(by_size[level].spec for level in levels)
    why = f"{len(levels)} outputs are shaped as SCRFD's scores, boxes and points of three levels"
    if len(levels) == 9:
        pose = PoseSettings("scrfd", (5, 2), score=0.5, iou=0.4)
        yield Reading(Task.POSE, pose, specs, why, 1, certain=True)
    else:
        boxes = DetectSettings("scrfd", normalized=False, boxes="corners", score=0.5, iou=0.4)
        yield Reading(Task.DETECT, boxes, specs, why, 1, certain=True)


def _lines_of_points(facts: Facts) -> Iterator[Reading]:
    """Reads RTMPose and its kin: a row of bins for each keypoint, along the width and along the height."""
    named = {one.spec.name.lower(): one for one in facts.floats(2)}
    across, down = named.get("simcc_x"), named.get("simcc_y")
    if across is not None and down is not None and across.shape[0] == down.shape[0] > 0:
        why = f"{across} and {down} are called as SimCC's places along the width and the height"
        settings = PoseSettings("simcc", (across.shape[0], 3), score=0.0)
        yield Reading(Task.POSE, settings, (across.spec, down.spec), why, 1, certain=True)


def _heatmaps(facts: Facts) -> Iterator[Reading]:
    """Reads ViTPose and HRNet: a map of a quarter of the picture for each keypoint."""
    quarter = (facts.height // 4, facts.width // 4)
    for one in facts.floats(3):
        if one.shape[1:] == quarter and one.shape[0] in KEYPOINTS_OF_BODIES:
            settings = PoseSettings("heatmaps", (one.shape[0], 3), score=0.0)
            why = f"{one} are heatmaps of {one.shape[0]} keypoints"
            certain = one.called("heatmap")
            yield Reading(Task.POSE, settings, (one.spec,), why, 1, certain, by_shape=not certain)


# ---- maps and vectors


def _maps(facts: Facts) -> Iterator[Reading]:
    """Reads maps, of which several of one shape are the same at several depths, or a helper's: the first
    counts."""
    maps = [one for one in facts.floats(3, 2) if facts.insist or _is_map(facts, one)]
    others = [one for one in facts.outputs if len(one.shape) > 1 and one not in maps]
    if not maps or (not facts.insist and (others or len({one.shape for one in maps}) > 1)):
        return
    first = maps[0]
    classes = 1 if len(first.shape) == 2 else first.shape[0 if facts.planar else 2]
    if classes == 1:
        yield from _single_map(facts, first)
        return
    sides = first.shape[1:] if facts.planar else first.shape[:2]
    whole = sides == (facts.height, facts.width)
    named = first.called("mask", "seg") and not first.called("feat", "embed")
    certain = named or classes in _SCENES or (classes == _VOC and whole)
    told = first.called("prob", "softmax") or _sum_to_one(first.sample, 0 if facts.planar else -1)
    settings = SegmentSettings("none" if told else "softmax", format="maps")
    why = f"{first} are {classes} maps of the image"
    known = classes if classes != DYNAMIC else None
    sure = certain and known is not None
    loose = not sure and known != len(facts.labels)  # features and heatmaps are maps, too
    yield Reading(Task.SEGMENT, settings, (first.spec,), why, known, sure, by_shape=loose)


def _single_map(facts: Facts, first: OutputFact) -> Iterator[Reading]:
    """Yields readings of what stands out, or of depth: only its name decides."""
    why = f"{first} is one map of the image"
    deep = first.called("depth", "disp")
    inverse = True if first.called("disp", "inverse") else None
    depth = DepthSettings(inverse)
    if facts.claims.form == "depth":  # Ultralytics': distances, of a picture from its first pixel to its last
        depth = DepthSettings(inverse=False, align_corners=True)
    yield Reading(Task.DEPTH, depth, (first.spec,), why, None, certain=deep)
    raw = first.called("logit") if first.sample is None else not _fractions(first.sample)
    settings = SegmentSettings("sigmoid" if raw else "none", format="maps")
    masks = first.called("mask", "seg", "salien", "matte", "alpha") and not deep
    yield Reading(Task.SEGMENT, settings, (first.spec,), why, 1, certain=masks)


def _anomalies(facts: Facts) -> Iterator[Reading]:
    """Reads anomalib: a score, a label, a map and a mask, by their names."""
    named = {one.spec.name: one for one in facts.outputs}
    if "pred_score" in named and "anomaly_map" in named:
        wanted = ("pred_score", "anomaly_map", "pred_label", "pred_mask")
        specs = tuple(named[name].spec for name in wanted if name in named)
        why = f"{named['pred_score']} and {named['anomaly_map']} are called as anomalib's"
        yield Reading(Task.ANOMALY, AnomalySettings(), specs, why, certain=True)


def _images(facts: Facts) -> Iterator[Reading]:
    """Reads an image for an image: nothing else has so many channels and is larger than the input."""
    if DYNAMIC in (facts.height, facts.width) or len(facts.outputs) != 1:
        return
    for one in facts.floats(3):
        *sides, channels = one.shape if not facts.planar else (*one.shape[1:], one.shape[0])
        times, rest = divmod(sides[0], facts.height)
        if rest or times < 1 or sides[1] != times * facts.width or channels not in (1, 3):
            continue
        if times > 1 or (channels == 3 and Task.RESTORE in (facts.task, facts.claims.task)):
            why = f"{one} is an image, {times} times as large as the input"
            sure = times > 1 or facts.claims.source == "transformers"
            yield Reading(Task.RESTORE, None, (one.spec,), why, certain=sure, by_shape=not sure)


def _class_maps(facts: Facts) -> Iterator[Reading]:
    """Reads one map whose values are the numbers of classes: whole ones, of any datatype where its metadata
    says that it is one."""
    claimed = facts.claims.form == "semantic"
    for one in facts.outputs:
        whole = one.spec.datatype in _NUMBERS or (claimed and one.spec.datatype in FLOATS)
        plane = one.shape[1:] if len(one.shape) == 3 and one.shape[0] == 1 else one.shape
        known = DYNAMIC not in (facts.height, facts.width) and DYNAMIC not in plane
        if not whole or len(plane) != 2 or (known and not _in_proportion(facts, *plane)):
            continue
        why = f"{one} is one map of the image, whose values are the numbers of classes"
        settings = SegmentSettings("none", format="class_map")
        yield Reading(Task.SEGMENT, settings, (one.spec,), why, len(facts.labels) or None, claimed)


def _text_maps(facts: Facts) -> Iterator[Reading]:
    """Yields readings of text maps. Nothing in them marks text: settings or metadata must name the task."""
    if Task.TEXT_REGIONS not in (facts.task, facts.claims.task):
        return
    for one in facts.floats(3, 2):
        if not facts.insist and not _is_map(facts, one):
            continue
        maps = 1 if len(one.shape) == 2 else one.shape[0]
        if maps == 3 and facts.form != "db":
            why = f"{one} are centers of lines and distances to their edges"
            yield Reading(Task.TEXT_REGIONS, TextRegionsSettings("lines"), (one.spec,), why)
            continue
        likely = one.sample is None or _fractions(one.sample)
        if maps in (1, DYNAMIC) and likely and facts.form != "lines":
            why = f"{one} is one map of probabilities"
            yield Reading(Task.TEXT_REGIONS, TextRegionsSettings("db"), (one.spec,), why)


def _characters(facts: Facts) -> Iterator[Reading]:
    """Reads steps from left to right, and a value for each character and the blank, perhaps also for the
    space."""
    known = len(facts.labels)
    alone = len(facts.outputs) == 1  # beside others it may be boxes, four numbers each
    if not facts.insist and not (known and (alone or facts.claims.task == Task.READ)):
        return
    for one in facts.floats(2):
        steps, classes = one.shape
        if not facts.insist and (steps <= 1 or classes - known not in (1, 2)):
            continue
        shares = _sum_to_one(one.sample, 1)
        settings = ReadSettings(activation="none" if shares or one.called("softmax", "prob") else "softmax")
        why = f"{one} has {classes} values for each step along a line, for {known} characters"
        yield Reading(Task.READ, settings, (one.spec,), why, known or None, certain=shares)


def _written(facts: Facts) -> Iterator[Reading]:
    """Reads text that the model writes itself: about what, only its settings can say."""
    found = {one.spec.name: one for one in facts.outputs if one.spec.datatype is Datatype.BYTES}
    if WRITTEN in found:
        specs = tuple(found[name].spec for name in (WRITTEN, WRITTEN_END) if name in found)
        why = f"{found[WRITTEN]} is text that the model writes"
        yield Reading(Task.READ, ReadSettings(activation="none"), specs, why)
        yield Reading(Task.CAPTION, None, specs, why)


def _is_map(facts: Facts, one: OutputFact) -> bool:
    """Returns whether it is in the picture's proportions, and not much smaller."""
    if DYNAMIC in (facts.height, facts.width):
        return False
    height, width = one.shape[-2:] if facts.planar or len(one.shape) == 2 else one.shape[:2]
    return _in_proportion(facts, height, width)


def _in_proportion(facts: Facts, height: int, width: int) -> bool:
    near = height <= facts.height <= height * _SMALLEST_MAP
    return near and height * facts.width == width * facts.height


def _vectors(facts: Facts) -> Iterator[Reading]:
    """Numbers of classes, or an embedding; beside an embedding there may be what it was made of."""
    vectors = [one for one in facts.outputs if _is_vector(facts, one)]
    vectors.sort(
        key=lambda one: (_length(one) != len(facts.labels), not one.called("embed", "pooler", "logit"))
    )
    if not vectors:
        return
    one = vectors[0]
    named = one.called("embed", "pooler")
    if not facts.insist and not named and len(facts.outputs) > 1 and not one.called("logit", "prob"):
        return
    sample = None if one.sample is None else one.sample.reshape(-1).astype(np.float64)
    unit = sample is not None and bool(
        np.isclose(np.square(sample).sum(), 1.0, atol=1e-3) and (sample < 0).any()
    )
    if not named or facts.insist:
        yield _classes(facts, one, sample)
    certain = named or (unit and len(facts.outputs) == 1)
    why = f"{one} is a vector{' of length 1' if unit else ''}"
    yield Reading(Task.EMBED, EmbedSettings(), (one.spec,), why, None, certain)


def _is_vector(facts: Facts, one: OutputFact) -> bool:
    sides = [side for side in one.shape if side != 1]
    known = facts.insist or DYNAMIC not in one.shape
    return one.spec.datatype in FLOATS and bool(one.shape) and len(sides) <= 1 and known


def _length(one: OutputFact) -> int:
    return max(one.shape, default=1)


def _classes(facts: Facts, one: OutputFact, sample: Array | None) -> Reading:
    length = _length(one)
    shares = length > 1 and _sum_to_one(sample, 0)
    told = sample is None and one.called("prob", "softmax", "sigmoid")
    activation = facts.claims.activation or ("sigmoid" if length == 1 else "softmax")
    how = f"the {activation} makes them scores"
    if shares or told:
        activation, how = "none", "they add up to 1" if shares else "its name stands for probabilities"
    elif sample is not None and _fractions(sample) and _largest(sample) > 0 and _stays_small(one):
        activation, how = "none", "fractions that do not exclude each other"
    certain = length > 1 and (shares or one.called("logit", "prob", "softmax") or length in _IMAGENETS)
    why = f"{one} is one number per class; {how}"
    settings = ClassifySettings(activation)
    return Reading(Task.CLASSIFY, settings, (one.spec,), why, length if length > 0 else None, certain)


def _stays_small(one: OutputFact) -> bool:
    """Logits of a network that answers little to noise may be fractions, too; but some are below 0, or they
    grow with the picture's values. What a sigmoid made does neither."""
    if one.sample is not None and (one.sample < 0).any():
        return False
    return one.loud is None or not np.isfinite(one.loud).all() or _fractions(one.loud)


_RULES: tuple[Callable[[Facts], Iterator[Reading]], ...] = (
    _pairs,
    _labelled,
    _dets,
    _dense,
    _chosen,
    _rtdetr,
    _cells_with_points,
    _lines_of_points,
    _heatmaps,
    _maps,
    _anomalies,
    _images,
    _class_maps,
    _text_maps,
    _characters,
    _written,
    _vectors,
)
