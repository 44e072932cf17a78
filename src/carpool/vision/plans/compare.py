"""Decides whether two answers to one picture differ, as a person who looks at them would say: the answers of
two versions of a model, or of one model and a cache.

What decides is the same both ways round and whatever the order of the boxes. Where a box needs a partner, all
partners are looked for together, so that no box takes the only partner of another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from carpool.types import Array
from carpool.vision.boxes import iou
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.likeness import Difference, cut_out, from_png, keypoints_alike, matched, polygons_alike
from carpool.vision.tasks import kinds

Answer = Mapping[str, Any]

_PARTNER = 0.7  # of the score that counts: what one version is just sure of, another may be just not
_MAP_AREA = 0.01  # of the picture: smaller regions of a map of classes come and go
_DEPTH = 0.1  # of all distances, and of all pixels
_NEAR, _FAR = 1e-3, 1e-2  # raw numbers: so much apart, and so much of the larger one
_LEAST = 1e-6  # whatever differs does so by something
_LONGEST_TEXT = 1000  # characters that are looked at for how alike two texts are
_MOST_NAMED = 3  # things in a sentence


def compare_answers(task: str, a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    """Compares the typed JSON answers of the image routes, of a task by its name. `a` is what `b` is held
    against in words only: what differs does so both ways."""
    rule = _RULES.get(task)
    if rule is None:
        kind = kinds().get(task)
        rule = kind.compare if kind else None
    return (rule or _compare_fields)(a, b, limits)


# ---- numbers as they are


def compare_tensors(a: Mapping[str, Array], b: Mapping[str, Array]) -> Difference:
    """Compares the outputs of a model by name. Numbers that are not finite are alike where they are the same;
    whole numbers, which are classes and counts, and texts must be equal."""
    if a.keys() != b.keys():
        names = ", ".join(f'"{name}"' for name in sorted(a.keys() ^ b.keys()))
        return Difference(True, 1.0, f"only one has the outputs {names}")
    details: dict[str, Any] = {}
    worst, words = 0.0, ""
    for name in a:
        one, other = a[name], b[name]
        if one.shape != other.shape:
            return Difference(True, 1.0, f'"{name}" is {list(one.shape)} here and {list(other.shape)} there')
        off, largest = _numbers_apart(one, other)
        count = int(off.sum())
        details[name] = {"values": one.size, "apart": count, "largest": largest, "nan": _nans(one, other)}
        if count and count / one.size > worst:
            worst, words = count / one.size, f'{count} of {one.size} values of "{name}" are apart'
    return Difference(worst > 0.0, worst, words or "the numbers are alike", {"outputs": details})


def _numbers_apart(a: Array, b: Array) -> tuple[Array, float | None]:
    """Returns which are apart, and the largest difference of those that are finite."""
    if "f" not in (a.dtype.kind, b.dtype.kind):
        return np.asarray(a != b), None
    one, other = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(other)
    with np.errstate(all="ignore"):
        gap = np.abs(one - other)
        apart = gap > _NEAR + _FAR * np.maximum(np.abs(one), np.abs(other))
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(finite, apart, ~alike), float(gap[finite].max(initial=0.0))


def _nans(a: Array, b: Array) -> int:
    return sum(int(np.isnan(array).sum()) for array in (a, b) if array.dtype.kind == "f")


def _compare_raw(a: Answer, b: Answer, limits: CompareSettings) -> Difference:  # noqa: ARG001
    return compare_tensors(_outputs(a), _outputs(b))


def _outputs(answer: Answer) -> dict[str, Array]:
    return {output["name"]: _output(output) for output in answer["outputs"]}


def _output(output: Answer) -> Array:
    datatype, data = output["datatype"], output["data"]
    kind: type | None = float if datatype.startswith(("FP", "BF")) else None  # null becomes NaN
    return np.array(data, object if datatype == "BYTES" else kind)


def _compare_embeddings(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    one, other = (np.array(answer["embedding"], np.float64) for answer in (a, b))
    if one.shape != other.shape:
        return Difference(True, 1.0, f"one has {one.size} numbers, the other {other.size}")
    lengths = [math.hypot(*vector) for vector in (one, other)]  # whose squares may be too small for a float
    units = [
        vector / length if length else vector for vector, length in zip((one, other), lengths, strict=True)
    ]
    cosine = 1.0 if np.array_equal(one, other, equal_nan=True) else float(units[0] @ units[1])
    cosine = min(1.0, cosine) if math.isfinite(cosine) else -1.0
    details = {
        "cosine": cosine,
        "lengths": lengths,
        "normalize_differs": _unit(lengths[0]) != _unit(lengths[1]),
    }
    why = f"the cosine is {cosine:.4f}, and at least {limits.cosine:g} is required"
    return Difference(cosine < limits.cosine, (1.0 - max(-1.0, cosine)) / 2, why, details)


def _unit(length: float) -> bool:
    return abs(length - 1.0) < 1e-3


# ---- classes


def _compare_classes(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    one, other = (_scores(answer["classes"]) for answer in (a, b))
    if max(sum(one.values()), sum(other.values())) > 1.0 + 1e-3:  # each is probable by itself: several labels
        first, second = _sure_labels(one, other, limits), _sure_labels(other, one, limits)
        what = "is sure"
    else:
        best, second_best = (_best(scores, limits.top_k) for scores in (one, other))
        first, second = best - second_best, second_best - best
        what = f"is among the best {limits.top_k}" if limits.top_k > 1 else "is the best"
    distance = _jensen_shannon(one, other)
    shift = max(
        (abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()), default=0.0
    )
    details = {
        "jensen_shannon": distance,
        "score_shift": shift,
        "only_first": _labels(first),
        "only_second": _labels(second),
    }
    if not first and not second:
        return Difference(False, min(distance, 1.0), "the same classes", details)
    said = [
        f"{', '.join(_labels(keys))} {where}" for keys, where in ((first, "here"), (second, "there")) if keys
    ]
    how_much = min(1.0, max(distance, shift, _LEAST))
    return Difference(True, how_much, f"what {what}: {'; '.join(said)}", details)


Class = tuple[str, int]  # label and number: clients read either


def _class(thing: Answer) -> Class:
    return str(thing.get("label", "")), int(thing.get("class_id", -1))


def _scores(classes: Sequence[Answer]) -> dict[Class, float]:
    return {_class(one): _number(one["score"]) for one in classes}


def _number(score: Any) -> float:
    return score if isinstance(score, int | float) and math.isfinite(score) else 0.0


def _best(scores: Mapping[Class, float], most: int) -> set[Class]:
    return set(sorted(scores, key=lambda key: (-scores[key], key[1], key[0]))[:most])


def _sure_labels(
    one: Mapping[Class, float], other: Mapping[Class, float], limits: CompareSettings
) -> set[Class]:
    """Returns those of the one that the other is far from."""
    least = _PARTNER * limits.score
    return {key for key, score in one.items() if score >= limits.score and other.get(key, 0.0) < least}


def _labels(keys: set[Class]) -> list[str]:
    return sorted(label or str(number) for label, number in keys)


def _jensen_shannon(one: Mapping[Class, float], other: Mapping[Class, float]) -> float:
    """0 to 1; what is not listed is one more class."""
    p, q = ([max(0.0, scores.get(key, 0.0)) for key in one.keys() | other.keys()] for scores in (one, other))
    p, q = ([*values, max(0.0, 1.0 - sum(values))] for values in (p, q))
    p, q = ([value / (sum(values) or 1.0) for value in values] for values in (p, q))
    bits = 0.0
    for x, y in zip(p, q, strict=True):
        middle = (x + y) / 2
        if middle:  # half of the smallest number is none
            bits += (x * math.log2(x / middle) if x else 0.0) + (y * math.log2(y / middle) if y else 0.0)
    return math.sqrt(max(0.0, bits / 2))


# ---- things at places: each that is sure needs a partner

Closeness = Callable[[int, int], float]
"""How alike a thing of the first answer and one of the second are, by their numbers: 0 to 1."""


@dataclass(slots=True)
class _Things:
    """Holds boxes and what goes with them, of one answer."""

    listed: Sequence[Answer]
    classes: list[Class]
    scores: Array
    boxes: Array  # [n, 4]

    @classmethod
    def of(cls, listed: Sequence[Answer]) -> _Things:
        scores = np.array([_number(thing["score"]) for thing in listed], np.float64)
        boxes = np.array([thing["box"] for thing in listed], np.float64).reshape(-1, 4)
        return cls(listed, [_class(thing) for thing in listed], scores, boxes)

    def only(self, which: Sequence[int]) -> _Things:
        rows = list(which)
        if not rows:
            return _NO_THINGS
        chosen = [self.listed[row] for row in rows], [self.classes[row] for row in rows]
        return _Things(*chosen, self.scores[rows], self.boxes[rows])


_NO_THINGS = _Things((), [], np.zeros(0), np.zeros((0, 4)))


def _compare_boxes(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    one, other = (_Things.of(answer["detections"]) for answer in (a, b))
    close = np.where(_may_be_partners(one, other, limits), _overlap(one, other), 0.0)
    return _partners(one, other, close, limits.iou, limits)


def _compare_poses(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    """A pose is its box and its points: both must be alike."""
    one, other = (_Things.of(answer["detections"]) for answer in (a, b))
    points = [[np.array(pose["keypoints"], np.float64) for pose in things.listed] for things in (one, other)]
    areas = [abs((things.boxes[:, 2:] - things.boxes[:, :2]).prod(axis=1)) for things in (one, other)]

    def alike(row: int, column: int) -> float:
        area = math.sqrt(areas[0][row] * areas[1][column])
        return keypoints_alike(points[0][row], points[1][column], area)

    boxes = _overlap(one, other)
    near = _may_be_partners(one, other, limits) & (boxes >= limits.iou)
    return _partners(one, other, np.minimum(boxes, _looked_closer(near, alike)), limits.iou, limits)


def _compare_rotated(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    one, other = (_Things.of(answer["detections"]) for answer in (a, b))
    corners = [[np.array(box["corners"], np.float64) for box in things.listed] for things in (one, other)]
    near = _may_be_partners(one, other, limits) & (_overlap(one, other) > 0.0)
    close = _looked_closer(near, lambda row, column: polygons_alike(corners[0][row], corners[1][column]))
    return _partners(one, other, close, limits.iou, limits)


def _compare_regions(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    """Compares quadrilaterals around text, which are all of one class."""
    one, other = ({"detections": _as_boxes(answer["regions"])} for answer in (a, b))
    return _compare_rotated(one, other, limits)


def _as_boxes(regions: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{**one, "label": "text", "class_id": 0, "corners": one["polygon"]} for one in regions]


def _compare_texts(a: Answer, b: Answer, limits: CompareSettings) -> Difference:  # noqa: ARG001
    """Compares the texts of one line, or of all lines of a page: what is read must be the same, however it is
    spaced."""
    one, other = (" ".join(str(answer["text"]).split()) for answer in (a, b))
    if "".join(one.split()) == "".join(other.split()):
        return Difference(False, 0.0, "the same text", {"alike": 1.0})
    alike = SequenceMatcher(None, one[:_LONGEST_TEXT], other[:_LONGEST_TEXT], autojunk=False).ratio()
    said = [f'"{text[:40]}"' for text in (one, other)]
    why = f"{said[0]} here, {said[1]} there"
    return Difference(True, max(1.0 - alike, _LEAST), why, {"alike": alike})


def _may_be_partners(one: _Things, other: _Things, limits: CompareSettings) -> Array:
    """Returns which pairs are of one class, and nearly sure both."""
    numbers = {key: number for number, key in enumerate({*one.classes, *other.classes})}
    mine, theirs = (np.array([numbers[key] for key in things.classes]) for things in (one, other))
    enough = _PARTNER * limits.score
    pairs: Array = mine[:, None] == theirs
    pairs &= (one.scores >= enough)[:, None] & (other.scores >= enough)
    return pairs


def _overlap(one: _Things, other: _Things) -> Array:
    """Returns the overlap of every pair of boxes; equal boxes are the same, even without area or with sides
    of NaN."""
    if all((things.boxes[:, 2:] > things.boxes[:, :2]).all() for things in (one, other)):
        return iou(one.boxes, other.boxes)
    mine, theirs = one.boxes[:, None], other.boxes
    same = ((mine == theirs) | (np.isnan(mine) & np.isnan(theirs))).all(axis=2)
    with np.errstate(all="ignore"):
        return np.where(same, 1.0, np.nan_to_num(iou(one.boxes, other.boxes)))


def _looked_closer(near: Array, alike: Closeness) -> Array:
    close = np.zeros(near.shape)
    for row, column in np.argwhere(near).tolist():
        close[row, column] = alike(row, column)
    return close


def _partners(
    one: _Things, other: _Things, close: Array, least: float, limits: CompareSettings
) -> Difference:
    """Returns whether everything that is sure has a partner so close, in both. If each side can be given
    partners by itself, both can be at once (Mendelsohn and Dulmage), so each is looked at by itself."""
    close = np.where(close >= max(least, 1e-9), close, 0.0)
    mine, theirs = (np.flatnonzero(things.scores >= limits.score).tolist() for things in (one, other))
    partner, back = matched(close[mine]), matched(close.T[theirs])
    missing = one.only([row for place, row in enumerate(mine) if place not in partner])
    extra = other.only([row for place, row in enumerate(theirs) if place not in back])
    rows, columns = [mine[place] for place in partner], list(partner.values())
    shifts = np.abs(one.scores[rows] - other.scores[columns]).tolist()
    details = {
        "missing": len(missing.listed),
        "extra": len(extra.listed),
        "another_class": _in_the_same_place(missing, extra, limits.iou),
        "score_shift": sum(shifts) / len(shifts) if shifts else 0.0,
        "classes": {"missing": _named(missing), "extra": _named(extra)},
    }
    lone, sure = len(missing.listed) + len(extra.listed), len(mine) + len(theirs)
    if not lone:
        found = [*close[rows, columns].tolist(), *(close[row, theirs[place]] for place, row in back.items())]
        apart = sum(1.0 - alike for alike in found) / max(1, len(found))
        return Difference(False, apart, "each has its partner", details)
    told = [
        f"{text} only {where}"
        for text, where in ((_in_words(missing), "here"), (_in_words(extra), "there"))
        if text
    ]
    return Difference(True, lone / sure, f"{lone} of {sure} have no partner: {'; '.join(told)}", details)


def _in_the_same_place(one: _Things, other: _Things, least: float) -> int:
    if not one.listed or not other.listed:
        return 0
    return int((_overlap(one, other) >= least).any(axis=1).sum())


def _named(things: _Things) -> dict[str, int]:
    return dict(Counter(label or str(number) for label, number in things.classes))


def _in_words(things: _Things) -> str:
    names = [
        f"{label or number} ({score:.2f})"
        for (label, number), score in zip(things.classes, things.scores.tolist(), strict=True)
    ]
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join(names[:_MOST_NAMED] + more)


# ---- masks and maps


def _compare_masks(a: Answer, b: Answer, limits: CompareSettings) -> Difference:
    if _one_per_object(a["masks"]) or _one_per_object(b["masks"]):
        one, other = (_Things.of(answer["masks"]) for answer in (a, b))
        areas = [[cut_out(mask) for mask in things.listed] for things in (one, other)]
        near = _may_be_partners(one, other, limits) & (_overlap(one, other) > 0.0)
        close = _looked_closer(near, lambda row, column: areas[0][row].alike(areas[1][column]))
        return _partners(one, other, close, limits.mask_iou, limits)
    mine, theirs = ({_class(mask): mask for mask in answer["masks"]} for answer in (a, b))
    found = {key: _map_alike(mine.get(key), theirs.get(key)) for key in sorted(mine.keys() | theirs.keys())}
    alike = {label or str(number): iou for (label, number), iou in found.items() if iou is not None}
    worst = min(alike, key=lambda name: alike[name], default="")
    if not worst:
        return Difference(False, 0.0, "nothing is found in either", {"iou": alike})
    why = f"{worst} covers {alike[worst]:.2f} of the same, and at least {limits.mask_iou:g} is required"
    return Difference(alike[worst] < limits.mask_iou, 1.0 - alike[worst], why, {"iou": alike})


def _one_per_object(masks: Sequence[Answer]) -> bool:
    """Rather than one per class: a class comes twice, or a box is not just the edge of the mask's pixels."""
    several = len({_class(mask) for mask in masks}) < len(masks)
    return several or any(side % 1 for mask in masks for side in mask["box"])


