"""Writes predictions for Label Studio: regions in percent of the image, with the labels of the project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from carpool.errors import InvalidInput
from carpool.extensions.label_studio.label_config import Control
from carpool.types import Array

_WORD_BITS, _RUN_BITS = 8, (3, 4, 8, 16)
_LONGEST_RUN = 1 << 16
_CHANNELS = 4  # red, green, blue and opacity
_POINT_WIDTH = 0.75  # percent of the image


def prediction(control: Control, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prediction for one task. An image that is broken has none."""
    version = f"{answer.get('model', 'carpool')}/{answer.get('version', '1')}"
    if "error" in answer:
        return {"result": [], "score": 0.0, "model_version": version}
    regions = list(_WRITERS[control.tag](control, answer))
    scores = [one["score"] for one in regions if "score" in one]
    score = sum(scores) / len(scores) if scores else 0.0
    return {"result": regions, "score": score, "model_version": version}


def _region(control: Control, answer: Mapping[str, Any], kind: str, value: object) -> dict[str, Any]:
    image = answer["image"]
    return {
        "from_name": control.name,
        "to_name": control.to_name,
        "type": kind,
        "original_width": image["width"],
        "original_height": image["height"],
        "image_rotation": 0,
        "value": value,
    }


def _things(control: Control, answer: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns what the project has a label for, with that."""
    if key not in answer:
        raise InvalidInput(f"model '{answer['model']}' does not answer {control.tag}", reason="no-task")
    known = ((control.labels.get(one["label"].lower()), one) for one in answer[key])
    return [(label, one) for label, one in known if label is not None]


def _rectangles(control: Control, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    width, height = answer["image"]["width"], answer["image"]["height"]
    found = []
    for label, one in _things(control, answer, "detections"):
        left, top, right, bottom = one["box"]
        sides = {"x": 100 * left / width, "y": 100 * top / height}
        sides |= {"width": 100 * (right - left) / width, "height": 100 * (bottom - top) / height}
        value = {**sides, "rotation": 0, "rectanglelabels": [label]}
        found.append(_region(control, answer, "rectanglelabels", value) | {"score": one["score"]})
    return found


def _brushes(control: Control, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    from carpool.vision.mask_regions import from_run_lengths

    found = []
    for label, one in _things(control, answer, "masks"):
        pixels = from_run_lengths(one["rle"]["counts"], *one["rle"]["size"]) > 0
        value = {"format": "rle", "rle": packed_runs(pixels), "brushlabels": [label]}
        found.append(_region(control, answer, "brushlabels", value) | {"score": one["score"]})
    return found


def _points(control: Control, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the keypoints of all things. Models number them: the project's labels are in that order."""
    if not all("keypoints" in one for one in answer.get("detections", [{}])):
        raise InvalidInput(f"model '{answer['model']}' does not answer {control.tag}", reason="no-task")
    width, height = answer["image"]["width"], answer["image"]["height"]
    found = []
    for one in answer["detections"]:
        for label, point in zip(control.listed, one["keypoints"], strict=False):
            sides = {"x": 100 * point[0] / width, "y": 100 * point[1] / height, "width": _POINT_WIDTH}
            score = point[2] if len(point) > 2 else one["score"]
            value = {**sides, "keypointlabels": [label]}
            found.append(_region(control, answer, "keypointlabels", value) | {"score": score})
    return found


def _choices(control: Control, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = _things(control, answer, "classes")[:1]
    return [
        _region(control, answer, "choices", {"choices": [label]}) | {"score": one["score"]}
        for label, one in found
    ]


def _text(control: Control, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "text" not in answer:
        raise InvalidInput(f"model '{answer['model']}' does not answer {control.tag}", reason="no-task")
    score = {"score": answer["score"]} if "score" in answer else {}
    return [_region(control, answer, "textarea", {"text": [answer["text"]]}) | score]


_Writer = Callable[[Control, Mapping[str, Any]], Sequence[dict[str, Any]]]
_WRITERS: Mapping[str, _Writer] = {
    "RectangleLabels": _rectangles,
    "BrushLabels": _brushes,
    "KeyPointLabels": _points,
    "Choices": _choices,
    "TextArea": _text,
}


def packed_runs(pixels: Array) -> list[int]:
    """Returns a mask in Label Studio's own run lengths: of bytes, four for each pixel, row by row.

    In bits: how many bytes there are (32), the bits of a byte less one (5) and those of four kinds of
    lengths, less one (4 each). Then each run: 1, the kind of its length (2), its length less one, its byte.
    """
    flat = pixels.ravel()
    ends = np.append(np.flatnonzero(np.diff(flat)) + 1, flat.size)
    bits = [f"{flat.size * _CHANNELS:032b}", f"{_WORD_BITS - 1:05b}"]
    bits += [f"{size - 1:04b}" for size in _RUN_BITS]
    start = 0
    for end in ends.tolist():
        byte, left = 255 if flat[start] else 0, (end - start) * _CHANNELS
        while left:
            run = min(left, _LONGEST_RUN)
            bits.append(f"111{run - 1:016b}{byte:08b}")
            left -= run
        start = end
    joined = "".join(bits)
    whole = joined.ljust(-(-len(joined) // 8) * 8, "0")
    return list(int(whole, 2).to_bytes(len(whole) // 8, "big"))
