"""Rows of zoo2026.py that need no library: heads that answer the same for each photo, with the names, shapes
and metadata that the families' exporters write, and their decoding as their repositories publish it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from carpool.types import Array
from zoo2026_compare import Thing
from zoo2026_row import Own, Processor, Row
from zoo_exports import COCO, cropped, letterboxed, stretched, ultralytics

_OF_TESTS = str(Path(__file__).parents[1] / "tests" / "vision")
sys.path.insert(0, _OF_TESTS)
try:
    from fixed_answers import answering
finally:
    sys.path.remove(_OF_TESTS)  # some modules there are called like others

SIDE = 320
_NAMES = [f"thing {number}" for number in range(5)]
_LEAST = 0.3


def heads() -> list[Row]:
    return [*_yolo(), *_other_detectors(), *_points(), *_images(), *_tensors(), *_own_four()]


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng((2026, seed))


def _file(
    outputs: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    side: tuple[int, int] = (SIDE, SIDE),
    name: str = "images",
    beside: Mapping[str, object] | None = None,
) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        lay_beside(folder, beside or {})
        return answering(folder / "net.onnx", outputs, {name: (1, 3, *side)}, metadata or {})

    return write


def lay_beside(folder: Path, beside: Mapping[str, object]) -> None:
    """JSON files, or lists of labels, which model.toml then names."""
    for name, content in beside.items():
        if isinstance(content, list):
            (folder / name).write_text("".join(f"{line}\n" for line in content))
            (folder / "model.toml").write_text(f'file = "net.onnx"\nlabels = "{name}"\n')
        else:
            (folder / name).write_text(json.dumps(content))


# ---- pixels


def boxed(share: int, *, bgr: bool, mean: Sequence[float], std: Sequence[float], grey: int) -> Processor:
    """A letterbox at the top left, by OpenCV: (pixel − mean) ÷ std ÷ share."""

    def make(photo: Image.Image, height: int, width: int) -> Array:
        pixels = np.asarray(photo)
        scale = min(height / pixels.shape[0], width / pixels.shape[1])
        across, down = round(pixels.shape[1] * scale), round(pixels.shape[0] * scale)
        canvas = np.full((height, width, 3), grey, np.uint8)
        canvas[:down, :across] = cv2.resize(pixels, (across, down), interpolation=cv2.INTER_LINEAR)
        canvas = canvas[:, :, ::-1] if bgr else canvas
        values: Array = ((canvas / share - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
        return values

    return make


def squeezed(mean: Sequence[float], std: Sequence[float]) -> Processor:
    def make(photo: Image.Image, height: int, width: int) -> Array:
        resized = cv2.resize(np.asarray(photo), (width, height), interpolation=cv2.INTER_LINEAR)
        values: Array = ((resized / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
        return values

    return make


# ---- YOLO, by Ultralytics' exporter: metadata in the file


def _anchors(fields: int, seed: int, count: int = 60) -> Array:
    """[fields, anchors] of boxes in the input's pixels: a few are sure, far apart."""
    random = _random(seed)
    total = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
    table = np.zeros((fields, total), np.float32)
    table[:2] = random.uniform(60, SIDE - 60, (2, total))
    table[2:4] = random.uniform(20, 110, (2, total))
    table[4:] = random.uniform(0, 0.05, (fields - 4, total))
    sure = random.choice(total, count, replace=False)
    table[4 + random.integers(0, 5, count) % (fields - 4), sure] = random.uniform(0.35, 0.95, count)
    return table


def to_photo(box: Sequence[float], size: tuple[int, int], sides: tuple[int, int]) -> list[float]:
    """Out of a letterbox around the middle, as Ultralytics' scale_boxes; cut at the photo's edges."""
    gain = min(sides[0] / size[1], sides[1] / size[0])
    left = round((sides[1] - round(size[0] * gain)) / 2 - 0.1)
    top = round((sides[0] - round(size[1] * gain)) / 2 - 0.1)
    moved = [(value - (top if axis % 2 else left)) / gain for axis, value in enumerate(box)]
    return [float(np.clip(value, 0, size[axis % 2])) for axis, value in enumerate(moved)]


def suppressed(boxes: Array, scores: Array, classes: Array, limit: float = 0.45) -> list[int]:
    """Greedy suppression among boxes of a class, one at a time."""
    kept: list[int] = []
    for at in np.argsort(-scores, kind="stable"):
        if all(classes[at] != classes[other] or _overlap(boxes[at], boxes[other]) <= limit for other in kept):
            kept.append(int(at))
    return kept