def _map_alike(a: Answer | None, b: Answer | None) -> float | None:
    """Returns how alike the pixels of one class are; None where it is too small in both to count."""
    cuts = [cut_out(mask) for mask in (a, b) if mask is not None]
    if not any(cut.pixels.sum() > _MAP_AREA * math.prod(cut.size) for cut in cuts):
        return None
    return cuts[0].alike(cuts[1]) if len(cuts) == 2 else 0.0


def _compare_depths(a: Answer, b: Answer, limits: CompareSettings) -> Difference:  # noqa: ARG001
    one, other = (_distances(answer["depth"]) for answer in (a, b))
    if one.shape != other.shape:
        return Difference(True, 1.0, "the maps have different sizes")
    ends = [answer["depth"][end] for answer in (a, b) for end in ("low", "high")]
    span = max(ends) - min(ends)
    gaps = np.abs(one - other)
    off = float((gaps > _DEPTH * span).mean()) if span > 0 else 0.0
    mean = float(gaps.mean()) / span if span > 0 else 0.0
    why = f"{off:.0%} of the pixels are off by more than a tenth of all distances"
    return Difference(off > _DEPTH, off, why, {"pixels_off": off, "mean_off": mean})


def _distances(depth: Answer) -> Array:
    steps = from_png(depth["png"]).astype(np.float32)
    values: Array = depth["low"] + steps * np.float32((depth["high"] - depth["low"]) / 65_535)
    return values


