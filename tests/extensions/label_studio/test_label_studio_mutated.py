"""Requests of Label Studio, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from carpool.extensions.label_studio.label_access import ACCESS, SETUP, LabelAccess
from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, detector, picture

FIELDS = {**JSON, "Authorization": "Basic " + base64.b64encode(f"me:{ALICE}".encode()).decode()}
URL = "data:image/jpeg;base64," + base64.b64encode(picture(RED)).decode()
CONFIG = (
    '<View><Image name="image" value="$photo"/><RectangleLabels name="label" toName="image">'
    '<Label value="red"/></RectangleLabels></View>'
)
TASKS = [{"id": number, "data": {"photo": URL}} for number in range(3)]


def post(path: str, document: object) -> Recorded:
    return Recorded("POST", f"/label-studio/{path}", json.dumps(document).encode(), FIELDS)


RECORDED = [
    Recorded("GET", "/label-studio/health"),
    post("validate", {"config": CONFIG}),
    post("setup", {"project": "7.1", "schema": CONFIG, "hostname": "http://ls", "access_token": ALICE}),
    post("predict", {"tasks": TASKS, "project": "7.1", "label_config": CONFIG, "params": {"context": None}}),
]
_ACCESS = LabelAccess()
ANSWERS = {SETUP: _ACCESS.setup, ACCESS: _ACCESS.access}


def is_answer(status: int, document: Any) -> bool:
    return status == 200 or isinstance(document["error"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("label-studio", RECORDED, is_answer, count, tmp_path, detector(), answers=ANSWERS)
