"""sahi's own sliced prediction and its own merging beside ours, with the same model and settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.demo import bundled_models
from carpool.extensions.tiles.merging import Found, merged
from carpool.extensions.tiles.settings import TileSettings
from conformance.sahi_venv import Sahi, sahi_python
from extensions.tiles.photo_boards import board, png
from extensions.tiles.tiled_server import Objects, detect, nanodet_server, objects, without_partner

pytestmark = pytest.mark.conformance
MODEL = bundled_models() / "nanodet" / "1" / "model.onnx"
PICTURES, TILE = 20, 416
TYPES = {"nmm": "GREEDYNMM", "nms": "NMS"}


@pytest.fixture(scope="module")
def sahi() -> Iterator[Sahi]:
    with Sahi(sahi_python(), MODEL) as process:
        yield process


def test_sliced_predictions_are_equal(sahi: Sahi, tmp_path: Path) -> None:
    ways = [("nmm", "ios", True), ("nms", "iou", False), ("nms", "ios", True), ("nmm", "iou", True)]
    with nanodet_server(tmp_path / "models") as server:
        for number in range(PICTURES):
            merge, metric, whole = ways[number % len(ways)]
            file = tmp_path / f"{number}.png"
            file.write_bytes(png(board(number)))
            query = f"tile={TILE}&overlap=0.2&merge={merge}&metric={metric}&whole={int(whole)}"
            ours = objects(detect(server, file.read_bytes(), query))
            (theirs,) = sahi.ask(images=[str(file)], **_arguments(merge, metric, whole))["found"]
            said: Objects = [(int(one[5]), one[4], one[:4]) for one in theirs]
            assert len(said) > 3
            assert not without_partner(ours, said, 0.99, 0.01), number
            assert not without_partner(said, ours, 0.99, 0.01), number


def _arguments(merge: str, metric: str, whole: bool) -> dict[str, Any]:
    return {
        "slice_height": TILE,
        "slice_width": TILE,
        "perform_standard_pred": whole,
        "postprocess_type": TYPES[merge],
        "postprocess_match_metric": metric.upper(),
    }


@pytest.mark.parametrize("seed", range(40))
def test_boxes_are_merged_alike(sahi: Sahi, seed: int) -> None:
    chooses = random.Random(seed)
    merge, metric = chooses.choice(sorted(TYPES)), chooses.choice(("ios", "iou"))
    match, per_class = chooses.choice((0.3, 0.5, 0.7)), chooses.random() < 0.7
    boxes = []
    for _ in range(chooses.choice((2, 30, 300))):
        x, y = chooses.uniform(0, 400), chooses.uniform(0, 400)
        size = chooses.uniform(2, 120), chooses.uniform(2, 120)
        scored = chooses.randrange(100, 1000) / 1000
        boxes.append([x, y, x + size[0], y + size[1], scored, chooses.randrange(4)])
    ours = merged(
        [Found((x1, y1, x2, y2), score, number) for x1, y1, x2, y2, score, number in boxes],
        TileSettings(merge=merge, metric=metric, match=match, per_class=per_class),
    )
    theirs = sahi.ask(
        boxes=boxes,
        type=TYPES[merge],
        match_metric=metric.upper(),
        match_threshold=match,
        class_agnostic=not per_class,
    )
    said = sorted([[*one.box, one.score, one.class_id] for one in ours])
    assert said == [pytest.approx(one) for one in sorted(theirs)]
