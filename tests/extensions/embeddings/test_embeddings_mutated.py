"""Requests for embeddings, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, embedder, picture

FIELDS = {**JSON, "Authorization": f"Bearer {ALICE}"}
URL = "data:image/jpeg;base64," + base64.b64encode(picture(RED)).decode()
PART = {"type": "image_url", "image_url": {"url": URL}}


def post(**document: object) -> Recorded:
    return Recorded("POST", "/v1/embeddings", json.dumps({"model": "vector", **document}).encode(), FIELDS)


RECORDED = [
    post(input=[URL, URL], encoding_format="base64"),
    post(input=URL, modality="image", dimensions=3),
    post(messages=[{"role": "user", "content": [PART]}]),
    Recorded("GET", "/v1/models", fields={"Authorization": f"Bearer {ALICE}"}),
]


def is_answer(status: int, document: Any) -> bool:
    return "object" in document if status == 200 else isinstance(document["error"]["message"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("embeddings", RECORDED, is_answer, count, tmp_path, embedder())
