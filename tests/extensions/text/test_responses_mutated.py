"""Requests for chats and responses, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, picture, writer

FIELDS = {**JSON, "Authorization": f"Bearer {ALICE}"}
URL = "data:image/jpeg;base64," + base64.b64encode(picture(RED)).decode()
IN_CHATS = [{"type": "text", "text": "Read"}, {"type": "image_url", "image_url": {"url": URL}}]
IN_RESPONSES = [{"type": "input_text", "text": "Read"}, {"type": "input_image", "image_url": URL}]


def post(path: str, **document: object) -> Recorded:
    return Recorded("POST", path, json.dumps({"model": "writer", **document}).encode(), FIELDS)


RECORDED = [
    post("/v1/responses", input=[{"role": "user", "content": IN_RESPONSES}], instructions="Read."),
    post(
        "/v1/responses", input=[{"role": "user", "content": IN_RESPONSES}], max_output_tokens=5, store=False
    ),
    post("/v1/chat/completions", messages=[{"role": "user", "content": IN_CHATS}], max_tokens=5),
    Recorded("GET", "/v1/models", fields={"Authorization": f"Bearer {ALICE}"}),
]


def is_answer(status: int, document: Any) -> bool:
    return "object" in document if status == 200 else isinstance(document["error"]["message"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("", RECORDED, is_answer, count, tmp_path, writer())
