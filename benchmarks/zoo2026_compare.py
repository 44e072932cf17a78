"""Compares an answer of Carpool with what a family's own code makes of the same outputs."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np

from carpool.types import Array
from carpool.vision.boxes import iou
from carpool.vision.mask_regions import from_run_lengths

_IOU = 0.95
_FEW_PIXELS = 128  # of a mask: slivers have no inside
_MASK_IOU = 0.9  # edges are a pixel apart where maps are enlarged in another order
_SCORE = 0.005
_PIXELS = 0.98  # of a map that are the same
_AREA = 2.0  # pixels: smaller boxes are dropped, which have no area at the picture's edge


class Thing(NamedTuple):
    """`more` are corners, points, or a mask [height, width]."""

    number: int  # of its class
    score: float
    box: Sequence[float]
    more: Any = None


def difference(task: str, answer: Mapping[str, Any], own: Any) -> str:
    if task in ("detect", "obb", "pose") or (task == "segment" and isinstance(own, list)):
        return _things(task, answer, own)
    return _RULES[task](answer, own)


def _things(task: str, answer: Mapping[str, Any], own: Sequence[Thing]) -> str:
    found = [_thing(task, one) for one in answer["masks" if task == "segment" else "detections"]]
    wanted = [one for one in own if task == "obb" or _area(one.box) > _AREA]
    found = [one for one in found if task == "obb" or _area(one.box) > _AREA]
    if not wanted:
        return "the family's own code finds nothing, which shows nothing"
    free, missing = list(found), 0
    for one in sorted(wanted, key=lambda thing: -thing.score):
        partner = next((other for other in free if _same(task, one, other)), None)
        missing += partner is None
        free = [other for other in free if other is not partner]
    if missing or free:
        return f"{missing} of {len(wanted)} are not found, and {len(free)} besides"
    return ""


def _thing(task: str, one: Mapping[str, Any]) -> Thing:
    more = {"obb": "corners", "pose": "keypoints"}.get(task)
    extra = one[more] if more else None
    if task == "segment":
        extra = _mask(one)
    return Thing(one["class_id"], one["score"], one["box"], extra)


def _area(box: Sequence[float]) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _same(task: str, one: Thing, other: Thing) -> bool:
    if one.number != other.number or abs(one.score - other.score) > _SCORE:
        return False
    if task == "obb":
        gap = min(
            float(np.abs(np.roll(one.more, turn, axis=0) - np.array(other.more)).max()) for turn in range(4)
        )
        return gap < 1.5
    overlap = float(iou(np.array([one.box], np.float64), np.array([other.box], np.float64))[0, 0])
    if task != "segment" and overlap < _IOU:
        return False
    if task == "pose":
        return float(np.abs(np.array(one.more)[:, :2] - np.array(other.more)[:, :2]).max()) < 1.5
    if task == "segment":
        mine, theirs = np.asarray(one.more, bool), np.asarray(other.more, bool)
        union = (mine | theirs).sum()
        return bool(
            union == 0 or (mine & theirs).sum() / union >= _MASK_IOU or (mine ^ theirs).sum() <= _FEW_PIXELS
        )
    return True


def _mask(one: Mapping[str, Any]) -> Array:
    height, width = one["rle"]["size"]
    return np.asarray(from_run_lengths(one["rle"]["counts"], height, width), bool)


def _classes(answer: Mapping[str, Any], own: Sequence[tuple[int, float]]) -> str:
    found = {one["class_id"]: one["score"] for one in answer["classes"]}
    wanted = dict(own)
    if set(found) != set(wanted):
        return f"classes {sorted(found)} instead of {sorted(wanted)}"
    apart = max(abs(found[number] - wanted[number]) for number in wanted)
    return "" if apart < _SCORE else f"scores are {apart:.3f} apart"


def _embedding(answer: Mapping[str, Any], own: Array) -> str:
    found, wanted = np.array(answer["embedding"]), own.reshape(-1)
    if found.shape != wanted.shape:
        return f"{found.size} numbers instead of {wanted.size}"
    cosine = float(found @ wanted / math.sqrt((found @ found) * (wanted @ wanted)))
    return "" if cosine > 0.9999 else f"the cosine is {cosine:.4f}"


def _map_of(written: Mapping[str, Any]) -> Array:
    data = np.frombuffer(base64.b64decode(written["png"]), np.uint8)
    steps = cv2.imdecode(data, cv2.IMREAD_UNCHANGED).astype(np.float64)
    found: Array = steps / 65_535 * (written["high"] - written["low"]) + written["low"]
    return found


def _values(answer: Mapping[str, Any], own: Array) -> str:
    return _apart(_map_of(answer["depth"]), own)


def _apart(found: Array, wanted: Array) -> str:
    if found.shape != wanted.shape:
        return f"a map of {found.shape} instead of {wanted.shape}"
    spread = float(np.ptp(wanted)) or 1.0
    off = float(np.abs(found - wanted).mean()) / spread
    return "" if off < 0.005 else f"the maps are {off:.3f} of their range apart"


def _regions(answer: Mapping[str, Any], own: Array) -> str:
    """`own` has the number of a class for each pixel."""
    found = np.full(own.shape, -1)
    for one in answer["masks"]:
        mask = _mask(one)
        if mask.shape != own.shape:
            return f"masks of {mask.shape} instead of {own.shape}"
        found[mask] = one["class_id"]
    same = float((found == own).mean())
    return "" if same >= _PIXELS else f"{same:.1%} of the pixels are of the same class"


def _text(answer: Mapping[str, Any], own: tuple[str, float]) -> str:
    return "" if answer["text"] == own[0] else f"{answer['text'][:40]!r} instead of {own[0][:40]!r}"


def _polygons(answer: Mapping[str, Any], own: Sequence[Array]) -> str:
    found = [np.array(one["polygon"], np.float32) for one in answer["regions"]]
    if len(found) != len(own):
        return f"{len(found)} regions instead of {len(own)}"
    for polygon in own:
        best = max((_shared(polygon.astype(np.float32), other) for other in found), default=0.0)
        if best < 0.8:
            return f"a region has an overlap of {best:.2f} at best"
    return ""


def _shared(one: Array, other: Array) -> float:
    hulls = [cv2.convexHull(polygon) for polygon in (one, other)]
    inside, _ = cv2.intersectConvexConvex(*hulls)
    both = sum(cv2.contourArea(hull) for hull in hulls)
    return float(inside / (both - inside)) if both > inside else 0.0


def _anomaly(answer: Mapping[str, Any], own: tuple[float, bool, Array]) -> str:
    score, anomalous, values = own
    found = answer["anomaly"]
    if abs(found["score"] - score) > _SCORE or found["anomalous"] != anomalous:
        return f"the score is {found['score']} instead of {score:.4f}"
    return _apart(_map_of(found["map"]), values)


def _picture(answer: Mapping[str, Any], own: Array) -> str:
    data = np.frombuffer(base64.b64decode(answer["restored"]["data"]), np.uint8)
    found = cv2.imdecode(data, cv2.IMREAD_COLOR)[:, :, ::-1]
    if max(abs(one - other) for one, other in zip(found.shape, own.shape, strict=True)) > 1:
        return f"an image of {found.shape} instead of {own.shape}"
    own = cv2.resize(own, found.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    off = float(np.abs(found.astype(float) - own).mean())
    return "" if off < 2.0 else f"pixels are {off:.1f} of 255 apart"


_RULES = {
    "classify": _classes,
    "embed": _embedding,
    "depth": _values,
    "segment": _regions,
    "read": _text,
    "text_regions": _polygons,
    "anomaly": _anomaly,
    "restore": _picture,
}
