"""Names families whose files say nothing of pixels, by the names and shapes of their tensors: what their own
code does to an image follows from the family.

What several networks of a family do in different ways is a doubt: its value is the most usual one, and every
answer names it as assumed.
"""

from __future__ import annotations

from typing import NamedTuple

from carpool.config.onnx_outputs import Shapes

Shape = tuple[int, ...]

_VALUES = ("mean", "std")


class FamilyPixels(NamedTuple):
    """Says which preset is the family's, and which of its settings are doubts."""

    preset: str
    words: str
    doubts: tuple[str, ...] = ()


def family_pixels(inputs: Shapes, outputs: Shapes) -> FamilyPixels | None:
    """Returns what the tensors of a file say; None: they are those of many families, or of none."""
    names = {*outputs}
    if _rfdetr(outputs):
        return FamilyPixels("rfdetr", "called as RF-DETR's")
    if (
        "orig_target_sizes" in inputs and {"labels", "boxes", "scores"} <= names
    ):  # DEIMv2 has values of its own
        return FamilyPixels("rtdetr", "called as those of RT-DETR, D-FINE and DEIM for deployment", _VALUES)
    if names == {"dets", "labels"} and [len(outputs[name]) for name in ("dets", "labels")] == [3, 2]:
        return FamilyPixels("rtmdet", "called as mmdeploy's, and RTMDet's", ("resize", *_VALUES, "channels"))
    if {"simcc_x", "simcc_y"} <= names:
        return FamilyPixels(
            "rtmpose", "called as RTMPose's", ("resize",)
        )  # of a crop around a person, with room about it
    if {"pred_score", "anomaly_map"} <= names:
        return FamilyPixels("anomalib", "called as anomalib's")
    if _in_levels(list(outputs.values())):
        return FamilyPixels("scrfd", "shaped as SCRFD's, in three levels", _VALUES)
    return None


def _rfdetr(outputs: Shapes) -> bool:
    """Boxes and logits of queries, and perhaps a mask or keypoints for each."""
    boxes, logits = outputs.get("dets", ()), outputs.get("labels", ())
    more = {*outputs} - {"dets", "labels"}
    return len(boxes) == len(logits) == 3 and boxes[1:] == (logits[1], 4) and more <= {"masks", "keypoints"}


def _in_levels(shapes: list[Shape]) -> bool:
    """Returns whether there are scores, boxes and perhaps points, each for cells of 8, 16 and 32 pixels."""
    rows = sorted({shape[-2] for shape in shapes if len(shape) > 1})
    if len(rows) != 3 or rows[0] < 2 or [rows[0] * 4, rows[0] * 16] != rows[1:]:
        return False
    widths = (1, 4, 10)[: len(shapes) // 3]
    wanted = {(count, width) for count in rows for width in widths}
    return len(shapes) in (6, 9) and {shape[-2:] for shape in shapes} == wanted
