"""Names families of models whose outputs no task reads as they are, although other heads have their shapes.

What is named here is not taken for something else, and its owner learns what it seems to be.
"""

from __future__ import annotations

from typing import NamedTuple

from carpool.config.model import DYNAMIC
from carpool.vision.output_facts import Facts, OutputFact


class KnownFamily(NamedTuple):
    """`certain`: nothing else looks like this."""

    words: str
    certain: bool


_SERVED = "no task reads them"
KEYPOINTS_OF_BODIES = (14, 16, 17, 21, 26, 133)  # keypoints of hands and bodies
_STRIDES = (8, 16, 32)
_PER_CELL = (1, 2, 3)  # boxes


def known_family(facts: Facts) -> KnownFamily | None:
    shapes = {one.spec.name.lower(): one.shape for one in facts.outputs}
    if {"simcc_x", "simcc_y"} <= {*shapes}:
        return KnownFamily('they look like RTMPose\'s (SimCC), which task = "pose" reads', True)
    if {"dets", "labels"} < {*shapes} and shapes["dets"][1:] == (4,):
        more = next(name for name in shapes if name not in ("dets", "labels"))
        return KnownFamily(
            f'they look like RF-DETR\'s, of which task = "detect" reads all but "{more}"', True
        )
    if in_levels(facts):
        why = "boxes for each cell of several levels, which its own 6 or 9 outputs have in pairs of a cell"
        return KnownFamily(f"they look like SCRFD's, {why}: {_SERVED} otherwise", True)
    if any(offsets_of_cells(one, facts) and not _shares(one) for one in facts.floats(2)):
        what = "values behind the box are no probabilities: export it as YOLOX's own tools do"
        return KnownFamily(f"they look like YOLOX's without its decoding, but their {what}", True)
    return _heatmaps(facts)


def _cells(facts: Facts, stride: int) -> int:
    return -(-facts.height // stride) * -(-facts.width // stride)


def in_levels(facts: Facts) -> bool:
    """Returns whether each of two levels or more has a table of boxes of its own, with a row for each
    cell."""
    if DYNAMIC in (facts.height, facts.width):
        return False
    rows = {one.shape[0] for one in facts.floats(2) if one.shape[1] == 4}
    return any(sum(each * _cells(facts, stride) in rows for stride in _STRIDES) > 1 for each in _PER_CELL)


def offsets_of_cells(rows: OutputFact, facts: Facts) -> bool:
    """Looks for a row for each cell of all levels, with a box, an objectness and classes, whose box is
    neither where the cell is nor in fractions."""
    if rows.sample is None or rows.shape[1] < 6 or facts.height % 32 or facts.width % 32:
        return False
    cells = sum(_cells(facts, stride) for stride in _STRIDES)
    if rows.shape[0] != cells or rows.shape[1] == cells or spread_over(rows, facts):
        return False
    boxes = rows.sample[:, :4]
    return bool((boxes < 0).any() or (boxes > 1).any())


def _shares(rows: OutputFact) -> bool:
    return rows.sample is not None and bool((abs(rows.sample[:, 4:] - 0.5) <= 0.5).all())


def spread_over(rows: OutputFact, facts: Facts) -> bool:
    """Returns whether centres of boxes, a row each, lie all over the picture, in its pixels."""
    if rows.sample is None or not rows.sample.size:
        return False
    far = rows.sample[:, :2].max(axis=0)
    return bool(far[0] > facts.width / 2 and far[1] > facts.height / 2)


def _heatmaps(facts: Facts) -> KnownFamily | None:
    quarter = (facts.height // 4, facts.width // 4)
    for one in facts.floats(3):
        named = one.called("heatmap")
        if named or (one.shape[0] in KEYPOINTS_OF_BODIES and one.shape[1:] == quarter):
            words = f"{one} could be heatmaps of keypoints, as ViTPose's and HRNet's, for task = \"pose\""
            return KnownFamily(words, named)
    return None
