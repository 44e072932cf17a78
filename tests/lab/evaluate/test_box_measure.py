"""mAP is COCO's: the library's figures, ours for any choice of pictures, and pycocotools' agree."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.lab.evaluate.box_measure import BoxMeasure, Kept
from carpool.lab.evaluate.evaluation import gap_between
from carpool.lab.evaluate.labelled_data import Boxes
from carpool.vision.python_pictures import Classes, Detections

with contextlib.suppress(ImportError):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

NAMES = ("cat", "dog", "Traffic_Light")


def data_set(seed: int, pictures: int) -> tuple[Boxes, list[dict[str, Any]]]:
    """Objects, some of them crowds, and boxes that a model might have found: some right, some not."""
    draw = np.random.default_rng(seed)
    annotations: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for image in range(1, pictures + 1):
        for _ in range(draw.integers(0, 6)):
            x, y, width, height = (draw.integers(0, 200, 2).tolist()) + (draw.integers(4, 120, 2).tolist())
            category, crowd = int(draw.integers(1, 4)), int(draw.random() < 0.1)
            box = [float(side) for side in (x, y, width, height)]
            one = {"image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3]}
            annotations.append({"id": len(annotations) + 1, "iscrowd": crowd, **one})
            for _ in range(draw.integers(0, 3)):
                moved = [side + float(draw.normal(0, 6)) for side in box[:2]]
                grown = [max(1.0, side + float(draw.normal(0, 8))) for side in box[2:]]
                score = round(float(draw.random()), 2)  # so that some are equal
                other = category if draw.random() < 0.8 else int(draw.integers(1, 4))
                found.append(
                    {"image_id": image, "category_id": other, "bbox": [*moved, *grown], "score": score}
                )
    document = {
        "info": {},
        "images": [{"id": image, "width": 400, "height": 400} for image in range(1, pictures + 1)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES, 1)],
        "annotations": annotations,
    }
    files = tuple(Path(f"{image}.jpg") for image in range(1, pictures + 1))
    return Boxes(files, tuple(range(1, pictures + 1)), document), found


def kept_of(found: list[dict[str, Any]], images: list[int]) -> list[Kept]:
    kept = []
    for image in images:
        mine = [one for one in found if one["image_id"] == image]
        boxes = np.array([one["bbox"] for one in mine], np.float64).reshape(-1, 4)
        scores = np.array([one["score"] for one in mine], np.float64)
        kept.append(Kept(boxes, scores, np.array([one["category_id"] for one in mine], np.int64)))
    return kept


def reference(data: Boxes, found: list[dict[str, Any]], images: list[int]) -> Any:
    """pycocotools' twelve figures."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {**data.document, "annotations": [dict(one) for one in data.document["annotations"]]}
        truth.createIndex()
        results = truth.loadRes([dict(one) for one in found])
        evaluator = COCOeval(truth, results, "bbox")
        evaluator.params.imgIds = images
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return evaluator.stats


@pytest.mark.parametrize("seed", range(4))
def test_the_figures_are_those_of_pycocotools(seed: int) -> None:
    data, found = data_set(seed, 30)
    images = list(range(1, 31))
    scored = BoxMeasure(data, {}, 0.001, None).scored(kept_of(found, images), range(30))
    stats = reference(data, found, images)
    assert [scored.figures[name] for name in ("mAP", "mAP50", "mAP75")] == pytest.approx(stats[:3].tolist())
    assert scored.figure(np.ones(30)) == pytest.approx(stats[0])
    assert np.mean(list(scored.per_class.values())) == pytest.approx(stats[0])


@given(st.integers(0, 1000), st.integers(1, 2**12 - 1))
def test_a_choice_of_pictures_has_the_figure_of_those_alone(seed: int, chosen: int) -> None:
    data, found = data_set(seed, 12)
    places = [place for place in range(12) if chosen >> place & 1]
    inside = [place + 1 for place in places]
    if not any(one["image_id"] in inside and not one["iscrowd"] for one in data.document["annotations"]):
        return
    everything = BoxMeasure(data, {}, 0.001, None).scored(kept_of(found, list(range(1, 13))), range(12))
    alone = BoxMeasure(data, {}, 0.001, None).scored(kept_of(found, inside), places)
    weights = np.array([float(place in places) for place in range(12)])
    assert everything.figure(weights) == pytest.approx(alone.figures["mAP"], abs=1e-9)
    assert everything.figure(3 * weights) == pytest.approx(alone.figures["mAP"], abs=1e-9)


def test_nothing_found_is_nothing_right() -> None:
    data, _ = data_set(1, 5)
    scored = BoxMeasure(data, {}, 0.001, None).scored(kept_of([], [1, 2, 3, 4, 5]), range(5))
    assert scored.figures == {"mAP": 0.0, "mAP50": 0.0, "mAP75": 0.0}
    assert scored.figure(np.ones(5)) == 0.0


def answer(*things: tuple[str, list[float]]) -> Detections:
    listed = [{"label": label, "class_id": 0, "score": 0.9, "box": box} for label, box in things]
    return Detections({"image": {"width": 400, "height": 400}, "detections": listed})


def test_labels_are_mapped_by_name_and_the_rest_is_told() -> None:
    data, _ = data_set(3, 4)
    measure = BoxMeasure(data, {}, 0.25, 0.5)
    assert measure.options == {"score": 0.25, "max_detections": 300, "iou": 0.5}
    box = [10.0, 20.0, 40.0, 60.0]
    kept = [measure.read(0, answer(("CAT", box), ("traffic light", box), ("zebra", box)))]
    kept += [measure.read(place, answer()) for place in (1, 2, 3)]
    assert kept[0].categories.tolist() == [1, 3]
    assert kept[0].boxes.tolist() == [[10, 20, 30, 40]] * 2
    notes = measure.scored(kept, range(4)).notes
    assert notes[0] == "Not in the data, and not counted: zebra."
    assert "never named by the model" in notes[1]
    assert "dog" in notes[1]


def test_a_model_that_speaks_another_language_is_no_zero() -> None:
    data, _ = data_set(3, 1)
    measure = BoxMeasure(data, {}, 0.25, None)
    kept = [measure.read(0, answer(("17", [0, 0, 9, 9])))]
    with pytest.raises(InvalidInput, match="the model says 17, the data Traffic_Light, cat, dog"):
        measure.scored(kept, [0])
    with pytest.raises(InvalidInput, match="answers image, classes, not boxes"):
        measure.read(0, Classes({"image": {}, "classes": []}))


@pytest.mark.conformance
def test_the_difference_of_a_version_and_itself_is_surely_none() -> None:
    data, found = data_set(5, 20)
    images = list(range(1, 21))
    scored = BoxMeasure(data, {}, 0.001, None).scored(kept_of(found, images), range(20))
    gap = gap_between(scored, scored, 20, 0.0)
    assert (gap.difference, gap.low, gap.high, gap.worse, gap.sure) == (0, 0, 0, False, True)
    fewer = [one for one in found if one["score"] > 0.5]
    less = BoxMeasure(data, {}, 0.001, None).scored(kept_of(fewer, images), range(20))
    gap = gap_between(less, scored, 20, 0.005)
    assert gap.worse
    assert gap.low <= gap.difference <= gap.high
    assert gap.high < 0
    assert gap.sure
    assert not gap_between(less, scored, 20, 1.0).worse
