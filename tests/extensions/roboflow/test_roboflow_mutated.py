"""Requests of Roboflow's clients, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, classifier, detector, embedder, picture, writer

PHOTO = base64.b64encode(picture(RED)).decode()

IMAGE = {"type": "base64", "value": PHOTO}
ASKED = {"api_key": ALICE, "model_id": "finder/1", "image": IMAGE, "confidence": 0.4, "class_filter": ["red"]}


def post(path: str, document: object) -> Recorded:
    return Recorded("POST", f"/roboflow{path}", json.dumps(document).encode(), JSON)


RECORDED = [
    Recorded("GET", f"/roboflow/model/registry?api_key={ALICE}"),
    post("/model/add", {"model_id": "finder/1", "api_key": ALICE}),
    post("/infer/object_detection", ASKED),
    post("/infer/object_detection", ASKED | {"image": [IMAGE, IMAGE]}),
    post("/infer/classification", ASKED | {"model_id": "namer/1"}),
    post("/w/workflows/finder", {"api_key": ALICE, "inputs": {"image": IMAGE, "confidence": 0.5}}),
    post("/clip/embed_image", {"api_key": ALICE, "image": [IMAGE, IMAGE]}),
    post(
        "/clip/compare", {"api_key": ALICE, "subject": IMAGE, "prompt": {"a": IMAGE}, "prompt_type": "image"}
    ),
    post("/doctr/ocr", {"api_key": ALICE, "image": IMAGE, "generate_bounding_boxes": False}),
    Recorded("POST", f"/roboflow/finder/1?api_key={ALICE}&confidence=0.4", PHOTO.encode(), JSON),
]


def is_answer(status: int, document: Any) -> bool:
    if status == 200:
        return isinstance(document, dict | list)
    return isinstance(document, dict) and isinstance(document["message"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    models = detector(), classifier(), embedder(), writer()
    check_mutations("roboflow", RECORDED, is_answer, count, tmp_path, *models)
