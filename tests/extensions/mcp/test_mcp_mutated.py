"""Messages of the Model Context Protocol, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, classifier, detector, picture

PHOTO = base64.b64encode(picture(RED)).decode()

FIELDS = {**JSON, "Authorization": f"Bearer {ALICE}"}


def message(method: str, params: object) -> Recorded:
    document = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    return Recorded("POST", "/mcp", json.dumps(document).encode(), FIELDS)


RECORDED = [
    message("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}}),
    message("tools/list", {}),
    message("tools/call", {"name": "detect", "arguments": {"image": PHOTO, "min_score": 0.5}}),
    message("tools/call", {"name": "classify", "arguments": {"image": PHOTO, "annotated": True, "top_k": 3}}),
    Recorded("POST", "/mcp/upload", picture(RED), {"Authorization": f"Bearer {ALICE}"}),
]


def is_answer(status: int, document: Any) -> bool:
    if document is None:
        return status == 202
    if "handle" in document:
        return status == 200
    return document["jsonrpc"] == "2.0" and ("error" in document) != ("result" in document)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("mcp", RECORDED, is_answer, count, tmp_path, detector(), classifier())
