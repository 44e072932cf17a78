"""From a detector's raw scores to the boxes that stay: what each way costs, and whether it is exact.

Two questions, on the anchors of a 416 × 416 (3,549) and of a 640 × 640 picture (8,400), with 80 classes:
finding the anchors above the threshold, and suppressing boxes that overlap. Few candidates are what a street
scene gives; all of them are what a client gets who asks for score=0. At most 300 boxes are wanted.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import process_time

import cv2
import numpy as np

from carpool.types import Array
from carpool.vision.boxes import columns_above, from_centres, rows_above, suppress

CLASSES, MOST, OVERLAP, LEAST = 80, 300, 0.5, 0.25
ANCHORS = (3549, 8400)
Scene = tuple[Array, Array, Array]  # boxes, scores, classes
Way = Callable[[], object]


@dataclass(frozen=True)
class Row:
    step: str
    case: str
    way: str
    median_us: float
    fastest_us: float
    kept: int
    exact: bool


def scene(count: int, things: int, side: int) -> Scene:
    """Candidates in clusters around things, as detectors give them."""
    random = np.random.default_rng(count)
    centres, sizes = random.uniform(0, side, (things, 2)), random.uniform(20, 0.4 * side, (things, 2))
    which = random.integers(0, things, count)
    near = centres[which] + random.normal(0, 4, (count, 2))
    about = sizes[which] * np.exp(random.normal(0, 0.08, (count, 2)))
    boxes = from_centres(np.hstack((near, about))).astype(np.float32)
    scores = random.uniform(LEAST, 0.95, count).astype(np.float32)
    return boxes, scores, random.integers(0, CLASSES, things)[which]


def noise(count: int, side: int) -> Scene:
    """Small boxes everywhere, of which most stay."""
    random = np.random.default_rng(count)
    boxes = from_centres(np.hstack((random.uniform(0, side, (count, 2)), random.uniform(8, 60, (count, 2)))))
    scores = random.uniform(0, 1, count).astype(np.float32)
    return boxes.astype(np.float32), scores, random.integers(0, CLASSES, count)


def one_by_one(boxes: Array, scores: Array, classes: Array) -> Array:
    """The usual greedy loop: the best box against everything that is left."""
    order = np.argsort(-scores, kind="stable")
    x1, y1, x2, y2 = np.ascontiguousarray(boxes[order].T)
    areas, kinds = (x2 - x1) * (y2 - y1), classes[order]
    left, kept = np.arange(len(order)), []
    while len(left) and len(kept) < MOST:
        first, left = left[0], left[1:]
        kept.append(first)
        width = np.maximum(np.minimum(x2[first], x2[left]) - np.maximum(x1[first], x1[left]), 0)
        height = np.maximum(np.minimum(y2[first], y2[left]) - np.maximum(y1[first], y1[left]), 0)
        inter = width * height
        covered = inter > np.float32(OVERLAP) * (areas[first] + areas[left] - inter)
        left = left[~(covered & (kinds[left] == kinds[first]))]
    return order[np.array(kept, np.intp)]


def opencv(boxes: Array, scores: Array, classes: Array) -> Array:
    sized = np.hstack((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]))
    kept = cv2.dnn.NMSBoxesBatched(sized, scores, classes.astype(np.int32), 0.0, OVERLAP)
    return np.asarray(kept, np.intp).reshape(-1)[:MOST]


def carpool(boxes: Array, scores: Array, classes: Array) -> Array:
    return suppress(boxes, scores, OVERLAP, MOST, classes)


def rows_by_maximum(scores: Array) -> Array:
    return np.flatnonzero(scores.max(axis=1) >= LEAST)


def columns_by_number(scores: Array) -> Array:
    return np.flatnonzero((scores >= LEAST).any(axis=0))


def measure(way: Way, seconds: float) -> tuple[float, float]:
    """Median and fastest call in microseconds of CPU, over about so many seconds."""
    way()
    times: list[float] = []
    until = process_time() + seconds
    while len(times) < 3 or process_time() < until:
        begin = process_time()
        way()
        times.append((process_time() - begin) * 1e6)
    return median(times), min(times)


def suppression(seconds: float) -> list[Row]:
    rows = []
    for anchors in ANCHORS:
        side = 416 if anchors == 3549 else 640
        cases = {
            f"300 of {anchors} above": scene(300, 20, side),
            f"all {anchors}, 60 things": scene(anchors, 60, side),
            f"all {anchors}, noise": noise(anchors, side),
        }
        for case, given in cases.items():
            expected = one_by_one(*given)
            for way in (carpool, one_by_one, opencv):
                kept = way(*given)
                times = measure(partial(way, *given), seconds)
                rows.append(
                    Row("suppress", case, way.__name__, *times, len(kept), np.array_equal(kept, expected))
                )
    return rows


def thresholds(seconds: float) -> list[Row]:
    """Scores [anchors, classes] as in boxes_scores, and [classes, anchors] as in YOLOv8."""
    rows = []
    for anchors in ANCHORS:
        random = np.random.default_rng(1)
        by_anchor = (random.random((anchors, CLASSES), np.float32) ** 1500).astype(np.float32)
        by_class = np.ascontiguousarray(by_anchor.T)
        expected = int((by_anchor.max(axis=1) >= LEAST).sum())
        ways: dict[tuple[str, str], Callable[[], Array]] = {
            ("[anchors, classes]", "single numbers (carpool)"): partial(rows_above, by_anchor, LEAST),
            ("[anchors, classes]", "maxima"): partial(rows_by_maximum, by_anchor),
            ("[classes, anchors]", "maxima (carpool)"): partial(columns_above, by_class, LEAST),
            ("[classes, anchors]", "single numbers"): partial(columns_by_number, by_class),
        }
        for (layout, name), way in ways.items():
            found = len(way())
            times = measure(way, seconds)
            rows.append(Row("threshold", f"{anchors} {layout}", name, *times, found, found == expected))
    return rows


def show(rows: list[Row]) -> None:
    print(
        f"numpy {np.__version__}, OpenCV {cv2.__version__}, Python {platform.python_version()}; CPU µs a call"
    )
    print(f"{'step':10} {'case':26} {'way':26} {'median':>9} {'fastest':>9} {'kept':>5}  exact")
    for row in rows:
        exact = "yes" if row.exact else "no"
        print(
            f"{row.step:10} {row.case:26} {row.way:26} {row.median_us:9,.0f} {row.fastest_us:9,.0f} "
            f"{row.kept:5}  {exact}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    seconds = 0.1 if given.quick else 1.0
    rows = thresholds(seconds) + suppression(seconds)
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
