"""The tables of model.toml that describe pictures and runtimes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from carpool.config.model import (
    ClassifySettings,
    DetectSettings,
    EmbedSettings,
    FakeSettings,
    ImageSettings,
    OnnxruntimeSettings,
    SegmentSettings,
)
from carpool.config.rules import shown
from carpool.config.table import Table

RESIZES = ("letterbox", "stretch", "crop")
KERNELS = ("auto", "area", "bilinear", "bicubic")
ANCHORS = ("center", "top_left")
CHANNELS = ("rgb", "bgr")
LAYOUTS = ("nchw", "nhwc")
WHERE = ("auto", "cpu", "device")
DETECT_FORMATS = ("yolov5", "yolov8", "boxes_scores")
MAX_DETECTIONS = 1000
CLASS_ACTIVATIONS = ("softmax", "sigmoid", "none")
MAP_ACTIVATIONS = (*CLASS_ACTIVATIONS, "minmax")
MAX_CLASSES = 1 << 15
MAX_SIDE = 16384
MAX_THREADS = 1024

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_CURVE = re.compile(
    rf"\s*{_NUMBER}\s*\+\s*{_NUMBER}\s*|\s*\d{{1,5}}:{_NUMBER}(?:\s*,\s*\d{{1,5}}:{_NUMBER})*\s*"
)


def image(table: Table | None) -> ImageSettings | None:
    if table is None:
        return None
    default = ImageSettings()
    resize = table.text("resize", RESIZES) or default.resize
    _check_only_for(table, resize, {"pad": "letterbox", "anchor": "letterbox", "crop": "crop"})
    pad = table.integer("pad", 0, 255)
    return ImageSettings(
        size=_size(table),
        resize=resize,
        mean=_per_channel(table, "mean", table.numbers("mean", float("-inf"))) or default.mean,
        std=_per_channel(table, "std", table.numbers("std", 0, above=True)) or default.std,
        scale=table.number("scale", 0, above=True),
        channels=table.text("channels", CHANNELS) or default.channels,
        layout=table.text("layout", LAYOUTS),
        kernel=table.text("kernel", KERNELS) or default.kernel,
        pad=default.pad if pad is None else pad,
        anchor=table.text("anchor", ANCHORS) or default.anchor,
        crop=table.number("crop", 0, 1, above=True) or default.crop,
        decode=table.text("decode", WHERE) or default.decode,
    )


def _check_only_for(table: Table, resize: str, needs: Mapping[str, str]) -> None:
    """A key that another way to resize would ignore is a mistake."""
    for key, needed in needs.items():
        if table.has(key) and resize != needed:
            raise table.error(key, f'goes with resize = "{needed}", not with "{resize}"')


def _size(table: Table) -> tuple[int, int] | None:
    """One number for a square, or height and width."""
    if not isinstance(table.data.get("size"), list):
        side = table.integer("size", 1, MAX_SIDE)
        return None if side is None else (side, side)
    sides = table.integers("size", 1, MAX_SIDE) or ()
    if len(sides) != 2:
        raise table.error("size", f"must be one number, or height and width, not {len(sides)} numbers")
    return sides[0], sides[1]


def _per_channel(table: Table, key: str, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if values is not None and len(values) not in (1, 3):
        raise table.error(key, f"must be one number, or one per channel, not {len(values)} numbers")
    return values


def detect(table: Table | None) -> DetectSettings | None:
    if table is None:
        return None
    default = DetectSettings()
    score, iou = table.number("score", 0, 1), table.number("iou", 0, 1)
    return DetectSettings(
        format=table.text("format", DETECT_FORMATS),
        score=default.score if score is None else score,
        iou=default.iou if iou is None else iou,
        per_class=table.flag("per_class", default.per_class),
        normalized=table.flag("normalized", default.normalized),
        max_detections=table.integer("max_detections", 1, MAX_DETECTIONS) or default.max_detections,
        nms=table.text("nms", WHERE) or default.nms,
    )


def classify(table: Table | None) -> ClassifySettings | None:
    return None if table is None else ClassifySettings(table.text("activation", CLASS_ACTIVATIONS))


def segment(table: Table | None) -> SegmentSettings | None:
    if table is None:
        return None
    threshold = table.number("threshold", 0, 1)
    return SegmentSettings(
        activation=table.text("activation", MAP_ACTIVATIONS),
        threshold=SegmentSettings().threshold if threshold is None else threshold,
        background=table.integer("background", 0, MAX_CLASSES - 1),
    )


def embed(table: Table | None) -> EmbedSettings | None:
    return None if table is None else EmbedSettings(table.flag("normalize", EmbedSettings().normalize))


def fake(table: Table | None) -> FakeSettings | None:
    if table is None:
        return None
    curve = table.text("curve") or FakeSettings().curve
    if not _CURVE.fullmatch(curve):
        raise table.error(
            "curve",
            f'must be ms per batch + ms per image, like "16+4", or batch:ms points, not {shown(curve)}',
        )
    return FakeSettings(curve, table.text("device") or "")


def onnxruntime(table: Table | None) -> OnnxruntimeSettings:
    if table is None:
        return OnnxruntimeSettings()
    return OnnxruntimeSettings(
        providers=table.texts("providers"),
        intra_op_threads=table.integer("intra_op_threads", 1, MAX_THREADS),
        inter_op_threads=table.integer("inter_op_threads", 1, MAX_THREADS),
    )