def _overlap(one: Array, other: Array) -> float:
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    shared = float(np.prod(np.maximum(high - low, 0)))
    areas = float(np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]))
    return shared / (areas - shared)


def _corners(boxes: Array) -> Array:
    """Centres and sizes [n, 4] as corners."""
    half = boxes[:, 2:4] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1)


def _raw(classes: int, *, more: str = "") -> Own:
    def own(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
        table = outputs["output0"].T
        scores = table[:, 4 : 4 + classes]
        rows = np.flatnonzero(scores.max(axis=1) >= _LEAST)
        boxes, best = _corners(table[rows]), scores[rows].argmax(axis=1)
        sure = scores[rows].max(axis=1)
        found = []
        for at in suppressed(boxes, sure, best):
            rest = table[rows[at], 4 + classes :]
            box = to_photo(boxes[at].tolist(), size, sides)
            extra: Any = None
            if more == "pose":
                extra = [_out(point, size, sides) for point in rest.reshape(17, 3)]
            elif more == "seg":
                extra = _instance(rest, outputs["output1"], box, size, sides)
            found.append(Thing(int(best[at]), float(sure[at]), box, extra))
        return found

    return own


def _out(point: Array, size: tuple[int, int], sides: tuple[int, int]) -> list[float]:
    """Where a point of the input lies in the photo, also beyond its edges."""
    gain = min(sides[0] / size[1], sides[1] / size[0])
    left, top = (sides[1] - round(size[0] * gain)) / 2, (sides[0] - round(size[1] * gain)) / 2
    return [(float(point[0]) - left) / gain, (float(point[1]) - top) / gain]


def _instance(
    weights: Array, prototypes: Array, box: Sequence[float], size: tuple[int, int], sides: tuple[int, int]
) -> Array:
    """What the prototypes add up to at the middle of each of the photo's pixels: above 0, and in the box."""
    values = (
        (weights @ prototypes.reshape(len(prototypes), -1)).reshape(prototypes.shape[1:]).astype(np.float32)
    )
    gain, each = min(sides[0] / size[1], sides[1] / size[0]), sides[0] / values.shape[0]
    left, top = (sides[1] - round(size[0] * gain)) // 2, (sides[0] - round(size[1] * gain)) // 2
    x = ((np.arange(size[0], dtype=np.float32) + 0.5) * gain + left) / each - 0.5
    y = ((np.arange(size[1], dtype=np.float32) + 0.5) * gain + top) / each - 0.5
    whole = cv2.remap(values, *np.meshgrid(x, y), cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    rows, columns = np.mgrid[: size[1], : size[0]] + 0.5
    x1, y1, x2, y2 = box
    mask: Array = (whole > 0) & (columns > x1) & (columns < x2) & (rows > y1) & (rows < y2)
    return mask


def _chosen(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    return [
        Thing(int(row[5]), float(row[4]), to_photo(row[:4].tolist(), size, sides))
        for row in outputs["output0"]
        if row[4] >= _LEAST
    ]


def _rotated(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    table = outputs["output0"].T
    found = []
    for row in table[table[:, 4:6].max(axis=1) >= _LEAST]:
        x, y, width, height = row[:4]
        cos, sin = np.cos(row[6]), np.sin(row[6])
        one, other = np.array([cos, sin]) * width / 2, np.array([-sin, cos]) * height / 2
        middle = np.array([x, y])
        ends = (middle + one + other, middle + one - other, middle - one - other, middle - one + other)
        corners = [_out(end, size, sides) for end in ends]
        found.append(Thing(int(row[4:6].argmax()), float(row[4:6].max()), (), corners))
    return found


def _yolo() -> list[Row]:
    eighty = ultralytics("detect", COCO)
    rows = np.zeros((300, 6), np.float32)
    random = _random(9)
    rows[:, :2] = random.uniform(10, 150, (300, 2))
    rows[:, 2:4] = rows[:, :2] + random.uniform(10, 150, (300, 2))
    rows[:, 4], rows[:, 5] = np.sort(random.uniform(0, 0.95, 300))[::-1], random.integers(0, 80, 300)
    pose = np.concatenate((_anchors(5, 11), np.zeros((51, _anchors(5, 11).shape[1]), np.float32)))
    pose[5:] = _random(12).uniform(0, 1, pose[5:].shape)
    pose[5::3], pose[6::3] = pose[5::3] * SIDE, pose[6::3] * SIDE
    parts = np.concatenate((_anchors(84, 13), _random(14).normal(0, 1, (32, _anchors(5, 1).shape[1]))))
    smooth = [cv2.resize(one, (80, 80)) for one in _random(15).normal(0, 1, (32, 4, 4)).astype(np.float32)]
    turned = np.zeros((7, _anchors(5, 1).shape[1]), np.float32)
    turned[:6] = _anchors(6, 16, 1)
    turned[4:6] *= 0.5
    spots = _random(17).choice(turned.shape[1], 9, replace=False)
    turned[0, spots], turned[1, spots] = (np.arange(9) % 3 + 0.5) * 100, (np.arange(9) // 3 + 0.5) * 100
    turned[2, spots], turned[3, spots] = 70, 30
    turned[4, spots], turned[6] = 0.9, _random(18).uniform(-46, 24, turned.shape[1])
    words = [f"a red {name}" for name in _NAMES]
    classes = np.exp(_random(19).normal(0, 2, 12)).astype(np.float32)
    classes /= classes.sum()
    semantic = _coarse(20, 19)
    depth = _smooth(21)[None] * 9 + 1
    raw = {"output0": _anchors(84, 8)}
    seg = {"output0": parts.astype(np.float32), "output1": np.stack(smooth)}
    points = ultralytics("pose", ["person"], kpt_shape="[17, 3]")

    def row(
        number: int, family: str, outputs: Mapping[str, Array], said: Mapping[str, str], **more: Any
    ) -> Row:
        made = more.pop("made", "Ultralytics' metadata, a head")
        return Row(
            number, family, made, _file(outputs, said), processor=more.pop("photo", letterboxed), **more
        )

    return [
        row(8, "YOLO26n, raw head", raw, eighty, task="detect", own=_raw(80)),
        row(9, "YOLO26n, end to end", {"output0": rows}, eighty, task="detect", own=_chosen),
        row(10, "YOLO11n", {"output0": _anchors(84, 10)}, eighty, task="detect", own=_raw(80)),
        row(10, "YOLO11n, nms=True", {"output0": rows}, eighty, task="detect", own=_chosen),
        row(11, "YOLO26n-pose", {"output0": pose}, points, task="pose", own=_raw(1, more="pose")),
        row(12, "YOLO26n-seg", seg, ultralytics("segment", COCO), task="segment", own=_raw(80, more="seg")),
        row(
            13,
            "YOLO26n-obb",
            {"output0": turned},
            ultralytics("obb", ["plane", "ship"]),
            task="obb",
            own=_rotated,
        ),
        row(
            14,
            "YOLO26n-cls",
            {"output0": classes},
            ultralytics("classify", [f"c{number}" for number in range(12)]),
            task="classify",
            photo=cropped(1.0, Image.Resampling.BILINEAR),
            own=lambda outputs, *_: _best(outputs["output0"]),
        ),
        row(
            15,
            "YOLO26n-sem",
            {"output0": semantic.astype(np.float32)},
            ultralytics("semantic", [f"c{number}" for number in range(19)]),
            task="segment",
            own=_class_map,
        ),
        row(
            16,
            "YOLO26n-depth",
            {"output0": depth.astype(np.float32)},
            ultralytics("depth", ["depth"]),
            task="depth",
            photo=squeezed((0.0,), (1.0,)),
            own=_distances,
        ),
        row(
            17,
            "YOLOE, YOLO-World v2, fixed classes",
            {"output0": _anchors(9, 17)},
            ultralytics("detect", words),
            task="detect",
            own=_raw(5),
        ),
        row(
            17,
            "YOLOE-seg, fixed classes",
            {
                "output0": np.concatenate((_anchors(9, 18), parts[84:])).astype(np.float32),
                "output1": np.stack(smooth),
            },
            ultralytics("segment", words),
            task="segment",
            own=_raw(5, more="seg"),
        ),
    ]


def _best(scores: Array) -> list[tuple[int, float]]:
    order = np.argsort(-scores, kind="stable")[:5]
    return [(int(at), float(scores[at])) for at in order]


def _smooth(seed: int, side: int = SIDE) -> Array:
    noise = _random(seed).random((6, 6), np.float32)
    return np.asarray(cv2.resize(noise, (side, side), interpolation=cv2.INTER_CUBIC))


def _coarse(seed: int, classes: int) -> Array:
    """A map of large patches with the number of a class."""
    numbers = _random(seed).integers(0, classes, (4, 4))
    return np.kron(numbers, np.ones((SIDE // 4, SIDE // 4), np.int64))


def _class_map(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> Array:
    """The letterbox's edges are cut off, then the nearest pixel counts."""
    numbers = np.squeeze(outputs["output0"])
    gain = min(sides[0] / size[1], sides[1] / size[0])
    across, down = round(size[0] * gain), round(size[1] * gain)
    left, top = (sides[1] - across) // 2, (sides[0] - down) // 2
    part = numbers[top : top + down, left : left + across]
    resized = cv2.resize(part.astype(np.float32), size, interpolation=cv2.INTER_NEAREST)
    return np.asarray(resized).astype(int)


def _distances(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> Array:
    """From the first pixel to the last, as align_corners does."""
    values = np.squeeze(outputs["output0"]).astype(np.float32)
    x = np.linspace(0, sides[1] - 1, size[0], dtype=np.float32)
    y = np.linspace(0, sides[0] - 1, size[1], dtype=np.float32)
    return np.asarray(cv2.remap(values, *np.meshgrid(x, y), cv2.INTER_LINEAR))


# ---- other detectors


def deployed(folder: Path) -> Path:
    """D-FINE, DEIM, RT-DETR: boxes times orig_target_sizes, as their deployment export has them."""
    random = _random(7)
    low = random.uniform(0, 0.6, (1, 20, 2))
    boxes = np.concatenate((low, low + random.uniform(0.1, 0.4, (1, 20, 2))), axis=2).astype(np.float32)
    scores = np.sort(random.uniform(0.1, 0.95, (1, 20)).astype(np.float32))[:, ::-1]
    labels = random.integers(0, 80, (1, 20))
    nodes = [
        helper.make_node("Cast", ["orig_target_sizes"], ["sizes"], to=TensorProto.FLOAT),
        helper.make_node("Tile", ["sizes", "twice"], ["four"]),
        helper.make_node("Unsqueeze", ["four", "one"], ["scale"]),
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Squeeze", ["mean", "last"], ["flat"]),
        helper.make_node("Mul", ["flat", "nothing"], ["none"]),
        helper.make_node("Add", ["places", "none"], ["placed"]),
        helper.make_node("Mul", ["placed", "scale"], ["boxes"]),
        helper.make_node("Squeeze", ["none", "two"], ["row"]),
        helper.make_node("Add", ["sure", "row"], ["scores"]),
        helper.make_node("Cast", ["row"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Add", ["numbers", "whole"], ["labels"]),
    ]
    made = {"twice": np.array([1, 2]), "one": np.array([1]), "last": np.array([3]), "two": np.array([2])}
    made |= {"nothing": np.zeros((), np.float32), "places": boxes, "sure": scores.copy(), "numbers": labels}
    begins = [
        ("images", TensorProto.FLOAT, ["N", 3, SIDE, SIDE]),
        ("orig_target_sizes", TensorProto.INT64, ["N", 2]),
    ]
    ends = [("labels", TensorProto.INT64, ["N", 20]), ("boxes", TensorProto.FLOAT, ["N", 20, 4])]
    ends += [("scores", TensorProto.FLOAT, ["N", 20])]
    return _saved(folder / "net.onnx", nodes, begins, ends, made)


def _saved(
    file: Path,
    nodes: Sequence[onnx.NodeProto],
    begins: Sequence[tuple[str, int, Sequence[int | str]]],
    ends: Sequence[tuple[str, int, Sequence[int | str]]],
    made: Mapping[str, Array],
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "head",
        [helper.make_tensor_value_info(*one) for one in begins],
        [helper.make_tensor_value_info(*one) for one in ends],
        [numpy_helper.from_array(values, name) for name, values in made.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(file))
    return file


def _deployed(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    """Boxes are in the photo's pixels if the input is told the photo's size; here it was told its own."""
    scale = np.array([size[0] / sides[1], size[1] / sides[0]] * 2)
    found = zip(outputs["labels"], outputs["scores"], outputs["boxes"] * scale, strict=True)
    return [Thing(int(label), float(score), box.tolist()) for label, score, box in found if score >= _LEAST]


def _yolox(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    table = outputs["output"]
    gain, at, boxes = min(sides[0] / size[1], sides[1] / size[0]), 0, []
    for stride in (8, 16, 32):
        for row in range(sides[0] // stride):
            for column in range(sides[1] // stride):
                x, y, width, height = table[at, :4]
                middle = (x + column) * stride, (y + row) * stride
                half = np.exp(width) * stride / 2, np.exp(height) * stride / 2
                boxes.append(
                    [middle[0] - half[0], middle[1] - half[1], middle[0] + half[0], middle[1] + half[1]]
                )
                at += 1
    scores = table[:, 4:5] * table[:, 5:]
    return _kept(np.array(boxes), scores, gain, size)


def _kept(
    boxes: Array, scores: Array, gain: float, size: tuple[int, int], limit: float = 0.45
) -> list[Thing]:
    rows = np.flatnonzero(scores.max(axis=1) >= _LEAST)
    best, sure = scores[rows].argmax(axis=1), scores[rows].max(axis=1)
    placed = np.clip(boxes[rows] / gain, 0, [*size, *size])
    return [
        Thing(int(best[at]), float(sure[at]), placed[at].tolist())
        for at in suppressed(boxes[rows], sure, best, limit)
    ]


def _rtmdet(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    gain = min(sides[0] / size[1], sides[1] / size[0])
    found = zip(outputs["labels"], outputs["dets"], strict=True)
    ends = [*size, *size]
    return [
        Thing(int(label), float(row[4]), np.clip(row[:4] / gain, 0, ends).tolist())
        for label, row in found
        if row[4] >= _LEAST
    ]


def _other_detectors() -> list[Row]:
    cells = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
    random = _random(29)
    free = np.zeros((cells, 10), np.float32)
    free[:, :2], free[:, 2:4] = random.uniform(-1, 2, (cells, 2)), random.uniform(0, 1.5, (cells, 2))
    free[:, 4], free[:, 5:] = random.uniform(0, 0.2, cells), random.uniform(0, 0.9, (cells, 5))
    sure = random.choice(cells, 30, replace=False)
    free[sure, 4] = random.uniform(0.7, 0.95, 30)
    low = random.uniform(10, 150, (100, 2))
    rows = np.concatenate((low, low + random.uniform(20, 120, (100, 2)), random.random((100, 1))), axis=1)
    final = {"dets": rows.astype(np.float32), "labels": random.integers(0, 80, 100)}
    nas = {
        "num_predictions": np.array([12]),
        "pred_boxes": rows[:, :4].astype(np.float32),
        "pred_scores": np.concatenate((np.linspace(0.9, 0.35, 12), np.zeros(88))).astype(np.float32),
        "pred_classes": random.integers(0, 80, 100),
    }
    megvii = boxed(1, bgr=True, mean=(0.0,), std=(1.0,), grey=114)
    mm = boxed(1, bgr=True, mean=(103.53, 116.28, 123.675), std=(57.375, 57.12, 58.395), grey=114)
    return [
        Row(
            7,
            "D-FINE, DEIM, RT-DETR",
            "deployment form, a head",
            deployed,
            "detect",
            stretched(Image.Resampling.BILINEAR),
            _deployed,
        ),
        Row(29, "YOLOX", "a head, not decoded", _file({"output": free}), "detect", megvii, _yolox),
        Row(29, "RTMDet", "mmdeploy's names, a head", _file(final, name="input"), "detect", mm, _rtmdet),
        Row(
            31,
            "YOLO-NAS",
            "super-gradients' names, a head",
            _file(nas, name="input"),
            "detect",
            letterboxed,
            _nas,
        ),
    ]


def _nas(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    count = int(outputs["num_predictions"].reshape(-1)[0])
    found = zip(outputs["pred_classes"], outputs["pred_scores"], outputs["pred_boxes"], strict=True)
    return [
        Thing(int(label), float(score), to_photo(box.tolist(), size, sides))
        for label, score, box in list(found)[:count]
        if score >= _LEAST
    ]


# ---- points


def _points() -> list[Row]:
    random = _random(30)
    levels: dict[str, Array] = {}
    for kind, width in (("score", 1), ("bbox", 4), ("kps", 10)):
        for stride in (8, 16, 32):
            count = 2 * (SIDE // stride) ** 2
            values = random.uniform(0.5, 4, (count, width))
            if kind == "score":
                values = random.uniform(0, 0.1, (count, 1))
                values[random.choice(count, 5, replace=False)] = random.uniform(0.6, 0.95, (5, 1))
            levels[f"{kind}_{stride}"] = values.astype(np.float32)
    bins = {"simcc_x": random.random((17, 384), np.float32), "simcc_y": random.random((17, 512), np.float32)}
    insight = boxed(1, bgr=False, mean=(127.5,), std=(128.0,), grey=0)
    rtm = _file(bins, side=(256, 192), name="input")
    return [
        Row(
            30,
            "SCRFD",
            "insightface's nine outputs, a head",
            _file(levels, name="input.1"),
            "pose",
            insight,
            _scrfd,
        ),
        Row(29, "RTMPose", "mmdeploy's names, a head", rtm, "pose", _person, _simcc),
    ]


def _scrfd(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    gain = min(sides[0] / size[1], sides[1] / size[0])
    boxes, scores, points = [], [], []
    for stride in (8, 16, 32):
        rows, columns = sides[0] // stride, sides[1] // stride
        for at, score in enumerate(outputs[f"score_{stride}"][:, 0]):
            x, y = at // 2 % columns * stride, at // 2 // columns * stride
            assert at // 2 < rows * columns
            left, top, right, bottom = outputs[f"bbox_{stride}"][at] * stride
            boxes.append([x - left, y - top, x + right, y + bottom])
            scores.append([score])
            pairs = outputs[f"kps_{stride}"][at].reshape(5, 2) * stride
            points.append((pairs + np.array((x, y))) / gain)
    every, sure = np.array(boxes), np.array(scores)
    rows_ = np.flatnonzero(sure[:, 0] >= _LEAST)
    kept = suppressed(every[rows_], sure[rows_, 0], np.zeros(len(rows_)), 0.4)
    placed = np.clip(every / gain, 0, [*size, *size])
    chosen = [rows_[at] for at in kept]
    return [Thing(0, float(sure[at, 0]), placed[at].tolist(), points[at]) for at in chosen]


def _person(photo: Image.Image, height: int, width: int) -> Array:
    """MMPose's crop around a box that is the whole photo, as its top-down pipeline makes it: padding 1.25."""
    matrix = _crop_of(photo.size, (height, width))
    crop = cv2.warpAffine(np.asarray(photo), matrix, (width, height), flags=cv2.INTER_LINEAR)
    values: Array = (
        (crop - np.array((123.675, 116.28, 103.53))) / np.array((58.395, 57.12, 57.375))
    ).transpose(2, 0, 1)
    return values


def _crop_of(size: tuple[int, int], sides: tuple[int, int]) -> Array:
    scale = max(size[0] * 1.25 / sides[1], size[1] * 1.25 / sides[0])
    corner = size[0] / 2 - sides[1] * scale / 2, size[1] / 2 - sides[0] * scale / 2
    return np.array([[1 / scale, 0, -corner[0] / scale], [0, 1 / scale, -corner[1] / scale]])


def _simcc(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> list[Thing]:
    across, down = outputs["simcc_x"], outputs["simcc_y"]
    matrix = _crop_of(size, sides)
    inside = np.stack((across.argmax(axis=1), down.argmax(axis=1)), axis=1) / 2
    points = (inside - matrix[:, 2]) / np.diag(matrix[:, :2])
    score = float(np.minimum(across.max(axis=1), down.max(axis=1)).mean())
    return [Thing(0, score, (0, 0, *size), points)]


# ---- images and maps


def _images() -> list[Row]:
    values = _smooth(32)
    inside = {
        "pred_score": np.array([0.71], np.float32),
        "pred_label": np.array([True]),
        "anomaly_map": values[None].astype(np.float32),
        "pred_mask": (values > 0.5)[None],
    }
    return [
        Row(
            32,
            "anomalib",
            "its four outputs, a head",
            _anomalib(inside),
            "anomaly",
            stretched(Image.Resampling.BILINEAR),
            _anomalous,
        ),
        Row(35, "super-resolution ×2", "a network of one layer", _twice, "restore", None, _enlarged),
    ]


def _anomalib(outputs: Mapping[str, Array]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        numbers = {
            name: value.astype(np.uint8) if value.dtype == bool else value for name, value in outputs.items()
        }
        return answering(folder / "net.onnx", numbers, {"input": (1, 3, SIDE, SIDE)}, {})

    return write


def _anomalous(outputs: Mapping[str, Array], size: tuple[int, int], _: tuple[int, int]) -> Any:
    values = cv2.resize(np.squeeze(outputs["anomaly_map"]), size, interpolation=cv2.INTER_LINEAR)
    return float(np.squeeze(outputs["pred_score"])), bool(np.squeeze(outputs["pred_label"])), values


def _twice(folder: Path) -> Path:
    nodes = [helper.make_node("Resize", ["input", "", "scales"], ["output"], mode="nearest")]
    begins = [("input", TensorProto.FLOAT, [1, 3, 256, 256])]
    ends = [("output", TensorProto.FLOAT, [1, 3, 512, 512])]
    return _saved(folder / "net.onnx", nodes, begins, ends, {"scales": np.array([1, 1, 2, 2], np.float32)})


def _enlarged(outputs: Mapping[str, Array], size: tuple[int, int], sides: tuple[int, int]) -> Array:
    values = np.clip(np.rint(outputs["output"] * 255), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    gain = min(sides[0] / size[1], sides[1] / size[0])
    across, down = 2 * round(size[0] * gain), 2 * round(size[1] * gain)
    left, top = (values.shape[1] - across) // 2, (values.shape[0] - down) // 2
    return values[top : top + down, left : left + across]


# ---- what tensors alone can ask, and says why


def _tensors() -> list[Row]:
    return [
        Row(33, "a network of volumes", "five dimensions", _shaped([1, 1, 16, 64, 64]), None, says="volume"),
        Row(33, "a network of videos", "five dimensions", _shaped([1, 8, 3, 64, 64]), None, says="video"),
        Row(
            33,
            "UNet of four channels",
            "a network of one layer",
            _shaped([1, 4, 64, 64]),
            None,
            says="4 channels",
        ),
        Row(34, "UNet of one channel", "a network of one layer", _shaped([1, 1, 64, 64]), "segment"),
        Row(40, "SAM's encoder", "its names, a head", _embedder, None, says="image_embeddings"),
    ]


def _shaped(dims: Sequence[int]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        nodes = [helper.make_node("Sigmoid", ["input"], ["output"])]
        kind = TensorProto.FLOAT
        return _saved(folder / "net.onnx", nodes, [("input", kind, dims)], [("output", kind, dims)], {})

    return write


def _embedder(folder: Path) -> Path:
    outputs = {"image_embeddings": _random(40).normal(0, 1, (256, 64, 64)).astype(np.float32)}
    return answering(folder / "net.onnx", outputs, {"images": (1, 3, 1024, 1024)}, {})


# ---- four more


def _own_four() -> list[Row]:
    return [
        Row(42, "YOLO11n, fp16", "Ultralytics' metadata, a head", _halves, "detect", letterboxed, _raw(80)),
        Row(
            43,
            "YOLO11n, weights in a file of their own",
            "Ultralytics' metadata, a head",
            _external,
            "detect",
            letterboxed,
            _raw(80),
        ),
        Row(
            44,
            "YOLO11n, a fixed batch of 8",
            "Ultralytics' metadata, a head",
            _eight,
            "detect",
            letterboxed,
            _raw(80),
        ),
    ]


def _detector(folder: Path) -> onnx.ModelProto:
    file = answering(
        folder / "net.onnx",
        {"output0": _anchors(84, 8)},
        {"images": (1, 3, SIDE, SIDE)},
        ultralytics("detect", COCO),
    )
    return onnx.load(str(file))


def _halves(folder: Path) -> Path:
    """Inputs and outputs of 16 bits, as half=True writes them."""
    model = _detector(folder)
    for weight in model.graph.initializer:
        weight.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name)
        )
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, str(folder / "net.onnx"))
    return folder / "net.onnx"


def _external(folder: Path) -> Path:
    model = _detector(folder)
    (folder / "net.onnx").unlink()
    onnx.save_model(
        model,
        str(folder / "net.onnx"),
        save_as_external_data=True,
        location="net.onnx_data",
        size_threshold=1024,
    )
    return folder / "net.onnx"


def _eight(folder: Path) -> Path:
    model = _detector(folder)
    table = np.repeat(_anchors(84, 8)[None], 8, axis=0)
    weight = next(one for one in model.graph.initializer if one.name == "output0_values")
    weight.CopyFrom(numpy_helper.from_array(table, weight.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, str(folder / "net.onnx"))
    return folder / "net.onnx"
