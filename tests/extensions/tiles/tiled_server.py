"""A server of the demo's detector, and what it says of tiles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from carpool.demo import bundled_models
from carpool.vision.boxes import iou
from frontend.whole_server import PATIENCE_S, WholeServer, whole_server

Objects = list[tuple[int, float, list[float]]]
"""Class, score and box of each."""


@contextmanager
def nanodet_server(folder: Path, settings: str = "") -> Iterator[WholeServer]:
    """Without a promise, which a busy machine would break, and which takes long to measure."""
    shutil.copytree(bundled_models() / "nanodet", folder / "nanodet")
    file = folder / "nanodet" / "model.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("slo")]
    file.write_text("\n".join([*lines, "[onnxruntime]", "intra_op_threads = 1", settings, ""]))
    with whole_server(folder) as running:
        yield running


def detect(server: WholeServer, image: bytes, query: str = "") -> dict[str, Any]:
    request = Request(f"http://{server.url}/detect?{query}", image, {"Content-Type": "image/png"})
    with urlopen(request, timeout=PATIENCE_S) as response:
        document: dict[str, Any] = json.loads(response.read())
    return document


def objects(document: Mapping[str, Any]) -> Objects:
    return [(one["class_id"], one["score"], one["box"]) for one in document["detections"]]


def without_partner(left: Objects, right: Objects, least: float, apart: float) -> Objects:
    """Those of the left that no other of the right is like: of their class, with so much of the box and so
    little difference of the scores."""
    rest, lonely = list(right), []
    for class_id, score, box in left:
        places = [
            (float(iou(np.array([box]), np.array([other[2]]))[0, 0]), number)
            for number, other in enumerate(rest)
            if other[0] == class_id and abs(other[1] - score) <= apart
        ]
        best, number = max(places, default=(0.0, -1))
        if best >= least:
            del rest[number]
        else:
            lonely.append((class_id, score, box))
    return lonely