# ---- any answer, field by field


def _compare_fields(a: Answer, b: Answer, limits: CompareSettings) -> Difference:  # noqa: ARG001
    """Compares the fields of a task that brings no rule: texts and whole numbers are equal, others as alike
    as raw ones."""
    waiting: list[tuple[str, Any, Any]] = [
        (name, a.get(name), b.get(name)) for name in sorted({*a, *b} - {"model", "version"})
    ]
    seen, off = 0, list[str]()
    while waiting:
        name, one, other = waiting.pop()
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
            waiting += [(f"{name}.{key}", one[key], other[key]) for key in one]
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            waiting += [
                (f"{name}[{place}]", *pair) for place, pair in enumerate(zip(one, other, strict=True))
            ]
        else:
            seen += 1
            off += [] if _values_alike(one, other) else [name]
    named = ", ".join(sorted(off)[:_MOST_NAMED])
    why = f"{len(off)} of {seen} values differ: {named}" if off else "the values are alike"
    return Difference(bool(off), len(off) / seen if off else 0.0, why, {"values": seen, "differ": len(off)})


def _values_alike(a: Any, b: Any) -> bool:
    if not (isinstance(a, int | float) and isinstance(b, int | float) and float in (type(a), type(b))):
        return bool(a == b)
    return not _numbers_apart(np.array(a, np.float64), np.array(b, np.float64))[0]


_RULES: Mapping[str, Callable[[Answer, Answer, CompareSettings], Difference]] = {
    "detect": _compare_boxes,
    "classify": _compare_classes,
    "segment": _compare_masks,
    "pose": _compare_poses,
    "obb": _compare_rotated,
    "depth": _compare_depths,
    "embed": _compare_embeddings,
    "text_regions": _compare_regions,
    "read": _compare_texts,
    "caption": _compare_texts,
    "raw": _compare_raw,
}
