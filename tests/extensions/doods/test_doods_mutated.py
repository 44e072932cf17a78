"""Requests of DOODS' clients, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, detector, picture

PHOTO = base64.b64encode(picture(RED)).decode()

FIELDS = {**JSON, "doods-auth-key": ALICE}
ASKED = {"data": PHOTO, "detector_name": "finder", "detect": {"red": 50, "*": 90}, "id": "7"}
RECORDED = [
    Recorded("GET", "/doods/detectors", fields={"doods-auth-key": ALICE}),
    Recorded("POST", "/doods/detect", json.dumps(ASKED).encode(), FIELDS),
]


def is_answer(status: int, document: Any) -> bool:
    if status == 200:
        return "detectors" in document or isinstance(document["detections"], list)
    return list(document) == ["error"] and isinstance(document["error"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("doods", RECORDED, is_answer, count, tmp_path, detector())
