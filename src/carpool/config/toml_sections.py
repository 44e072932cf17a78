"""The tables of model.toml that describe pictures and runtimes."""

from __future__ import annotations

import re

from carpool.config.model import DetectSettings, FakeSettings, ImageSettings, OnnxruntimeSettings
from carpool.config.rules import shown
from carpool.config.table import Table

RESIZES = ("letterbox", "stretch", "crop")
CHANNELS = ("rgb", "bgr")
LAYOUTS = ("nchw", "nhwc")
DETECT_FORMATS = ("yolov5", "yolov8", "boxes_scores")
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
    return ImageSettings(
        size=_size(table),
        resize=table.text("resize", RESIZES) or default.resize,
        mean=_per_channel(table, "mean", table.numbers("mean", float("-inf"))) or default.mean,
        std=_per_channel(table, "std", table.numbers("std", 0, above=True)) or default.std,
        scale=table.number("scale", 0, above=True) or default.scale,
        channels=table.text("channels", CHANNELS) or default.channels,
        layout=table.text("layout", LAYOUTS),
    )


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
    )


def fake(table: Table | None) -> FakeSettings | None:
    if table is None:
        return None
    curve = table.text("curve")
    if curve is None:
        return FakeSettings()
    if not _CURVE.fullmatch(curve):
        raise table.error(
            "curve",
            f'must be ms per batch + ms per image, like "16+4", or batch:ms points, not {shown(curve)}',
        )
    return FakeSettings(curve)


def onnxruntime(table: Table | None) -> OnnxruntimeSettings:
    if table is None:
        return OnnxruntimeSettings()
    return OnnxruntimeSettings(
        providers=table.texts("providers"),
        intra_op_threads=table.integer("intra_op_threads", 1, MAX_THREADS),
        inter_op_threads=table.integer("inter_op_threads", 1, MAX_THREADS),
    )
